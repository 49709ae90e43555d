"""A write of the log that is acknowledged by one sync: it is as if it had been written like any other, whatever stops
the machine, and what it is acknowledged from decides nothing once the log went on."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policy import audit, errors, ledger, pending
from sandbox import ledger as store
from sandbox import ledger_pending
from tests.unit.sandbox.test_ledger_power import ISSUER, Disk, Files, cuts

# (records, whether by one sync), one write after the other.
WRITES = [
    [(1, True)],
    [(3, True)],
    [(store.MOST_RECORDS, True)],
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


def opened(state: Path) -> store.Ledger:
    return store.Ledger.open(state / "audit", head=state / "audit-head" / "head.json")


def put(log: store.Ledger, count: int = 1, one_sync: bool = True) -> list[str]:
    fields = {"run_id": "r", "agent_id": "a", "operator": None, "state": "s", "reason": "x" * 300}
    return log.append_all(
        [store.Record("run_state", fields, n) for n in range(count)], issuer=ISSUER, one_sync=one_sync
    )


def files(state: Path) -> tuple[Path, Path, Path, Path]:
    head = state / "audit-head"
    return state / "audit" / store.EVENTS, state / "audit" / store.CHAIN, head / "head.json", head / "pending"


def contents(state: Path) -> Files:
    return tuple(path.read_bytes() for path in files(state))


def restore(state: Path, what: Files) -> None:
    for path, content in zip(files(state), what, strict=True):
        path.write_bytes(content)
    for aside in (state / "audit").glob("*.aside-*"):
        aside.unlink()


def check(state: Path, expected: list[str], *, remarkable: bool = False) -> None:
    """These records are there, and unless ``remarkable`` nothing is to be said of the log."""
    events, chain, head, _ = contents(state)
    assert [json.loads(line)["id"] for line in events.splitlines()] == expected
    key = ledger.read_public_key((state / "audit-head" / store.PUBLIC_KEY).read_bytes())
    report = audit.verify(events, chain, head, key)
    assert report.valid, report
    assert remarkable or report.notes == ()


def ready(state: Path) -> list[str]:
    """A log with one record that is ready for a write by one sync."""
    with opened(state) as log:
        log.catch_up()
        return put(log, one_sync=False)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("writes", WRITES, ids=str)
def test_a_power_cut_at_any_point_loses_nothing_acknowledged(
    state: Path, monkeypatch: pytest.MonkeyPatch, writes: list[tuple[int, bool]]
) -> None:
    made = [ready(state)]
    ends = [0]
    with monkeypatch.context() as patch, opened(state) as log:
        disk = Disk(state, patch)
        for count, one_sync in writes:
            made.append(made[-1] + put(log, count, one_sync))
            ends.append(len(disk.points))
    chance, seen = random.Random(len(writes)), set()
    for number, (durable, now) in enumerate(disk.points, 1):
        done = max(i for i, end in enumerate(ends) if end <= number)
        may = [made[done], *([] if number == ends[done] else made[done + 1 : done + 2])]
        pieces = [list(cuts(*both, chance, 3)) for both in zip(durable, now, strict=True)]
        for i in range(max(len(one) for one in pieces)):
            disk.restore(tuple(one[i] if i < 2 and i < len(one) else chance.choice(one) for one in pieces))
            with opened(state) as log:
                found = next((one for one in may if len(one) == log.count), None)
                assert found is not None, (number, log.count)
                seen.add(len(found))
                check(state, found, remarkable=True)  # of a head that was torn, until the next one is written
                log.catch_up()
                check(state, [*found, *put(log, 2, one_sync=chance.random() < 0.5)])
    assert seen == {len(one) for one in made}


@pytest.mark.parametrize("before", [[], [(1, False)], [(2, True)]], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("played")
def test_a_kill_at_any_byte_loses_nothing_acknowledged(state: Path, before: list[tuple[int, bool]], count: int) -> None:
    """What a killed writer leaves: each file in its turn as far as it came, and what it was after."""
    made = ready(state)
    with opened(state) as log:
        made += [one for number, one_sync in before for one in put(log, number, one_sync)]
    old = contents(state)
    with opened(state) as log:
        last = put(log, count)
    new = contents(state)
    taken_over = 0
    for which in (0, 1, 3, 2):
        step = 127 if which < 3 else 1021
        for size in {*range(0, len(new[which]), step), 4095, 4096, 4097, len(new[which])}:
            torn = new[which][:size] + old[which][size:]
            now = tuple(new[i] if i in (0, 1, 3)[: (0, 1, 3, 2).index(which)] else old[i] for i in range(4))
            now = (*now[:which], torn, *now[which + 1 :])
            if which < 2 and size < len(old[which]):
                continue  # a file that was cut off is no crash of ours
            restore(state, now)
            with opened(state) as log:
                taken = log.count == len(made) + count
                assert taken or (log.count == len(made) and which != 2)
                taken_over += taken and which == 2 and size == 0
                check(state, [*made, *(last if taken else []), *put(log, one_sync=False)])
    assert taken_over == 1  # killed between its acknowledgement and its head


@pytest.mark.parametrize(("name", "on"), [("write", 1), ("write", 2), ("pwrite", 1), ("fdatasync", 1), ("pwritev", 1)])
def test_a_write_that_fails_is_not_in_the_log(state: Path, monkeypatch: pytest.MonkeyPatch, name: str, on: int) -> None:
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
        check(state, [*made, *put(log, one_sync=False)])


def test_it_asks_the_disk_once_and_where_there_is_no_room_as_ever(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            if name != "pwritev" or args[-1] & os.RWF_DSYNC:
                synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            return real(fd, *args)

        return call

    for name in ("fdatasync", "pwritev"):
        monkeypatch.setattr(os, name, watched(name))
    plain = [store.EVENTS, store.CHAIN, "head.json"]
    with opened(state) as log:
        made = put(log)  # its blocks are not there yet
        assert synced == plain
        log.catch_up()
        synced.clear()
        made += put(log)
        assert synced == ["pending"]
        # The next one has the files synced first, all three, before it writes over what they may lack.
        made += put(log)
        assert synced[1:] == [*plain, "pending"]
        synced.clear()
        log.catch_up()
        assert synced == [*plain, "pending"]  # a block of it that nobody reads, to have the disk awake
        synced.clear()
        made += put(log, one_sync=False)
        assert synced == plain
        synced.clear()
        made += [one for _ in range(2) for one in put(log, store.MOST_RECORDS)]
        with monkeypatch.context() as patch:
            patch.setattr(ledger_pending, "BYTES", 16_000)
            synced.clear()
            made += put(log, store.MOST_RECORDS)
            assert synced == [store.EVENTS, store.CHAIN, "head.json", "head.json"]
    check(state, made)


def test_writers_of_both_kinds_take_turns(state: Path) -> None:
    made = ready(state)
    with opened(state) as one, opened(state) as two:
        for i in range(24):
            made += put((one, two)[i % 2], 1 + i % 3, one_sync=bool(i & 2))
            if i % 5 == 0:
                one.catch_up()
    check(state, made)


def test_an_earlier_one_is_put_back_and_decides_nothing(state: Path) -> None:
    made = ready(state)
    with opened(state) as log:
        made += put(log, 2)
        earlier = files(state)[3].read_bytes()
        made += put(log, 2)
        made += put(log, one_sync=False)
    for content in (earlier, b"", b"\n" * 100, earlier[:-300], b"{}\n{}\n{}\n{}\n", bytes(ledger_pending.BYTES)):
        files(state)[3].write_bytes(content)
        with opened(state) as log:
            assert (log.count, log.recovered) == (len(made), [])
        check(state, made)
        # So it is for who reads the files alone.
        key = ledger.read_public_key((state / "audit-head" / store.PUBLIC_KEY).read_bytes())
        events, chain, head, raw = contents(state)
        found = pending.replay(raw, key)
        if found is not None:
            newest = ledger.read_head(head, key)
            assert pending.caught_up(events, chain, head, found, newest=newest) == (events, chain, head)


def test_rows_that_were_changed_are_not_put_right_in_silence(state: Path) -> None:
    ready(state)
    with opened(state) as log:
        put(log, 2)
    events, chain, _, _ = files(state)
    for path in (events, chain):
        kept = path.read_bytes()
        path.write_bytes(kept[:-30] + b"y" + kept[-29:])
        with pytest.raises(errors.LedgerError, match="holds other rows than `pending` does"):
            opened(state)
        path.write_bytes(kept)
    # The control: what a power cut leaves of them is completed, and said.
    kept = events.read_bytes()
    events.write_bytes(kept[:-200] + bytes(100))
    with opened(state) as log:
        assert log.recovered == [f"`{store.EVENTS}` got acknowledged rows from `pending` that it lacked"]
    assert events.read_bytes() == kept


def test_a_head_that_says_something_else_is_refused(state: Path, tmp_path: Path) -> None:
    """Two logs under one key, as a copy that was written to and put back in parts leaves them."""
    ready(state)
    before = contents(state)
    with opened(state) as log:
        put(log, 2)
    ours = contents(state)
    restore(state, before)
    with opened(state) as log:
        put(log, 2)
    theirs = contents(state)
    restore(state, (*theirs[:3], ours[3]))
    with pytest.raises(errors.LedgerError, match="holds other rows than `pending` does"):
        opened(state)
    restore(state, (*ours[:2], theirs[2], ours[3]))
    with pytest.raises(errors.LedgerError, match="its head and `pending` do not say the same"):
        opened(state)


def test_one_that_is_taken_away_or_replaced_while_the_log_is_open_is_noticed(state: Path) -> None:
    ready(state)
    with opened(state) as log:
        files(state)[3].unlink()
        with pytest.raises(errors.LedgerError, match="`pending` was removed while the log was open"):
            put(log)
    with opened(state) as log:
        files(state)[3].rename(state / "elsewhere")
        files(state)[3].write_bytes(b"")
        with pytest.raises(errors.LedgerError, match="`pending` was replaced while the log was open"):
            put(log)
