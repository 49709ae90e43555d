"""Check a disk that refuses a write of the daemon's log: the kernel marks the pages clean and reports it once."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covenant.stores.audit import files, paths, purge
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import events, verify

NAMES = ("audit/events.jsonl", "audit/events.chain.jsonl", "audit-head/head.json", "audit-head/pending")
ISSUER = events.issuer_text({"display": "user@local", "pubkey": "8opHzTAnfzRpPEx21XtnrVTX28YQuCpAjcn1PczScKh"})
BODY = events.body_text(
    ISSUER, events.kind_text("authentication_failed", {"transport": "ipc", "reason": "x" * 300}, of_no_run=True)
)


# The smallest unit that a disk writes whole, in bytes.
SECTOR = 512


class KilledError(BaseException):
    """The process was killed in the middle of a call."""


class Disk:
    """The disk under the log's files, beside their pages.

    A sync writes the changes since the last sync. A refused sync does not, but the pages stay as if it had. The kernel
    reports the error once to each open descriptor, and to later ones only while no descriptor has seen it (errseq_t in
    lib/errseq.c of Linux).
    """

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = [home / name for name in NAMES]
        self.holds = [path.read_bytes() for path in self.paths]
        self.refuses: set[int] = set()
        self.calls_left: int | None = None
        self._changes: list[list[Callable[[bytearray], None]]] = [[] for _ in NAMES]
        self._errors, self._seen = [0] * len(NAMES), [True] * len(NAMES)
        self._told: dict[int, int] = {}
        self._real = {name: getattr(os, name) for name in ("open", "pwrite", "ftruncate", "fdatasync", "fsync")}
        for name, call in (("open", self._open), ("pwrite", self._pwrite), ("ftruncate", self._ftruncate)):
            monkeypatch.setattr(os, name, call)
        for name in ("fdatasync", "fsync"):
            monkeypatch.setattr(os, name, self._sync)

    def refuse_unseen(self, which: int) -> None:
        """Refuse the unsynced changes of this file before any process asks for a sync."""
        self._changes[which].clear()
        self._errors[which] += 1
        self._seen[which] = False

    def cut_power(self, chance: random.Random | None = None) -> None:
        """Reset the files to the disk's content, and with ``chance`` to any sectors of the unsynced changes too."""
        for which, path in enumerate(self.paths):
            old, new = self.holds[which], self._written(which)
            if chance is not None and old != new:
                raw = bytearray(new)
                for at in range(0, len(new), SECTOR):
                    if chance.random() < 0.5:
                        raw[at : at + SECTOR] = old[at : at + SECTOR].ljust(len(raw[at : at + SECTOR]), b"\0")
                sizes = sorted((len(old), len(new)))
                old = bytes(raw.ljust(sizes[1], b"\0")[: chance.choice([*sizes, chance.randint(*sizes)])])
            self.holds[which] = old
            self._changes[which].clear()
            path.write_bytes(old)
            self._seen[which] = True

    def _live(self) -> None:
        """Count a call that changes the disk; raise in place of the first one beyond ``calls_left``."""
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise KilledError

    def _written(self, which: int) -> bytes:
        raw = bytearray(self.holds[which])
        for change in self._changes[which]:
            change(raw)
        return bytes(raw)

    def _which(self, fd: int) -> int | None:
        place = os.readlink(f"/proc/self/fd/{fd}")
        return next((i for i, path in enumerate(self.paths) if str(path) == place), None)

    def _open(self, *args: Any, **named: Any) -> int:
        fd: int = self._real["open"](*args, **named)
        if (which := self._which(fd)) is not None:
            self._told[fd] = self._errors[which] - (not self._seen[which])
        return fd

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        self._live()
        done: int = self._real["pwrite"](fd, data, offset)
        if (which := self._which(fd)) is not None:
            content = bytes(data[:done])

            def put(raw: bytearray) -> None:
                raw.extend(bytes(max(0, offset - len(raw))))
                raw[offset : offset + len(content)] = content

            self._changes[which].append(put)
        return done

    def _ftruncate(self, fd: int, size: int) -> None:
        self._live()
        self._real["ftruncate"](fd, size)
        if (which := self._which(fd)) is not None:
            self._changes[which].append(lambda raw: raw.__delitem__(slice(size, None)))

    def _sync(self, fd: int) -> None:
        which = self._which(fd)
        if which is None:
            self._real["fsync"](fd)
            return
        self._live()
        if which in self.refuses:
            self.refuses.discard(which)
            self.refuse_unseen(which)
        self.holds[which] = self._written(which)
        self._changes[which].clear()
        if self._told[fd] != self._errors[which]:
            self._told[fd], self._seen[which] = self._errors[which], True
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class Log:
    """The open files, and the ids of the rows that they acknowledged."""

    def __init__(self, home: Path, acknowledged: list[str]) -> None:
        at = paths.Places.open(home)
        try:
            self.files = files.Files(at)
        except BaseException:
            at.close()
            raise
        self.acknowledged = acknowledged

    def append(self) -> None:
        event_id = str(uuid.uuid4())
        [line] = events.lines([event_id], 7, [BODY])
        self.files.append([audit_log_chain.ChainRow(line, event_id, 7)])
        self.acknowledged.append(event_id)

    def fill(self) -> None:
        """Append rows until `pending` begins anew."""
        for _ in range(99):
            self.append()

    def close(self) -> None:
        self.files.close()
        self.files.at.close()

    def kill(self) -> None:
        """Leave the files as a kill of the process does."""
        self.files._stack.close()
        self.files.at.close()

    def ids(self) -> list[str]:
        return [
            event.event_id for _, line in self.files.lines() for event in audit_log_chain.read_rows(line + b"\n") or ()
        ]


