"""Check the journal: after any crash it contains every acknowledged entry and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from covenant.stores import journal
from policy import errors

pytestmark = pytest.mark.anyio

WRITER = """
import anyio, pathlib, sys
from covenant.stores.journal import Journal

async def main():
    async with await Journal.open(pathlib.Path(sys.argv[1])) as open_journal, anyio.create_task_group() as group:
        async def write(name):
            for n in range(100_000):
                line = f"{name} {n} " + "x" * 200
                await open_journal.append(line.encode())
                print(name, n, flush=True)
        for name in range(8):
            group.start_soon(write, name)

anyio.run(main)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "store" / "rows.jsonl"


async def lines_of(path: Path) -> list[bytes]:
    async with await journal.Journal.open(path) as opened:
        return [line async for line in opened]


async def test_what_was_appended_is_there_in_order(path: Path) -> None:
    async with await journal.Journal.open(path) as opened:
        await opened.append(b"one")
        await opened.append_all([b"two", b"three"])
        await opened.append_all([])
        assert [line async for line in opened.lines()] == [b"one", b"two", b"three"]
        assert opened.size_bytes == path.stat().st_size
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert await lines_of(path) == [b"one", b"two", b"three"]


async def test_replay_gives_each_line_its_place_and_lets_go_when_one_is_refused(path: Path) -> None:
    async with await journal.Journal.open(path) as opened:
        await opened.append_all([b"one", b"two"])
        told: list[tuple[bytes, str]] = []
        await opened.replay(lambda line, where: told.append((line, where)))
        assert told == [(b"one", f"{path}:1"), (b"two", f"{path}:2")]
        await opened.append(b"three")

    def refuse(line: bytes, where: str) -> None:
        raise errors.StoreError("no row", where=where)

    opened = await journal.Journal.open(path)
    with pytest.raises(errors.StoreError) as caught:
        await opened.replay(refuse)
    assert caught.value.where == f"{path}:1"
    with pytest.raises(errors.StoreError):
        await opened.append(b"four")
    assert await lines_of(path) == [b"one", b"two", b"three"]


async def test_many_at_once_share_sync_and_keep_their_own_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        syncs.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    async with await journal.Journal.open(path) as opened, anyio.create_task_group() as group:

        async def write(name: int) -> None:
            for n in range(20):
                await opened.append(f"{name} {n}".encode())

        for name in range(64):
            group.start_soon(write, name)
    lines = [tuple(map(int, line.split())) for line in await lines_of(path)]
    assert len(lines) == 64 * 20
    for name in range(64):
        assert [n for owner, n in lines if owner == name] == list(range(20))
    assert len(syncs) < 64 * 20 / 4


async def test_append_is_synced_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def told(name: str) -> None:
        real = getattr(os, name)

        def step(*args: object) -> object:
            steps.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, step)

    told("write")
    told("fdatasync")
    async with await journal.Journal.open(path) as opened:
        steps.clear()
        await opened.append(b"row")
        assert steps == ["write", "fdatasync"]


async def test_torn_tail_is_set_aside_and_told(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"whole\nto")
    path.chmod(0o600)
    async with await journal.Journal.open(path) as opened:
        assert [line async for line in opened] == [b"whole"]
        [told] = opened.recovered
        assert "rows.jsonl.torn-1" in told
        await opened.append(b"next")
    assert path.read_bytes() == b"whole\nnext\n"
    assert path.with_name("rows.jsonl.torn-1").read_bytes() == b"to"
    with path.open("ab") as stream:
        stream.write(b"again")
    assert await lines_of(path) == [b"whole", b"next"]
    assert path.with_name("rows.jsonl.torn-2").read_bytes() == b"again"


async def test_tail_longer_than_block_is_found(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"whole\n" + b"x" * (3 << 20))
    path.chmod(0o600)
    assert await lines_of(path) == [b"whole"]
    assert path.with_name("rows.jsonl.torn-1").stat().st_size == 3 << 20


async def test_long_lines_are_read_across_blocks(path: Path) -> None:
    wanted = [bytes([65 + n]) * (700_000 + n) for n in range(5)]
    async with await journal.Journal.open(path) as opened:
        await opened.append_all(wanted)
    assert await lines_of(path) == wanted


