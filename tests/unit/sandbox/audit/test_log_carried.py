"""A write of the log that its head carries in a signed slot: after any stop or refusal it reads like another write."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import verify
from sandbox.audit import log as store
from tests.unit.sandbox.audit.test_log import opened, paths, restore
from tests.unit.sandbox.audit.test_log_power import ISSUER, Disk, Files, cuts

FIELDS = {"run_id": "r", "agent_id": "a", "operator": None, "state": "s", "reason": "x" * 300}
# (records, whether they are carried), one write after the other.
WRITES = [
    [(1, True)],
    [(3, True)],
    [(store.MOST_RECORDS, True)],  # no slot has room for them
    [(3, True), (1, False)],
    [(3, True), (3, False)],
    [(2, True), (3, True)],
    [(1, True), (1, True), (1, False), (2, True)],
]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


def put(log: store.Ledger, count: int = 1, carried: bool = True) -> list[str]:
    return log.append_all([store.Record("run_state", FIELDS, n) for n in range(count)], issuer=ISSUER, carried=carried)


def contents(state: Path) -> Files:
    return tuple(path.read_bytes() for path in paths(state))


def verified(state: Path) -> verify.Report:
    """As `covenant audit verify` reads it."""
    events, chain, head = contents(state)
    key = audit_log_chain.read_public_key((state / "audit-head" / store.PUBLIC_KEY).read_bytes())
    return verify.verify(*audit_log_chain.completed(events, chain, audit_log_chain.read_head(head, key)), head, key)


def check(state: Path, expected: list[str], *, remarkable: bool = False) -> None:
    """These records are there, and unless ``remarkable`` nothing is to be said of the log."""
    assert [json.loads(line)["id"] for line in contents(state)[0].splitlines()] == expected
    report = verified(state)
    assert report.valid, report
    assert remarkable or report.notes == ()


def ready(state: Path) -> list[str]:
    """A log with one record."""
    with opened(state) as log:
        return put(log, carried=False)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("writes", "settles"), [*((one, False) for one in WRITES), ([(1, True), (2, True), (1, True)], True)], ids=str
)
def test_power_cut_at_any_point_loses_nothing_acknowledged(
    state: Path, monkeypatch: pytest.MonkeyPatch, writes: list[tuple[int, bool]], settles: bool
) -> None:
    made = [ready(state)]
    ends = [0]
    with monkeypatch.context() as patch, opened(state) as log:
        disk = Disk(state, patch)
        for count, carried in writes:
            made.append(made[-1] + put(log, count, carried))
            ends.append(len(disk.points))
            if settles:
                log.settle()
    chance, seen = random.Random(len(writes)), set()
    for number, (durable, now) in enumerate(disk.points, 1):
        done = max(i for i, end in enumerate(ends) if end <= number)
        may = [made[done], *([] if number == ends[done] else made[done + 1 : done + 2])]
        pieces = [list(cuts(*both, chance, 3)) for both in zip(durable, now, strict=True)]
        for i in range(max(len(one) for one in pieces)):
            disk.restore(tuple(one[i] if i < 2 and i < len(one) else chance.choice(one) for one in pieces))
            before = verified(state)
            with opened(state) as log:
                found = next((one for one in may if len(one) == log.count), None)
                assert found is not None, (number, log.count)
                assert before.valid or number != ends[done], before  # in the middle of another write
                seen.add(len(found))
                check(state, found, remarkable=True)  # of a head that was torn, until the next one is written
                check(state, [*found, *put(log, 2, carried=chance.random() < 0.5)])
    assert seen == {len(one) for one in made}


@pytest.mark.parametrize("before", [[], [(1, False)], [(2, True)]], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("played")
def test_kill_at_any_byte_loses_nothing_acknowledged(state: Path, before: list[tuple[int, bool]], count: int) -> None:
    """Yield what a killed writer leaves: each file in turn as far as it came, and the rest after it.

    A head is whole or absent: no kill comes between.
    """
    made = ready(state)
    with opened(state) as log:
        made += [one for number, carried in before for one in put(log, number, carried)]
    old = contents(state)
    with opened(state) as log:
        last = put(log, count)
    new = contents(state)
    for which in (0, 1):
        for size in {*range(len(old[which]), len(new[which]), 127), len(new[which])}:
            now = (new[0] if which else new[0][:size], new[1][:size] if which else old[1], old[2])
            restore(state, now)
            with opened(state) as log:
                assert log.count == len(made)
                check(state, [*made, *put(log, carried=False)])
    restore(state, new)
    with opened(state) as log:
        check(state, [*made, *last, *put(log, carried=False)])


@pytest.mark.parametrize(("name", "on"), [("write", 1), ("write", 2), ("pwritev", 1)])
def test_write_that_fails_is_not_in_log(state: Path, monkeypatch: pytest.MonkeyPatch, name: str, on: int) -> None:
    made = ready(state)
    real, calls = getattr(os, name), []

    def failing(*args: Any) -> Any:
        calls.append(args)
        done = None if name == "write" else real(*args)  # the kernel keeps in memory what it could not write
        if len(calls) == on:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args) if name == "write" else done

    with opened(state) as log:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            with pytest.raises(errors.LedgerError, match="could not be written"):
                put(log, 3)
        with pytest.raises(errors.LedgerError, match="takes no more records"):
            put(log)
    with opened(state) as log:
        check(state, [*made, *put(log, carried=False)])


def test_it_asks_disk_once_and_where_there_is_no_room_as_ever(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            place = Path(os.readlink(f"/proc/self/fd/{fd}")).name
            if (name != "pwritev" or args[-1] & os.RWF_DSYNC) and not place.startswith("#"):  # that has no name
                synced.append(place)
            return real(fd, *args)

        return call

    for name in ("fdatasync", "pwritev"):
        monkeypatch.setattr(os, name, watched(name))
    plain = [store.EVENTS, store.CHAIN, "head.json"]
    with opened(state) as log:
        synced.clear()  # what an opening asks of it (test_ledger_openings)
        # Of an empty log the other slot would say that there was nothing.
        made = put(log)
        assert synced == plain
        synced.clear()
        made += put(log)
        assert synced == ["head.json"]
        # The next one has the files synced first: the slot that it is written over would be the last to have them.
        made += put(log)
        assert synced[1:] == plain
        synced.clear()
        # Unless they were synced meanwhile.
        log.settle()
        made += put(log)
        assert synced == [store.EVENTS, store.CHAIN, "head.json"]
        log.settle()
        log.settle()
        assert synced == [store.EVENTS, store.CHAIN, "head.json", store.EVENTS, store.CHAIN]
        synced.clear()
        made += put(log, carried=False)
        assert synced == plain
        synced.clear()
        made += put(log, store.MOST_RECORDS)
        assert synced == plain
    check(state, made)


def test_writers_of_both_kinds_take_turns(state: Path) -> None:
    made = ready(state)
    with opened(state) as one, opened(state) as two:
        for i in range(24):
            made += put((one, two)[i % 2], 1 + i % 3, carried=bool(i & 2))
    check(state, made)


class Refusing:
    """A disk that refuses a sync of one of the files, has none of what was written to it since the last, and tells each
    open file of it once; what it could not write stays to be read, as if it had it."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths, self.disk = paths(state), list(contents(state))
        self.refuses: set[int] = set()
        self.untold: set[tuple[int, int]] = set()
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._sync(getattr(os, name)))
        written, really = os.pwritev, os.open

        def anew(*args: Any, **named: Any) -> int:
            fd = really(*args, **named)
            self.untold -= {(fd, which) for which in range(len(self.paths))}  # that of another, which was closed
            return fd

        monkeypatch.setattr(os, "open", anew)

        def pwritev(fd: int, pieces: Any, offset: int, flags: int) -> int:
            done = written(fd, pieces, offset, flags)
            self._have(fd)
            return done

        monkeypatch.setattr(os, "pwritev", pwritev)

    def _which(self, fd: int) -> int | None:
        place = os.readlink(f"/proc/self/fd/{fd}")
        return next((i for i, path in enumerate(self.paths) if str(path) == place), None)

    def _have(self, fd: int) -> None:
        if (which := self._which(fd)) is not None:
            self.disk[which] = self.paths[which].read_bytes()

    def _sync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            which = self._which(fd)
            if which in self.refuses:
                self.refuses.discard(which)
                others = (int(one) for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}"))
                self.untold |= {(other, which) for other in others if self._which(other) == which and other != fd}
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if which is not None and (fd, which) in self.untold:
                self.untold.discard((fd, which))
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(fd)
            self._have(fd)

        return sync


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("first", [True, False], ids=["another is told first", "it is told first"])
@pytest.mark.parametrize("how", ["refreshed", "lines", "rows", "append"])
def test_whoever_is_refused_while_log_is_read_writes_no_more(
    state: Path, monkeypatch: pytest.MonkeyPatch, which: int, first: bool, how: str
) -> None:
    """A sync of the whole file, the part that the head carries included, cuts off the bytes beyond the head."""
    made = ready(state)
    with opened(state) as log, opened(state) as second, opened(state) as third:
        made += put(log, 3)
        disk = Refusing(state, monkeypatch)
        second.refreshed()
        if first:
            disk.refuses.add(which)
            with pytest.raises(errors.LedgerError, match="could not be written"):
                put(second, carried=False)  # which leaves its rows behind the head, too
        else:
            for path, tail in zip(paths(state)[:2], (b'{"id":"', b'{"index":4,"event_id":"'), strict=True):
                path.write_bytes(path.read_bytes() + tail)
            disk.refuses.add(which)
        acts: dict[str, Callable[[], object]] = {
            "refreshed": third.refreshed,
            "lines": lambda: list(third.lines()),
            "rows": lambda: list(third.rows((0, 0, 0))),
            "append": lambda: put(third, carried=False),
        }
        with pytest.raises((OSError, errors.LedgerError)):
            acts[how]()
        with pytest.raises(errors.LedgerError, match="takes no more records"):
            put(third, carried=False)
    with opened(state) as log:
        made += put(log, carried=False)
    check(state, made)
    assert tuple(disk.disk) == contents(state)


