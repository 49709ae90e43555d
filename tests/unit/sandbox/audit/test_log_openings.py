"""Check the disk after an opening of the log.

The disk may differ from the bytes that the opening reads: the kernel reports a refused write once, and the process that
got the report may be dead.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Any, NoReturn

import pytest

from policy import errors
from policy.audit_log import chain as audit_log_chain
from sandbox.audit import log as store
from tests.unit.sandbox.audit.test_log import opened, paths, restore
from tests.unit.sandbox.audit.test_log_carried import FIELDS, Refusing, check, contents, put, ready, verified
from tests.unit.sandbox.audit.test_log_power import ISSUER, SECTOR


class KilledError(BaseException):
    """The process was killed."""


def die(*_: Any) -> NoReturn:
    raise KilledError


class Disk(Enum):
    """The fate of a slot that is written."""

    REFUSES = auto()
    HAS_IT_AND_REFUSES = auto()
    HAS_NOT_GOT_IT_WHEN_THE_WRITER_IS_KILLED = auto()
    HAS_A_PART_WHEN_THE_POWER_GOES = auto()


class Heads:
    """The disk's ``head.json``; the kernel keeps refused writes in memory as if the disk had them."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.next = paths(state)[2], list[Disk]()
        self.disk = self.path.read_bytes()
        written = os.pwritev

        def pwritev(fd: int, pieces: Any, offset: int, flags: int) -> int:
            done = written(fd, pieces, offset, flags)
            if os.readlink(f"/proc/self/fd/{fd}") == str(self.path):
                self._write(b"".join(pieces), offset, synced=bool(flags & os.RWF_DSYNC))
            return done

        monkeypatch.setattr(os, "pwritev", pwritev)

    def _write(self, content: bytes, offset: int, *, synced: bool) -> None:
        becomes = self.next.pop(0) if self.next else None
        if becomes is Disk.HAS_A_PART_WHEN_THE_POWER_GOES:
            assert content[SECTOR:].strip(), "all of it is in one sector"
            content = content[:SECTOR]
        if becomes not in (Disk.REFUSES, Disk.HAS_NOT_GOT_IT_WHEN_THE_WRITER_IS_KILLED) and synced:
            self.disk = self.disk[:offset] + content + self.disk[offset + len(content) :]
        if becomes in (Disk.REFUSES, Disk.HAS_IT_AND_REFUSES):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if becomes is not None:
            die()

    def power_goes(self) -> None:
        self.path.write_bytes(self.disk)


@pytest.fixture
def state(tmp_path: Path, played: None) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


def some(state: Path) -> list[str]:
    """Make a log with so many records that a head's marks reach into its second sector."""
    made = ready(state)
    with opened(state) as log:
        return [*made, *put(log, 12, carried=False)]


@pytest.mark.parametrize("carried", [True, False])
def test_head_that_was_refused_and_reached_disk_is_not_there_when_power_goes(
    state: Path, monkeypatch: pytest.MonkeyPatch, carried: bool
) -> None:
    """Restoring the old head was refused as well. The new one would name rows that the next opening sets aside."""
    made = some(state)
    heads = Heads(state, monkeypatch)
    with opened(state) as log:
        heads.next = [Disk.HAS_IT_AND_REFUSES, Disk.REFUSES]
        with pytest.raises(errors.LedgerError, match="could not be written"):
            put(log, carried=carried)
    with opened(state) as log:
        heads.next = [Disk.HAS_NOT_GOT_IT_WHEN_THE_WRITER_IS_KILLED]
        with pytest.raises(KilledError):
            put(log, 3, carried=False)
    heads.power_goes()
    with opened(state) as log:
        check(state, [*made, *put(log, carried=False)])


@pytest.mark.parametrize("carried", [True, False])
def test_head_returned_is_on_disk_for_whoever_had_log_open(
    state: Path, monkeypatch: pytest.MonkeyPatch, carried: bool
) -> None:
    made = some(state)
    with opened(state) as log, opened(state) as other:
        heads = Heads(state, monkeypatch)
        heads.next = [Disk.HAS_IT_AND_REFUSES]
        with pytest.raises(errors.LedgerError, match="could not be written"):
            put(log, carried=carried)
        heads.next = [Disk.HAS_NOT_GOT_IT_WHEN_THE_WRITER_IS_KILLED]
        with pytest.raises(KilledError):
            put(other, 3, carried=False)
    heads.power_goes()
    with opened(state) as log:
        check(state, [*made, *put(log, carried=False)])