@pytest.mark.parametrize("line", [b"", b"two\nlines", b"x" * (journal.MAX_LINE_BYTES + 1)])
async def test_what_is_not_one_line_is_refused_and_hurts_nobody(path: Path, line: bytes) -> None:
    async with await journal.Journal.open(path) as opened:
        with pytest.raises(errors.StoreError, match="not one line"):
            await opened.append(line)
        await opened.append(b"good")
    assert await lines_of(path) == [b"good"]


async def test_rewrite_puts_others_in_their_place(path: Path) -> None:
    async with await journal.Journal.open(path) as opened:
        await opened.append_all([b"a", b"b", b"c"])
        await opened.rewrite([b"b"])
        await opened.append(b"d")
        assert [line async for line in opened] == [b"b", b"d"]
    assert path.read_bytes() == b"b\nd\n"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_rewrite_by_function_loses_no_append(path: Path) -> None:
    async with await journal.Journal.open(path) as opened, anyio.create_task_group() as group:

        async def write(name: int) -> None:
            for n in range(20):
                await opened.append(f"{name} {n}".encode())

        for name in range(8):
            group.start_soon(write, name)
        for _ in range(5):
            await opened.rewrite(lambda lines: [line for line in lines if not line.startswith(b"drop")])
            await opened.append(b"drop")
    assert len([line for line in await lines_of(path) if line != b"drop"]) == 8 * 20


async def test_change_reads_and_writes_line_by_line(path: Path) -> None:
    """No more than a chunk of the file is held, and its lines can be read twice."""
    line = b"x" * 1_000_000
    async with await journal.Journal.open(path) as opened:
        await opened.append_all([line] * 20)

        def change(there: Iterable[bytes]) -> Iterator[bytes]:
            assert sum(1 for _ in there) == 20
            for one in there:
                yield one[:-1]

        tracemalloc.start()
        try:
            await opened.change(change)
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
        finally:
            tracemalloc.stop()
    assert await lines_of(path) == [line[:-1]] * 20


async def test_change_that_fails_midway_leaves_no_file(path: Path) -> None:
    def change(there: Iterable[bytes]) -> Iterator[bytes]:
        yield from there
        raise ZeroDivisionError

    async with await journal.Journal.open(path) as opened:
        await opened.append(b"a")
        with pytest.raises(ZeroDivisionError):
            await opened.change(change)
        await opened.append(b"b")
    assert await lines_of(path) == [b"a", b"b"]
    assert [one.name for one in path.parent.iterdir()] == [path.name]


async def test_follower_hears_of_each_write_before_its_writer(path: Path) -> None:
    heard: list[bytes] = []

    def follow(fd: int, size: int) -> None:
        heard.append(os.pread(fd, size, 0))

    async with await journal.Journal.open(path, follow=follow) as opened:
        assert heard == [b""]
        await opened.append(b"a")
        assert heard[1:] == [b"a\n"]
        await opened.rewrite([b"b", b"c"])
        assert heard[2:] == [b"b\nc\n"]
        with pytest.raises(errors.StoreError):
            await opened.append(b"")
        assert len(heard) == 3