def test_log_whose_first_write_was_waited_for_is_not_emptied_unseen(state: Path) -> None:
    with opened(state) as log:
        put(log, 3)
    whole = contents(state)
    slots = [whole[2][at : at + audit_log_chain.SLOT_BYTES] for at in (0, audit_log_chain.SLOT_BYTES)]
    for spoilt in (0, 1):
        blanked = [bytes(audit_log_chain.SLOT_BYTES) if i == spoilt else one for i, one in enumerate(slots)]
        restore(state, (b"", b"", b"".join(blanked)))
        assert not verified(state).valid
        with pytest.raises(errors.LedgerError, match="shorter than its signed head says"):
            opened(state)


@pytest.mark.parametrize("which", [0, 1])
def test_what_head_carries_covers_no_hole_before_it(state: Path, which: int) -> None:
    ready(state)
    with opened(state) as log:
        put(log, 2, carried=False)
        end = paths(state)[which].stat().st_size
        put(log, 2)
    whole = contents(state)
    for hole in (bytes(40), b"y" * 40):
        paths(state)[which].write_bytes(whole[which][: end - 41] + hole + whole[which][end - 1 :])
        holed = contents(state)
        with pytest.raises(errors.LedgerError, match="the last record is not the one that the head signs"):
            opened(state)
        assert contents(state) == holed  # nothing of the evidence was written over
        assert not verified(state).valid
    restore(state, whole)
    with opened(state) as log:
        assert log.count == 5


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["carried", "ordinary", "settled"])
def test_whoever_is_refused_sync_that_was_put_off_writes_no_more_and_next_writes_again(
    state: Path, monkeypatch: pytest.MonkeyPatch, which: int, how: str
) -> None:
    made = ready(state)
    with opened(state) as log, opened(state) as other:
        other.refreshed()
        disk = Refusing(state, monkeypatch)
        made += put(log, 3)
        disk.refuses.add(which)
        with pytest.raises((errors.LedgerError, OSError)):
            log.settle() if how == "settled" else put(log, carried=how == "carried")
        # Neither is anything taken by it, nor by another that was open and is told as well.
        for one in (log, other):
            with pytest.raises(errors.LedgerError):
                put(one, carried=False)
    again: list[tuple[Path, int]] = []
    pwrite = os.pwrite

    def seen(fd: int, data: Any, offset: int) -> int:
        again.append((Path(os.readlink(f"/proc/self/fd/{fd}")), offset))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", seen)
    with opened(state) as log:
        assert {path for path, _ in again} >= set(paths(state)[:2])
        made += put(log, carried=False)
    check(state, made)
    assert tuple(disk.disk) == contents(state)


