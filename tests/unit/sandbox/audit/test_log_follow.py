"""Following a log: rows in order and once, across cuts, and never one that no head acknowledges."""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
from pathlib import Path

import pytest

from policy import errors
from policy.audit_log import exported
from sandbox.audit import follow_process, log_cut, log_follow
from sandbox.audit.log_follow import Chunk, Follower, Position
from tests.unit.sandbox.audit.test_log import ISSUER, opened, paths, state, write

__all__ = ["state"]


def _filled(place: Path, times: range) -> None:
    with opened(place) as log:
        for now_ms in times:
            write(log, f"row {now_ms}", now_ms=now_ms)


def _follower(place: Path) -> Follower:
    return Follower("supervisor", place / "audit")


def _chunk(follower: Follower, at: Position | None, limit: int = log_follow.CHUNK_BYTES) -> Chunk:
    found = follower.read(at, limit)
    assert found is not None
    return found


def _all(follower: Follower, at: Position | None, limit: int = log_follow.CHUNK_BYTES) -> tuple[list[bytes], Position]:
    lines = list[bytes]()
    while True:
        chunk = _chunk(follower, at, limit)
        lines += chunk.lines.splitlines()
        at = chunk.end
        if chunk.whole:
            return lines, at


def test_no_log_is_waited_for(tmp_path: Path) -> None:
    assert _follower(tmp_path).read(None) is None
    (tmp_path / "audit").mkdir()
    assert _follower(tmp_path).read(None) is None


@pytest.mark.parametrize("limit", [1, 700, log_follow.CHUNK_BYTES])
def test_rows_come_once_and_in_order(state: Path, limit: int) -> None:
    _filled(state, range(9))
    follower = _follower(state)
    lines, at = _all(follower, None, limit)
    assert lines == paths(state)[0].read_bytes().splitlines()
    assert _chunk(follower, at).lines == b""
    _filled(state, range(9, 12))
    # Another process goes on from the position alone.
    more, at = _all(_follower(state), at, limit)
    assert lines + more == paths(state)[0].read_bytes().splitlines()
    assert (at.index, _chunk(follower, at).tree_size) == (12, 12)


def test_row_beyond_the_head_does_not_come(state: Path) -> None:
    _filled(state, range(3))
    events = paths(state)[0]
    whole = events.read_bytes()
    events.write_bytes(whole + whole.splitlines(keepends=True)[-1] + b'{"half')
    assert b"".join(line + b"\n" for line in _all(_follower(state), None)[0]) == whole


def test_rows_that_the_files_lack_are_waited_for(state: Path) -> None:
    _filled(state, range(3))
    events = paths(state)[0]
    whole = events.read_bytes()
    events.write_bytes(whole[:-10])
    follower = _follower(state)
    assert follower.read(None) is None
    events.write_bytes(whole)
    assert len(_all(follower, None)[0]) == 3


def test_cut_is_followed(state: Path, tmp_path: Path) -> None:
    _filled(state, range(10))
    before = paths(state)[0].read_bytes().splitlines()
    follower = _follower(state)
    half = _chunk(follower, None, 1500).end
    done = _all(follower, half)[1]
    log_cut.cut(state, 3, tmp_path / "a", issuer=ISSUER, now_ms=1)
    _filled(state, range(10, 12))
    after = paths(state)[0].read_bytes().splitlines()
    assert 3 < half.index < 10
    for reader in (follower, _follower(state)):
        assert _all(reader, half)[0] == [after[0], *before[half.index :], *after[-3:]]
        # Behind what was read are the row of the checkpoint that the cut made, and two more.
        assert _all(reader, done)[0] == [after[0], *after[-3:]]
    # Who had read up to row 1 lost one row, and is told.
    chunk = _chunk(follower, log_follow.behind(Position(), before[0] + b"\n" + before[1] + b"\n"))
    assert (chunk.lost, chunk.start.cut, chunk.end.index) == (1, 3, 3)
    # A reader that begins now misses nothing.
    first = _chunk(follower, None)
    assert (first.lost, first.end.index, first.tree_size, first.lines) == (0, 3, 13, after[0] + b"\n")
    log_cut.cut(state, 11, tmp_path / "b", issuer=ISSUER, now_ms=1)
    lines, at = _all(follower, done)
    assert [lines[-2], at.index, at.cut] == [after[-1], 14, 12]