async def test_function_that_fails_changes_nothing(path: Path) -> None:
    async with await journal.Journal.open(path) as opened:
        await opened.append(b"a")
        with pytest.raises(ZeroDivisionError):
            await opened.rewrite(lambda lines: [bytes(1 // 0)])
        with pytest.raises(errors.StoreError, match="not one line"):
            await opened.rewrite([b"x\ny"])
        await opened.append(b"b")
    assert await lines_of(path) == [b"a", b"b"]


async def test_full_disk_refuses_line_and_later_takes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await journal.Journal.open(path) as opened:
        await opened.append(b"first")
        real, room = os.write, [3]

        def full(fd: int, data: bytes) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            done = real(fd, data[: room[0]])
            room[0] -= done
            return done

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(errors.StoreFullError, match="No space left"):
                await opened.append(b"second")
            with pytest.raises(errors.StoreFullError, match="No space left"):
                await opened.rewrite([b"other"])
        assert path.read_bytes() == b"first\n"
        await opened.append(b"third")
    assert await lines_of(path) == [b"first", b"third"]


async def test_failed_sync_ends_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await journal.Journal.open(path) as opened:
        await opened.append(b"first")

        def broken(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", broken)
            with pytest.raises(errors.StoreError, match="Input/output error"):
                await opened.append(b"second")
        with pytest.raises(errors.StoreError, match="takes no more records"):
            await opened.append(b"third")


async def test_all_that_waited_hear_of_failed_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    refused = []
    async with await journal.Journal.open(path) as opened:

        async def write(n: int) -> None:
            try:
                await opened.append(f"{n}".encode())
            except errors.StoreError as e:
                refused.append(e)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", broken)
            async with anyio.create_task_group() as group:
                for n in range(32):
                    group.start_soon(write, n)
    assert len(refused) == 32


async def test_who_is_cancelled_while_it_waits_stops_nobody(path: Path) -> None:
    async with await journal.Journal.open(path) as opened:
        done = []

        async def write(n: int, scope: anyio.CancelScope) -> None:
            with scope:
                await opened.append(f"{n}".encode())
                done.append(n)

        async with anyio.create_task_group() as group:
            scopes = [anyio.CancelScope() for _ in range(40)]
            for n, scope in enumerate(scopes):
                group.start_soon(write, n, scope)
            await anyio.lowlevel.checkpoint()
            for scope in scopes[::3]:
                scope.cancel()
        await opened.append(b"after")
    lines = await lines_of(path)
    assert set(done) >= {n for n in range(40) if n % 3}
    assert {f"{n}".encode() for n in done} <= set(lines)
    assert lines[-1] == b"after"


async def test_cancel_of_loop_itself_leaves_one_writer_at_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio's own cancel breaks the shield around the thread, which continues to write."""
    async with await journal.Journal.open(path) as opened:
        inside, most, entered, go = [0], [0], threading.Event(), threading.Event()
        real = os.fdatasync

        def slow(fd: int) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            entered.set()
            go.wait(60)
            real(fd)
            inside[0] -= 1

        monkeypatch.setattr(os, "fdatasync", slow)
        first = asyncio.create_task(opened.append(b"first"))
        await anyio.to_thread.run_sync(entered.wait, 10)
        second = asyncio.create_task(opened.append(b"second"))
        await anyio.lowlevel.checkpoint()
        first.cancel()
        await anyio.sleep(0.02)
        go.set()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
        assert most == [1]
    assert await lines_of(path) == [b"first", b"second"]


async def test_closed_journal_takes_nothing(path: Path) -> None:
    opened = await journal.Journal.open(path)
    await opened.close()
    with pytest.raises(errors.StoreError, match="it was closed"):
        await opened.append(b"late")


async def test_closing_waits_for_what_was_asked(path: Path) -> None:
    opened = await journal.Journal.open(path)
    async with anyio.create_task_group() as group:
        for n in range(10):
            group.start_soon(opened.append, f"{n}".encode())
        await anyio.lowlevel.checkpoint()
        await opened.close()
    assert len(await lines_of(path)) == 10


async def test_file_that_was_replaced_is_noticed(path: Path) -> None:
    async with await journal.Journal.open(path) as opened:
        await opened.append(b"a")
        path.unlink()
        with pytest.raises(errors.StoreError, match="removed or replaced"):
            await opened.append(b"b")


async def test_another_writer_is_noticed(path: Path) -> None:
    async with await journal.Journal.open(path) as opened:
        await opened.append(b"a")
        with path.open("ab") as stream:
            stream.write(b"other\n")
        with pytest.raises(errors.StoreError, match="somebody else"):
            await opened.append(b"b")


async def test_unsafe_files_are_refused(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    target = tmp_path / "target"
    target.touch(mode=0o600)
    path.symlink_to(target)
    with pytest.raises(errors.StoreError, match="symlink"):
        await journal.Journal.open(path)
    path.unlink()
    path.hardlink_to(target)
    with pytest.raises(errors.StoreError, match="one name"):
        await journal.Journal.open(path)
    target.unlink()
    path.chmod(0o644)
    with pytest.raises(errors.StoreError, match="not ours alone"):
        await journal.Journal.open(path)
    path.chmod(0o600)
    path.parent.chmod(0o755)
    with pytest.raises(errors.StoreError, match="mode 0755"):
        await journal.Journal.open(path)


@pytest.mark.parametrize("round_", range(3))
async def test_nothing_acknowledged_is_missing_after_kill(path: Path, round_: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(200 + 37 * round_)]
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.readlines()
    lines = {tuple(line.split()[:2]) for line in await lines_of(path)}
    told = [line for line in told if line.endswith(b"\n")]
    assert len(told) >= 200
    assert {tuple(line.split()) for line in told} <= lines
