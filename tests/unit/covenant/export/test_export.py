"""The worker against files and disks that fail: every row arrives at least once, in order, across kills."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from covenant.export import cursor, ocsf_file, sinks, worker
from covenant.stores.audit.durable import DurableAudit
from policy import errors
from policy.audit_log import exported, merkle, note
from sandbox.audit import checkpoint_row, log_cut, log_follow
from sandbox.audit.follow_process import LocalReaders
from sandbox.audit.log_follow import Follower
from tests.export_kit import Export, expected, export, filled, soon
from tests.unit.covenant.stores.test_audit import DAEMON, failed
from tests.unit.sandbox.audit.test_log import ISSUER, state

__all__ = ["export", "soon", "state"]


def _events(export: Export) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (export.place / "out").read_bytes().splitlines()]


def test_file_is_followed_when_renamed(state: Path, export: Export) -> None:
    filled(state, range(3))
    asyncio.run(export.once(ocsf="out"))
    (export.place / "out").rename(export.place / "out.1")
    filled(state, range(3, 5))
    asyncio.run(export.once(ocsf="out"))
    assert [one["unmapped"]["reason"] for one in _events(export)] == expected(range(3, 5))
    assert len((export.place / "out.1").read_bytes().splitlines()) == 3
    assert [one["metadata"]["sequence"] for one in _events(export)] == [3, 4]


def test_kill_at_any_step_loses_no_row(state: Path, tmp_path: Path) -> None:
    filled(state, range(4))
    steps = 0
    for step in itertools.count(1):
        export = Export(state, tmp_path / str(step))
        child = os.fork()
        if child == 0:
            _killed_at(step, functools.partial(_once, export))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        asyncio.run(export.once(ocsf="out"))
        found = [one["unmapped"]["reason"] for one in _events(export)]
        assert list(dict.fromkeys(found)) == expected(range(4)), step
        if status == 0:
            assert len(found) == 4
            break
        steps += 1
    assert steps > 5


def _once(export: Export) -> None:
    asyncio.run(export.once(ocsf="out"))


def _killed_at(step: int, work: Callable[[], object]) -> None:
    """Run the work, and end the process in the middle of its step-th change of a disk."""
    left = step

    def counted(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if not left and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if not left:
                os._exit(9)
            return real(*arguments, **named)

        return call

    for name in ("rename", "unlink", "fsync", "fdatasync", "write", "ftruncate"):
        setattr(os, name, counted(getattr(os, name), name))
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def test_rows_that_were_cut_unseen_are_told(state: Path, export: Export, tmp_path: Path) -> None:
    filled(state, range(2))
    asyncio.run(export.once(ocsf="out"))
    filled(state, range(2, 9))
    log_cut.cut(state, 5, tmp_path / "a", issuer=ISSUER, now_ms=1)
    asyncio.run(export.once(ocsf="out"))
    gap, cut, *rest = _events(export)[2:]
    assert (gap["severity_id"], gap["unmapped"]["first_index"], gap["unmapped"]["rows"]) == (4, 2, 3)
    assert cut["metadata"]["event_code"] == "audit_rebased"
    assert [one["metadata"]["sequence"] for one in rest] == [5, 6, 7, 8, 9]
    assert rest[-1]["metadata"]["event_code"] == "audit_checkpoint"


def test_full_disk_is_waited_for(state: Path, export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(state, range(3))
    real, failures = os.fdatasync, iter([28, 28])

    def full(fd: int) -> None:
        if number := next(failures, 0):
            raise OSError(number, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", full)
    asyncio.run(export.once(ocsf="out"))
    assert [one["unmapped"]["reason"] for one in _events(export)] == expected(range(3))
    assert "No space left" in export.told[0]
    assert len(export.told) == 2


def test_other_log_and_second_export_are_refused(state: Path, export: Export, tmp_path: Path) -> None:
    filled(state, range(2))
    asyncio.run(export.once(ocsf="out"))
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    filled(other, range(2))
    with pytest.raises(errors.LedgerError, match="another than was exported") as refused:
        asyncio.run(Export(other, export.place).once(ocsf="out"))
    # The fix works.
    source, target = refused.value.hint.split("mv ")[1].split(" ")
    os.rename(source, target)
    asyncio.run(Export(other, export.place).once(ocsf="out"))
    assert len(_events(export)) == 4
    folder = cursor.directory(export.place, os.geteuid())
    with (
        cursor.opened(export.place, folder),
        pytest.raises(errors.LedgerError, match="another export uses"),
    ):
        asyncio.run(export.once(ocsf="out"))
    os.close(folder)


def test_broken_cursor_and_open_directory_are_refused(state: Path, export: Export) -> None:
    filled(state, range(2))
    asyncio.run(export.once(ocsf="out"))
    (export.place / "supervisor-ocsf.json").write_bytes(b"{")
    with pytest.raises(errors.LedgerError, match="cursor cannot be read"):
        asyncio.run(export.once(ocsf="out"))
    export.place.chmod(0o770)
    with pytest.raises(errors.LedgerError, match="not the export's alone") as refused:
        asyncio.run(export.once(ocsf="out"))
    # Another directory is the first fix: the one that was named may belong to others, as /root.
    assert refused.value.hint.startswith("name a directory that is not there yet")
    os.close(cursor.directory(export.place.with_name("new"), os.geteuid()))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_proofs_lead_to_each_checkpoint(home: Path) -> None:
    """Rows before and behind a cut, under two checkpoints; the record and the proof name the same leaf."""
    clock = itertools.count(1000)

    async def rows(log: DurableAudit, count: int) -> None:
        for n in range(count):
            await log.append("authentication_failed", failed(n))

    async def play() -> None:
        about = sinks.About("h", "1", print)
        place = home / "export"
        folder = cursor.directory(place, os.geteuid())
        readers = LocalReaders({"daemon": Follower("daemon", home / "audit")})
        targets = worker.Targets(
            ocsf=ocsf_file.Lines(place / "out", folder, about), proofs=ocsf_file.Lines(place / "proofs", folder, about)
        )

        async def once() -> None:
            await worker.export(targets, ["daemon"], readers, cursor.Cursors(place, folder), about, True)

        async with await DurableAudit.open(home, issuer=DAEMON, now_ms=lambda: next(clock)) as log:
            await rows(log, 5)
            await once()
            assert not (place / "proofs").exists()
            await log.checkpoint()
            await rows(log, 2)
            await once()
            await log.purge(1004)
            await rows(log, 3)
            await log.checkpoint()
            await once()
        os.close(folder)

    asyncio.run(play())
    roots, proved = dict[int, bytes](), dict[int, str]()
    key = note.Verifier.parse((home / "audit-head" / "checkpoint.vkey").read_text())
    for line in (home / "export" / "proofs").read_bytes().splitlines():
        one = json.loads(line)
        if one["kind"] == "checkpoint":
            signed = note.Note.parse(one["note"].encode())
            assert signed.verified([key])
            roots[one["tree_size"]] = note.Checkpoint.parse(signed.text).root
            continue
        path = tuple(map(bytes.fromhex, one["path_hex"]))
        inclusion = merkle.Inclusion(one["index"], one["tree_size"], bytes.fromhex(one["leaf_hash_hex"]), path)
        assert merkle.includes(inclusion, roots[one["tree_size"]])
        assert one["index"] not in proved
        proved[one["index"]] = one["leaf_hash_hex"]
    assert len(roots) == 2
    assert list(proved) == list(range(max(roots)))
    records = [json.loads(line) for line in (home / "export" / "out").read_bytes().splitlines()]
    places = [one["unmapped"]["audit_log"] for one in records]
    leaves = {one["index"]: one["leaf_hash_hex"] for one in places if "index" in one}
    assert list(leaves) == list(range(len(leaves)))
    assert proved.items() <= leaves.items()


def test_rows_of_the_supervisor_have_proofs(state: Path, export: Export, tmp_path: Path) -> None:
    """Every row has one once a checkpoint covers it, also those that a cut takes after they were exported."""
    for times in (range(4), range(4, 9)):
        filled(state, times)
        checkpoint_row.make(state)
        asyncio.run(export.once(ocsf="out", proofs="proofs"))
    log_cut.cut(state, 7, tmp_path / "a", issuer=ISSUER, now_ms=9)
    filled(state, range(9, 11))
    asyncio.run(export.once(ocsf="out", proofs="proofs"))
    checkpoint_row.make(state)
    asyncio.run(export.once(ocsf="out", proofs="proofs"))
    key = note.Verifier.parse((state / "audit-head" / "checkpoint.vkey").read_text())
    root, proved = b"", list[tuple[int, str, str]]()
    for one in map(json.loads, (export.place / "proofs").read_bytes().splitlines()):
        if one["kind"] == "checkpoint":
            signed = note.Note.parse(one["note"].encode())
            assert signed.verified([key])
            root = note.Checkpoint.parse(signed.text).root
            continue
        path = tuple(map(bytes.fromhex, one["path_hex"]))
        leaf = bytes.fromhex(one["leaf_hash_hex"])
        assert merkle.includes(merkle.Inclusion(one["index"], one["tree_size"], leaf, path), root)
        proved.append((one["index"], one["uid"], one["leaf_hash_hex"]))
    places = [(one["unmapped"]["audit_log"], one["metadata"]["uid"]) for one in _events(export)]
    rows = [(place["index"], uid, place["leaf_hash_hex"]) for place, uid in places if "index" in place]
    # The row of the last checkpoint waits for the next one.
    assert proved == rows[:-1]
    assert len(proved) == 14


class _Slow:
    """A destination whose answer to a batch comes once the next one is made."""

    name = "slow"

    def __init__(self, kept: cursor.Cursors, last: int) -> None:
        self.delivered, self.saved = list[str](), list[int]()
        self._kept, self._last = kept, last
        self._made, self._came, self._loop = list[str](), asyncio.Event(), asyncio.get_running_loop()

    def resume(self, cursor: cursor.Cursor) -> None:
        """Go on where the cursor is."""

    def make(self, rows: Sequence[exported.ExportedRow], log: exported.Log, cursor: cursor.Cursor) -> sinks.RowBatch:
        (row,) = rows
        self._made.append(row.fields["reason"])
        self._loop.call_soon_threadsafe(self._came.set)
        return sinks.RowBatch(row.fields["reason"], cursor)

    async def deliver(self, content: str) -> None:
        saved = self._kept.load("supervisor", self.name).position
        self.saved.append(saved.index if saved else 0)
        while self._made[-1] == content and len(self._made) < self._last:
            self._came.clear()
            await self._came.wait()
        self.delivered.append(content)


def test_next_batch_is_made_while_one_is_answered(state: Path, export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follow, "CHUNK_BYTES", 1)
    monkeypatch.setattr(sinks, "MOST_BYTES", 1)
    filled(state, range(5))
    folder = cursor.directory(export.place, os.geteuid())

    async def play() -> _Slow:
        with cursor.opened(export.place, folder) as kept:
            slow = _Slow(kept, 5)
            pump = sinks.Pump("supervisor", slow, export.readers, kept, export.about, once=True)
            await asyncio.wait_for(pump.run(), 30)
            return slow

    slow = asyncio.run(play())
    os.close(folder)
    assert slow.delivered == expected(range(5))
    # The cursor stays in front of what is not acknowledged, however far ahead the batches are made.
    assert slow.saved == [0, 1, 2, 3, 4]