@pytest.mark.parametrize("carried", [True, False])
def test_head_that_opening_goes_on_from_is_on_disk(state: Path, monkeypatch: pytest.MonkeyPatch, carried: bool) -> None:
    """The disk refused the head and its writer died: the opening reads it from memory alone.

    The next write replaces the slot that the disk has.
    """
    made = some(state)
    with opened(state) as log:
        heads = Heads(state, monkeypatch)
        heads.next = [Disk.HAS_NOT_GOT_IT_WHEN_THE_WRITER_IS_KILLED]
        with pytest.raises(KilledError):
            put(log, carried=carried)
    with opened(state) as log:
        assert log.count == len(made) + 1
        heads.next = [Disk.HAS_A_PART_WHEN_THE_POWER_GOES]
        with pytest.raises(KilledError):
            put(log, carried=False)
    heads.power_goes()
    with opened(state) as log:
        assert log.count == len(made) + 1
        assert [json.loads(line)["id"] for line in contents(state)[0].splitlines()][:-1] == made
        assert verified(state).valid


def test_opening_that_power_ends_leaves_head_of_what_was_acknowledged(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither slot on the disk is as the opening reads it.

    The disk refused the newest slot and its writer died. The other slot is from a later write, refused twice: only this
    one is the last that the disk has.
    """
    made = some(state)
    with opened(state) as log, opened(state) as other:
        heads = Heads(state, monkeypatch)
        heads.next = [Disk.HAS_NOT_GOT_IT_WHEN_THE_WRITER_IS_KILLED]
        with pytest.raises(KilledError):
            put(log, carried=False)
        heads.next = [Disk.HAS_IT_AND_REFUSES, Disk.REFUSES]
        with pytest.raises(errors.LedgerError, match="could not be written"):
            put(other, carried=False)
    heads.next = [Disk.HAS_A_PART_WHEN_THE_POWER_GOES]
    with pytest.raises(KilledError):
        opened(state)
    heads.power_goes()
    with opened(state) as log:
        assert [json.loads(line)["id"] for line in contents(state)[0].splitlines()][: len(made)] == made
        assert log.count >= len(made)
        assert verified(state).valid


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of files that are synced, or written and synced, from now on."""
    seen: list[str] = []

    def watch(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            seen.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            return real(fd, *args)

        return call

    for name in ("fdatasync", "pwritev"):
        monkeypatch.setattr(os, name, watch(name))
    return seen


def test_what_head_of_another_process_carries_is_synced_before_it_is_written_over(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(state) as one, opened(state) as other:
        put(one, carried=False)
        put(one)
        synced = watched(monkeypatch)
        put(other)
        assert synced == [store.EVENTS, store.CHAIN, "head.json"]


def test_what_opening_writes_again_is_on_disk(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready(state)
    disk = Refusing(state, monkeypatch)
    with opened(state) as log:
        made += put(log, 2)
    assert tuple(disk.disk) != contents(state)  # the control
    with opened(state):
        assert tuple(disk.disk) == contents(state)
    check(state, made)


def test_what_was_set_aside_does_not_come_back_behind_rows_that_head_carries(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening that set the rows aside was killed before its cut was on disk; the next one finds nothing to cut."""
    made = ready(state)
    with opened(state) as log, pytest.raises(KilledError):
        log.append_all([store.Record("run_state", FIELDS, n) for n in range(3)], issuer=ISSUER, meanwhile=die)
    disk = Refusing(state, monkeypatch)  # the disk has all of that by now
    cut = os.ftruncate

    def cut_and_die(fd: int, size: int) -> None:
        cut(fd, size)
        die()

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", cut_and_die)
        with pytest.raises(KilledError):
            opened(state)
    with opened(state) as log:
        made += put(log)
    restore(state, (*disk.disk[:2], contents(state)[2]))
    with opened(state) as log:
        assert log.count == len(made)
        check(state, [*made, *put(log, carried=False)])


def test_log_that_was_found_broken_takes_no_record_afterwards(state: Path) -> None:
    with opened(state) as log, opened(state) as other:
        put(log, 2, carried=False)
        path = paths(state)[0]
        path.write_bytes(path.read_bytes().replace(b'xx"}}\n', b'xy"}}\n'))
        broken = contents(state)
        for act in (other.refreshed, lambda: put(other, carried=False)):
            with pytest.raises(errors.LedgerError, match="the last record is not the one that the head signs"):
                act()
    assert contents(state) == broken


def test_nothing_is_moved_where_one_file_is_refused(state: Path) -> None:
    ready(state)
    events, chain, _ = paths(state)
    with events.open("ab") as stream:
        stream.write(b'{"id":"')
    with chain.open("ab") as stream:
        stream.write(b"forged\nforged\n")
    before = contents(state)
    with pytest.raises(errors.LedgerError, match="that no writer of ours leaves"):
        opened(state)
    assert contents(state) == before
    assert list((state / "audit").glob("*.aside-*")) == []


def test_of_log_empty_verifying_says_that_it_may_have_been_emptied(state: Path) -> None:
    with opened(state):
        pass
    [fresh] = verified(state).notes
    made = ready(state)
    check(state, made)
    head = contents(state)[2]
    blank = b" " * (audit_log_chain.SLOT_BYTES - 1) + b"\n"
    restore(state, (b"", b"", head[: audit_log_chain.SLOT_BYTES] + blank))  # the head of the empty log is still there
    report = verified(state)
    assert report.valid
    assert report.notes == (fresh,)
    assert "the log is empty" in fresh