def test_what_head_carries_is_put_in_its_place_and_what_was_changed_there_is_kept(state: Path) -> None:
    made = ready(state)
    with opened(state) as log:
        made += put(log, 2)
    whole = contents(state)
    for which, name in enumerate((store.EVENTS, store.CHAIN)):
        path, kept = paths(state)[which], whole[which]
        path.write_bytes(kept[:-200] + bytes(100))
        assert verified(state).valid
        with opened(state) as log:
            assert len(log.recovered) == 1
            assert "acknowledged bytes that it lacked" in log.recovered[0]
        check(state, made)
        path.write_bytes(kept[:-30] + b"y" + kept[-29:])
        assert verified(state).valid
        with opened(state) as log:
            assert f"`{name}` held other bytes than acknowledged" in log.recovered[0]
        check(state, made)
        assert contents(state) == whole
        [aside] = (state / "audit").glob(f"{name}.aside-*")
        assert aside.read_bytes().endswith(b"y" + kept[-29:])
        aside.unlink()
    # What is cut off before is not put in its place by anything.
    for which in (0, 1):
        paths(state)[which].write_bytes(b"")
        assert not verified(state).valid
        with pytest.raises(errors.LedgerError, match="shorter than its signed head says"):
            opened(state)
        restore(state, whole)


@pytest.mark.parametrize("count", [1, 3])
def test_of_slot_that_was_changed_nothing_is_believed(state: Path, count: int) -> None:
    """Then the head before it counts, which is what a torn write leaves, and verifying says that a slot is none."""
    made = ready(state)
    with opened(state) as log:
        put(log, count)
    whole = contents(state)
    raw = whole[2]
    key = audit_log_chain.read_public_key((state / "audit-head" / store.PUBLIC_KEY).read_bytes())
    newest = audit_log_chain.newest_head(raw, key)
    assert newest is not None
    end = newest[1] + audit_log_chain.SLOT_BYTES
    used = len(raw[newest[1] : end].rstrip(b" \n"))
    for at in [*range(newest[1], newest[1] + used, 13), newest[1] + used + 5, end - 1]:
        changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        found = audit_log_chain.read_head(changed, key)
        assert found is not None
        assert found.count == len(made), at
        assert not audit_log_chain.head_is_whole(changed, key)
    restore(state, (*whole[:2], raw[: newest[1]] + bytes(audit_log_chain.SLOT_BYTES) + raw[end:]))
    assert verified(state).notes
    with opened(state) as log:
        assert log.count == len(made)
        check(state, [*made, *put(log)])
