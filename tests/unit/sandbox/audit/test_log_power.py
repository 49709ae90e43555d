"""Check a power cut at any point of a write.

It may lose any sectors and any part of the size that were written since a file's last sync. No acknowledged row is
lost, and no unacknowledged row is ever signed.
"""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import verify
from sandbox.audit import log as store
from tests.unit.sandbox.audit.test_log import opened

ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}
# The smallest unit that a disk writes whole, in bytes.
SECTOR = 512
Files = tuple[bytes, ...]


class Disk:
    """The certain and the possible content of the log's files on disk, after each call of a write."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = (
            state / "audit" / store.EVENTS,
            state / "audit" / store.CHAIN,
            state / "audit-head" / "head.json",
        )
        self.durable = self.files()
        self.points: list[tuple[Files, Files]] = []
        for name, synced in (("write", False), ("fdatasync", True), ("pwritev", None)):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name), synced))

    def files(self) -> Files:
        return tuple(path.read_bytes() for path in self.paths)

    def restore(self, contents: Files) -> None:
        for path, content in zip(self.paths, contents, strict=True):
            path.write_bytes(content)
        for aside in self.paths[0].parent.glob("*.aside-*"):
            aside.unlink()

    def _watched(self, real: Callable[..., Any], synced: bool | None) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            result = real(fd, *args)
            place = os.readlink(f"/proc/self/fd/{fd}")
            which = [str(path) for path in self.paths].index(place)
            now = self.files()
            self.points.append((self.durable, now))  # or in the middle of the call
            if synced or (synced is None and args[-1] & os.RWF_DSYNC):
                self.durable = (*self.durable[:which], now[which], *self.durable[which + 1 :])
                self.points.append((self.durable, now))
            return result

        return call


def cuts(durable: bytes, now: bytes, chance: random.Random, count: int) -> Iterator[bytes]:
    """Yield possible contents after a power cut: all changes, none, then some changed sectors and some size."""
    yield now
    yield durable
    if now == durable:
        return
    old = durable.ljust(len(now), b"\0")
    changed = [at for at in range(0, len(now), SECTOR) if old[at : at + SECTOR] != now[at : at + SECTOR]]
    for _ in range(count):
        raw = bytearray(now)
        for at in changed:
            if chance.random() < 0.5:
                raw[at : at + SECTOR] = old[at : at + SECTOR]
        sizes = [len(now), len(now), len(durable), *(at for at in changed if at > len(durable))]
        yield bytes(raw[: chance.choice(sizes)])


def write(log: store.Ledger, count: int) -> list[str]:
    fields = {"run_id": "r", "agent_id": "a", "operator": None, "state": "s", "reason": "x" * 300}
    return log.append_all([store.Record("run_state", fields, n) for n in range(count)], issuer=ISSUER)


@pytest.fixture
def state(tmp_path: Path, played: None) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("held", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, store.MOST_RECORDS])
def test_power_cut_at_any_point_loses_nothing_acknowledged(
    state: Path, monkeypatch: pytest.MonkeyPatch, held: int, count: int
) -> None:
    with opened(state) as log:
        made = [one for _ in range(held - 1) for one in write(log, 1)]
    with monkeypatch.context() as patch, opened(state) as log:
        made += write(log, 1)
        disk = Disk(state, patch)
        last = write(log, count)
    # Two writes, two syncs and the head, and the other slot as well if it is new.
    assert len(disk.points) == 8 + (count > 1)
    chance, seen = random.Random(count), set()
    for number, (durable, now) in enumerate(disk.points, 1):
        pieces = [list(cuts(*both, chance, 3)) for both in zip(durable, now, strict=True)]
        for i in range(max(len(one) for one in pieces)):
            disk.restore(tuple(one[i] if i < 2 and i < len(one) else chance.choice(one) for one in pieces))
            with opened(state) as log:
                # All of the write or nothing; all of it once the call has returned.
                assert log.count in ({held, held + count} if number < len(disk.points) else {held + count})
                expected = made if log.count == held else [*made, *last]
                seen.add(log.count)
                new = write(log, 1)
            events, chain, head = disk.files()
            assert [json.loads(line)["id"] for line in events.splitlines()] == [*expected, *new]
            key = audit_log_chain.read_public_key((state / "audit-head" / store.PUBLIC_KEY).read_bytes())
            report = verify.verify(events, chain, head, key)
            assert report.valid
            assert report.notes == ()
    assert seen == {held, held + count}


def test_head_is_written_when_both_files_are_on_disk(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(state) as log:
        write(log, 2)
        disk = Disk(state, monkeypatch)
        write(log, 3)
    for durable, now in disk.points:
        if now[2] != disk.points[0][0][2]:
            assert durable[:2] == disk.files()[:2]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("again", [False, True])
def test_nobody_goes_on_from_head_that_disk_has_refused(
    state: Path, monkeypatch: pytest.MonkeyPatch, count: int, again: bool
) -> None:
    """The kernel keeps refused writes in memory and reports the error once.

    With ``again`` the disk also refuses to restore the earlier slot: its content is then unknown, and the log still
    opens.
    """
    with opened(state) as log:
        made = [one for _ in range(3) for one in write(log, 1)]
    durable = (state / "audit-head" / "head.json").read_bytes()
    real = os.pwritev
    refused: list[int] = []

    def failing(fd: int, pieces: list[bytes], offset: int, flags: int) -> int:
        real(fd, pieces, offset, flags)
        if not refused or again:
            refused.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return len(pieces[0])

    with monkeypatch.context() as patch, opened(state) as log:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(errors.LedgerError, match="could not be written"):
            write(log, count)
    assert (state / "audit-head" / "head.json").read_bytes() == durable
    with opened(state) as log:
        assert log.count == len(made)
        made += write(log, 1)
    events, chain, head = (
        path.read_bytes()
        for path in (state / "audit" / store.EVENTS, state / "audit" / store.CHAIN, state / "audit-head" / "head.json")
    )
    assert [json.loads(line)["id"] for line in events.splitlines()] == made
    assert verify.verify(
        events, chain, head, audit_log_chain.read_public_key((state / "audit-head/ledger.pub").read_bytes())
    ).valid


def test_zeros_of_power_cut_hide_no_second_write_before_them(state: Path) -> None:
    """Whole rows before the first lost block are still checked: they are one write's, or the log is refused."""
    with opened(state) as log:
        write(log, 1)
        head = (state / "audit-head" / "head.json").read_bytes()
        for _ in range(2):
            write(log, 1)
    (state / "audit-head" / "head.json").write_bytes(head)
    with (state / "audit" / store.EVENTS).open("ab") as stream:
        stream.write(bytes(SECTOR))
    with pytest.raises(errors.LedgerError, match="that no writer of ours leaves"):
        opened(state)