@pytest.fixture
def disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Make a log with three rows; return the disk under it from then on."""
    monkeypatch.setattr(files, "PENDING_BYTES", 16 * 1024)
    made = Log(home, [])
    for _ in range(3):
        made.append()
    made.close()
    return Disk(home, monkeypatch)


@pytest.fixture
def log(home: Path, disk: Disk) -> Log:
    opened = Log(home, [])
    opened.acknowledged += opened.ids()
    return opened


def check(home: Path, disk: Disk, acknowledged: list[str]) -> None:
    """Cut the power, open the log, check that it has every acknowledged row, and append one more."""
    disk.cut_power()
    after = Log(home, list(acknowledged))
    assert [one for one in after.ids() if one in acknowledged] == acknowledged
    after.append()
    after.close()
    log, chain, head = (path.read_bytes() for path in disk.paths[:3])
    report = verify.verify(
        log, chain, head, audit_log_chain.read_public_key((home / "audit-head/ledger.pub").read_bytes())
    )
    assert report.valid, report


@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.parametrize("which", range(3))
def test_refused_sync_of_files_loses_no_row(home: Path, disk: Disk, log: Log, which: int, end: str) -> None:
    """`pending` begins anew after 16 KiB: the files are synced before, and the disk refuses that sync."""
    disk.refuses.add(which)
    with pytest.raises(OSError, match="Input/output error"):
        log.fill()
    assert len(log.acknowledged) > 10
    getattr(log, end)()
    # The next start finds pages that look clean, and gets no error.
    again = Log(home, log.acknowledged)
    assert again.ids() == log.acknowledged
    again.close()
    check(home, disk, log.acknowledged)


@pytest.mark.parametrize("which", [[0], [1], [2], [3], [0, 1, 2, 3]], ids=str)
def test_refusal_told_to_nobody_loses_no_row(home: Path, disk: Disk, log: Log, which: list[int]) -> None:
    for _ in range(3):
        log.append()
    for one in which:
        disk.refuse_unseen(one)
    log.kill()
    again = Log(home, log.acknowledged)
    assert again.ids() == log.acknowledged
    again.close()
    check(home, disk, log.acknowledged)


def test_disk_still_refusing_fails_each_start(
    home: Path, disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append()
    log.kill()
    refusing = {"on": True}
    sync = os.fdatasync

    def always(fd: int) -> None:
        if refusing["on"] and disk._which(fd) == 0:
            disk.refuses.add(0)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", always)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error"):
            Log(home, log.acknowledged)
    refusing["on"] = False
    again = Log(home, log.acknowledged)
    again.close()
    check(home, disk, log.acknowledged)


def test_row_whose_sync_is_refused_ends_log(home: Path, disk: Disk, log: Log) -> None:
    log.append()
    disk.refuses.add(3)
    with pytest.raises(OSError, match="Input/output error"):
        log.append()
    log.close()
    check(home, disk, log.acknowledged)


def test_head_that_cannot_be_written_loses_no_row(
    home: Path, disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append()
    write = os.pwrite

    def refused(fd: int, data: Any, offset: int) -> int:
        if disk._which(fd) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refused)
        with pytest.raises(OSError, match="Input/output error"):
            log.append()
    log.kill()
    again = Log(home, log.acknowledged)
    assert again.ids()[: len(log.acknowledged)] == log.acknowledged
    again.close()
    check(home, disk, log.acknowledged)


def test_cut_is_finished_only_when_pending_is_durable(
    home: Path, disk: Disk, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed before the sync of the cut's record: a power cut could lose the record but keep the cut."""
    log.append()
    sync, rename = os.fdatasync, os.rename

    def killed(fd: int) -> None:
        if disk._which(fd) == 3 and b"rebase" in disk.paths[3].read_bytes():
            raise KilledError
        sync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", killed)
        with pytest.raises(KilledError):
            purge.cut(log.files, 8, issuer=ISSUER, now_ms=9)
    log.kill()
    durable: list[bool] = []

    def renamed(*args: Any, **named: Any) -> None:
        durable.append(b"rebase" in disk.holds[3])
        rename(*args, **named)

    monkeypatch.setattr(os, "rename", renamed)
    Log(home, []).close()
    assert durable == [True, True]