def test_random_reads_writes_and_cuts_lose_nothing(state: Path, tmp_path: Path) -> None:
    choose = random.Random(27)
    follower, at = _follower(state), None
    rows, clock = list[tuple[int, bytes]](), 0
    for step in range(40):
        act = choose.choice(("write", "read", "read", "restart", "cut"))
        if act == "write" or not clock:
            count = choose.randrange(1, 6)
            _filled(state, range(clock, clock + count))
            clock += count
        elif act == "restart":
            follower = _follower(state)
        elif act == "cut":
            # Rows that were read, and once in a while none.
            seen = sum(b"audit_checkpoint" not in line for _, line in rows)
            log_cut.cut(state, seen, tmp_path / str(step), issuer=ISSUER, now_ms=clock)
        chunk = follower.read(at, choose.choice((1, 400, 4000)))
        if chunk is not None:
            log = exported.Log("supervisor", chunk.origin, chunk.tree_size)
            lines = chunk.lines.splitlines()
            places = exported.rows(lines, log, index=chunk.start.index, chain_hash_hex=chunk.start.chain_hash_hex)
            found = [(row.place.leaf, line) for row, line in zip(places, lines, strict=True)]
            rows += [(leaf, line) for leaf, line in found if leaf is not None]
            assert not chunk.lost
            at = chunk.end
    rest, _ = _all(follower, at)
    written = [line for _, line in rows] + [line for line in rest if b"audit_rebased" not in line]
    assert [leaf for leaf, _ in rows] == list(range(len(rows)))
    written = [line for line in written if b"audit_checkpoint" not in line]
    assert [f'"row {n}"'.encode() in line for n, line in enumerate(written)] == [True] * clock


def test_changed_row_ends_the_reading(state: Path) -> None:
    _filled(state, range(4))
    events = paths(state)[0]
    follower = _follower(state)
    at = _chunk(follower, None, 1).end
    events.write_bytes(events.read_bytes().replace(b"row 2", b"row 7"))
    # No row of them comes, and none is passed over.
    for _ in range(log_follow.MOST_MISMATCHES):
        chunk = _chunk(follower, at)
        assert (chunk.lines, chunk.end) == (b"", at)
    with pytest.raises(errors.LedgerError, match="do not lead to its signed head"):
        follower.read(at)


def test_older_copy_ends_the_reading(state: Path, tmp_path: Path) -> None:
    _filled(state, range(4))
    shutil.copytree(state, tmp_path / "copy")
    log_cut.cut(state, 2, tmp_path / "a", issuer=ISSUER, now_ms=1)
    at = _all(_follower(state), None)[1]
    with pytest.raises(errors.LedgerError, match="older copy"):
        _follower(tmp_path / "copy").read(at)


@pytest.mark.parametrize("name", ["audit", "audit-head", "audit/events.jsonl", "audit-head/head.json"])
def test_link_in_a_log_is_not_followed(state: Path, tmp_path: Path, name: str) -> None:
    """The reader of a service may read what the owner of the log may not."""
    _filled(state, range(2))
    (state / name).rename(tmp_path / "moved")
    (state / name).symlink_to(tmp_path / "moved")
    with pytest.raises(errors.LedgerError, match="cannot be opened"):
        _follower(state).read(None)


def test_file_of_others_is_refused(state: Path, tmp_path: Path) -> None:
    _filled(state, range(2))
    os.link(paths(state)[0], tmp_path / "second")
    with pytest.raises(errors.LedgerError, match="owner alone"):
        _follower(state).read(None)


def test_reader_takes_no_lock(state: Path) -> None:
    _filled(state, range(2))
    follower = _follower(state)
    # Of this process alone: on another file system a file may have the same number.
    ours, held = f" {os.getpid()} ", f":{paths(state)[0].stat().st_ino} "
    assert _all(follower, None)[0]
    assert not [one for one in Path("/proc/locks").read_text().splitlines() if ours in one and held in one]


def test_worker_gets_rows_and_errors_from_the_reader(state: Path, tmp_path: Path) -> None:
    _filled(state, range(3))
    ours, theirs = socket.socketpair()
    local = follow_process.LocalReaders({"supervisor": _follower(state)})
    serving = threading.Thread(target=follow_process.serve, args=(theirs, local), daemon=True)
    serving.start()
    remote = follow_process.RemoteReaders(ours)
    chunk = remote.read("supervisor", None, log_follow.CHUNK_BYTES)
    assert chunk == local.read("supervisor", None, log_follow.CHUNK_BYTES)
    far = remote.read("supervisor", Position(index=2**40, offset=2**40), 10)
    assert far is not None
    assert (far.lines, far.whole) == (b"", False)
    assert remote.checkpoints("supervisor") == log_follow.Checkpoints()
    with pytest.raises(errors.LedgerError, match="cannot be read"):
        remote.read("other", None, 1)
    os.link(paths(state)[0], tmp_path / "second")
    with pytest.raises(errors.LedgerError) as refused:
        remote.read("supervisor", None, 1)
    assert refused.value.hint
    # What is no request ends the service, and then the worker is told.
    ours.sendall(b"\0\0\0\1x")
    serving.join(60)
    theirs.close()
    with pytest.raises((errors.LedgerError, BrokenPipeError)):
        remote.read("supervisor", None, 1)
    ours.close()