def reopened(home: Path, disk: Disk, acknowledged: list[str], chance: random.Random) -> Log:
    """Open the log, through kills and power cuts in the middle; after a refused write, try again."""
    if chance.random() < 0.3:
        disk.calls_left = chance.randrange(12)
    for _ in range(len(NAMES) + 2):
        try:
            return Log(home, acknowledged)
        except KilledError:
            if chance.random() < 0.5:
                disk.cut_power(chance)
        except OSError as e:
            assert e.errno == errno.EIO  # noqa: PT017 - what the disk said, and nothing else
        finally:
            disk.calls_left = None
    raise AssertionError("the log does not open")


@pytest.mark.parametrize("seed", range(60))
def test_any_sequence_of_faults_loses_no_row(home: Path, disk: Disk, log: Log, seed: int) -> None:
    """Mix appends, kills in any call, power cuts at any sectors and refusals, reported or not, in any order."""
    chance = random.Random(seed)
    for _ in range(40):
        act = chance.choice(["append"] * 6 + ["settle", "close", "kill", "power", "die", "refuse", "unseen"])
        which = chance.randrange(len(NAMES))
        if act == "refuse":
            disk.refuses.add(which)
        elif act == "unseen":
            disk.refuse_unseen(which)
        else:
            log = acted(home, disk, log, act, chance)
        assert [one for one in log.ids() if one in log.acknowledged] == log.acknowledged
    log.kill()
    disk.refuses.clear()
    check(home, disk, log.acknowledged)


def acted(home: Path, disk: Disk, log: Log, act: str, chance: random.Random) -> Log:
    """Do one operation of a process; return the log that is open afterwards."""
    if act == "die":
        disk.calls_left = chance.randrange(12)
    try:
        for _ in range(chance.choice([1, 1, 20])):
            if act == "settle":
                log.files.settle()
            elif act in ("append", "die"):
                log.append()
            elif act == "close":
                log.close()
                break
        if act in ("append", "settle"):
            return log
    except (OSError, KilledError):
        pass
    disk.calls_left = None
    with contextlib.suppress(OSError):
        log.kill()
    if act == "power" or (act == "die" and chance.random() < 0.5):
        disk.cut_power(chance)
    return reopened(home, disk, log.acknowledged, chance)
