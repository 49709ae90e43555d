"""The index of the receipts is derived: no damage to it changes an answer or loses a receipt."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import resource
import shutil
import sqlite3
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from covenant.stores import journal
from covenant.stores.settlement import durable, index, indexed_file, interface, rows
from covenant.wire import types
from policy import base58, errors

pytestmark = pytest.mark.anyio

PAYER = types.AgentId(display="operator@local", pubkey=base58.encode(b"\3" * 32))
ANCHOR = interface.Anchor(chain="solana", cluster="litesvm", tx_sig="5sig", slot=9, confirmed_at=77)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "receipts" / "working.jsonl"


def receipt(number: int, **more: Any) -> types.SettlementReceipt:
    fields: dict[str, Any] = {"resource": "compute", "credits_consumed": number + 1, "settled_at": 100 + number}
    return types.SettlementReceipt(id=f"r{number}", payer=PAYER, **{**fields, **more})


@contextlib.asynccontextmanager
async def opened(path: Path) -> Any:
    receipts = await durable.DurableReceipts.open(path)
    try:
        yield receipts
    finally:
        await receipts.close()


async def fill(path: Path) -> interface.Batch:
    """Write nine receipts: two are in a confirmed batch, two in another one, which is returned."""
    async with opened(path) as receipts:
        for number in range(9):
            await receipts.append(receipt(number))
        confirmed = await receipts.mark_batch(["r4", "r1"])
        await receipts.mark_batch_confirmed(confirmed.batch_id, ANCHOR)
        batch: interface.Batch = await receipts.mark_batch(["r2", "r7"])
        return batch


async def check(path: Path, batch: interface.Batch, count: int = 9) -> None:
    """Check every kind of answer against what ``fill`` wrote."""
    before = path.read_bytes()
    async with opened(path) as receipts:
        assert [one.id for one in await receipts.recent(99)] == [f"r{n}" for n in reversed(range(count))]
        assert [one.id for one in await receipts.recent(99, since_ms=105)] == [f"r{n}" for n in range(count - 1, 4, -1)]
        still_open = [n for n in range(count) if n not in {1, 2, 4, 7}]
        assert list(await receipts.unsettled(99)) == [receipt(n) for n in still_open]
        assert list(await receipts.unconfirmed(9)) == [batch]
        assert len(await receipts.batches(9)) == 2
        for number in range(count):
            assert (await receipts.prove(f"r{number}") is None) == (number in still_open)
            await receipts.append(receipt(number))
            with pytest.raises(errors.ReceiptError, match="another receipt"):
                await receipts.append(receipt(number, credits_consumed=50))
        with pytest.raises(errors.ReceiptError, match="in a batch already"):
            await receipts.mark_batch(["r0", "r7"])
        assert path.read_bytes() == before
        await receipts.append(receipt(count))
        assert await receipts.get(f"r{count}") == receipt(count)


def noted_reads(patch: pytest.MonkeyPatch) -> list[str]:
    """Return the places of all lines that are read from now on."""
    read: list[str] = []
    real = rows.read

    def noted(raw: bytes, where: str) -> types.SettlementReceipt:
        read.append(where)
        return real(raw, where)

    patch.setattr(rows, "read", noted)
    return read


def changed(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path.with_name("index.db"))) as db, db:
        db.execute(statement)


def kept(path: Path) -> None:
    """Leave the index as it is."""


def lost(path: Path) -> None:
    path.with_name("index.db").unlink()


def empty(path: Path) -> None:
    path.with_name("index.db").write_bytes(b"")


def no_database(path: Path) -> None:
    path.with_name("index.db").write_bytes(b"not a database " * 999)


def cut(path: Path) -> None:
    os.truncate(path.with_name("index.db"), 8192)


def torn_pages(path: Path) -> None:
    there = path.with_name("index.db")
    raw = bytearray(there.read_bytes())
    raw[4096:] = os.urandom(len(raw) - 4096)
    there.write_bytes(raw)


def with_wrong_id_in_one_page(path: Path) -> None:
    """As of an earlier moment: the table knows the receipt, and the page of the ids does not."""
    there = path.with_name("index.db")
    with contextlib.closing(sqlite3.connect(there)) as db:
        page, size = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'receipts_by_id'").fetchone()[0], 4096
        assert db.execute("PRAGMA page_size").fetchone() == (size,)
    raw = bytearray(there.read_bytes())
    ids = slice((page - 1) * size, page * size)
    assert raw[ids].count(b"r8") == 1
    raw[ids] = raw[ids].replace(b"r8", b"r9")
    there.write_bytes(raw)


def open_to_others(path: Path) -> None:
    path.with_name("index.db").chmod(0o644)


def planted_log(path: Path) -> None:
    path.with_name("index.db-wal").write_bytes(b"x" * 9000)


STATEMENTS = {
    "of older schema": "PRAGMA user_version = 0",
    "of newer schema": "PRAGMA user_version = 99",
    "without stamp": "DELETE FROM fits",
    "of other file": "UPDATE fits SET crc = 1, stamp = '1:2:3:4'",
    "without a row": "DELETE FROM receipts WHERE place = 3",
    "without last row": "DELETE FROM receipts WHERE place = 9",
    "with wrong place": "UPDATE receipts SET offset = offset + 1 WHERE place = 3",
    "with other id": "UPDATE receipts SET id = 'r99' WHERE place = 3",
    "with open one that is settled": "UPDATE receipts SET batch = NULL WHERE place = 8",
}
CHANGES = (
    kept,
    lost,
    empty,
    no_database,
    cut,
    torn_pages,
    with_wrong_id_in_one_page,
    open_to_others,
    planted_log,
)
INDEXES: dict[str, Callable[[Path], None]] = {
    **{change.__name__.replace("_", " "): change for change in CHANGES},
    **{name: functools.partial(changed, statement=statement) for name, statement in STATEMENTS.items()},
}


@pytest.mark.parametrize("name", INDEXES)
async def test_damage_to_index_changes_no_answer(path: Path, name: str) -> None:
    batch = await fill(path)
    INDEXES[name](path)
    await check(path, batch)
    assert path.with_name("index.db").stat().st_mode & 0o777 == 0o600
    await check(path, batch, 10)


@pytest.mark.parametrize("name", ["index.db", "index.db-wal"])
@pytest.mark.parametrize("kind", ["symlink", "hard link", "directory"])
async def test_name_of_index_that_is_not_ours_is_refused(path: Path, tmp_path: Path, name: str, kind: str) -> None:
    batch = await fill(path)
    there, other = path.with_name(name), tmp_path / "other"
    other.write_bytes(b"untouched")
    there.unlink(missing_ok=True)
    if kind == "symlink":
        there.symlink_to(other)
    elif kind == "hard link":
        os.link(other, there)
    else:
        there.mkdir()
    with pytest.raises(errors.StoreError, match="no plain file") as refused:
        await durable.DurableReceipts.open(path)
    assert refused.value.where == str(there)
    assert refused.value.hint.startswith(f"remove {there}")
    assert other.read_bytes() == b"untouched"
    if kind == "directory":
        there.rmdir()
    else:
        there.unlink()
    await check(path, batch)


async def test_index_that_fits_is_used_without_reading_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(path)
    read = noted_reads(monkeypatch)
    async with opened(path) as receipts:
        assert read == []
        assert await receipts.get("r5") == receipt(5)
        assert read == [f"{path}:6"]


async def test_receipts_take_no_memory(path: Path) -> None:
    async with opened(path) as receipts:

        async def append(first: int, count: int) -> None:
            async with anyio.create_task_group() as group:
                for number in range(first, first + count):
                    group.start_soon(receipts.append, receipt(number))
            batch = await receipts.mark_batch([one.id for one in await receipts.unsettled(count)])
            await receipts.prove(f"r{first}")
            assert batch.receipt_count == count

        await append(0, 300)
        tracemalloc.start()
        try:
            await append(300, 300)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for first in range(600, 3600, 300):
                await append(first, 300)
            gc.collect()
            # As lines in memory they take 600 bytes each; pydantic keeps up to 16,384 short strings, such as ids. There
            # are so many that what else the process keeps meanwhile (33 kB once) is little.
            assert tracemalloc.get_traced_memory()[0] - before < 3000 * 100
        finally:
            tracemalloc.stop()


async def test_only_lines_behind_index_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, or an older Covenant, the index does not know the last lines."""
    batch = await fill(path)
    with path.open("ab") as stream:
        stream.write(rows.line(receipt(9)) + b"\n")
    with monkeypatch.context() as patched:
        read = noted_reads(patched)
        async with opened(path):
            assert read == [f"{path}:10"]
    await check(path, batch, 10)


async def test_lines_that_older_covenant_wrote_are_found(path: Path) -> None:
    """It knows no index. Here it settles only receipts that it wrote itself: the index fits the lines before them."""
    batch = await fill(path)
    index_of_ours = path.with_name("index.db").read_bytes()
    async with opened(path) as older:
        for number in range(9, 12):
            await older.append(receipt(number))
        settled = await older.mark_batch(["r9", "r11"])
        await older.mark_batch_confirmed(settled.batch_id, ANCHOR)
    path.with_name("index.db").write_bytes(index_of_ours)
    async with opened(path) as receipts:
        newest, _, _ = await receipts.batches(9)
        assert (newest.batch_id, newest.receipt_count, newest.tx_sig) == (settled.batch_id, 2, ANCHOR.tx_sig)
        assert list(await receipts.unconfirmed(9)) == [batch]
        assert [one.id for one in await receipts.unsettled(99)] == ["r0", "r3", "r5", "r6", "r8", "r10"]


async def test_line_that_file_lost_is_gone_from_index(path: Path) -> None:
    batch = await fill(path)
    whole = path.read_bytes()
    os.truncate(path, whole.rindex(b"\n", 0, -1) + 1)
    await check(path, batch, 8)


async def test_torn_line_is_set_aside_and_index_fits(path: Path) -> None:
    batch = await fill(path)
    with path.open("ab") as stream:
        stream.write(rows.line(receipt(9))[:40])
    async with opened(path) as receipts:
        assert len(receipts.recovered) == 1
    await check(path, batch)


@pytest.mark.parametrize("same_file", [True, False])
@pytest.mark.parametrize("with_index", [True, False])
async def test_restored_older_file_counts(path: Path, same_file: bool, with_index: bool) -> None:
    batch = await fill(path)
    backup = path.parent.with_name("backup")
    shutil.copytree(path.parent, backup)
    async with opened(path) as receipts:
        for number in range(9, 14):
            await receipts.append(receipt(number))
        await receipts.mark_batch(["r0", "r9"])
    if not same_file:
        path.unlink()
    for name in ("working.jsonl", "index.db") if with_index else ("working.jsonl",):
        shutil.copy2(backup / name, path.with_name(name))
    await check(path, batch)


async def test_file_changed_in_place_with_same_size_counts(path: Path) -> None:
    await fill(path)
    raw = path.read_bytes()
    times = path.stat()
    with path.open("r+b") as stream:
        stream.write(raw.replace(b'"id":"r5"', b'"id":"x5"'))
    # A program can set the other times back, and not this one.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    async with opened(path) as receipts:
        assert await receipts.get("r5") is None
        assert await receipts.get("x5") == receipt(5).model_copy(update={"id": "x5"})


@pytest.mark.parametrize("method", ["take", "replace"])
async def test_index_that_fails_behind_write_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The crash between file and index, seen by the daemon that goes on."""
    batch = await fill(path)

    def fail(*given: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with opened(path) as receipts:
        with monkeypatch.context() as patched:
            patched.setattr(index.Index, method, fail)
            await receipts.append(receipt(9))
            found = await receipts.mark_batch(["r9"])
        assert await receipts.get("r9") is not None
        assert await receipts.prove("r9") is not None
        assert next(iter(await receipts.batches(9))) == found
    async with opened(path) as receipts:
        assert {one.batch_id for one in await receipts.unconfirmed(9)} == {batch.batch_id, found.batch_id}


@contextlib.contextmanager
def no_larger_files(size: int) -> Iterator[None]:
    """As on a full disk: no file of this process grows beyond ``size`` (setrlimit(2); Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [16_384, 65_536])
async def test_disk_that_takes_receipts_and_no_index_loses_nothing(path: Path, size: int) -> None:
    """16 KiB are too little for any index, 64 KiB for the log of its writes."""
    with no_larger_files(size):
        async with opened(path) as receipts:
            for number in range(30):
                await receipts.append(receipt(number))
                assert await receipts.get(f"r{number}") == receipt(number)
            assert len(await receipts.recent(99)) == 30
    async with opened(path) as receipts:
        assert len(await receipts.unsettled(99)) == 30


async def test_index_in_memory_returns_to_disk(path: Path) -> None:
    with no_larger_files(16_384):
        receipts = await durable.DurableReceipts.open(path)
        for number in range(9):
            await receipts.append(receipt(number))
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    # A rewrite shows that there is room again.
    await receipts.mark_batch(["r3"])
    assert len(await receipts.unsettled(99)) == 8
    assert path.with_name("index.db").exists()
    await receipts.close()


async def test_reads_beside_writes_see_every_receipt_that_is_durable(path: Path) -> None:
    durable_ones: set[str] = set()
    done = anyio.Event()

    async with opened(path) as receipts, anyio.create_task_group() as group:

        async def append(first: int) -> None:
            for number in range(first, first + 60):
                await receipts.append(receipt(number))
                durable_ones.add(f"r{number}")

        async def settle() -> None:
            while not done.is_set():
                if found := await receipts.unsettled(7):
                    batch = await receipts.mark_batch([one.id for one in found])
                    await receipts.mark_batch_confirmed(batch.batch_id, ANCHOR)
                await anyio.lowlevel.checkpoint()

        async def read() -> None:
            while not done.is_set():
                before = set(durable_ones)
                seen = [one.id for one in await receipts.recent(999)]
                assert before <= set(seen)
                assert len(seen) == len(set(seen))
                for key in list(before)[:5]:
                    found = await receipts.get(key)
                    assert found is not None
                    assert found.id == key
                    assert found.batch_id is None or await receipts.prove(key) is not None

        group.start_soon(settle)
        for _ in range(3):
            group.start_soon(read)
        async with anyio.create_task_group() as writers:
            for first in (0, 100, 200, 300):
                writers.start_soon(append, first)
        done.set()
    async with opened(path) as receipts:
        assert {one.id for one in await receipts.recent(999)} == durable_ones


async def test_same_receipt_from_many_is_kept_once(path: Path) -> None:
    async with opened(path) as receipts:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(receipts.append, receipt(1))
        assert len(path.read_bytes().splitlines()) == 1


async def test_receipt_of_cancelled_appender_is_there_or_not(path: Path) -> None:
    async with opened(path) as receipts:
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(receipts.append, receipt(number))
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        there = [one.id for one in await receipts.recent(99)]
        for number in range(20):
            await receipts.append(receipt(number))
        assert sorted(one.id for one in await receipts.recent(99)) == sorted(f"r{n}" for n in range(20))
        assert len(path.read_bytes().splitlines()) == 20
        assert len(there) <= 20


async def test_damaged_name_in_schema_makes_index_again(path: Path) -> None:
    """Python cannot decode SQLite's message about it, which is no error of SQLite."""
    batch = await fill(path)
    beside = path.with_name("index.db")
    raw = beside.read_bytes()
    at = raw.index(b"tablereceiptsreceipts") + len("table")
    beside.write_bytes(raw[:at] + b"\xce" + raw[at + 1 :])
    with contextlib.closing(sqlite3.connect(beside)) as db, pytest.raises(UnicodeDecodeError):
        db.execute("SELECT 1 FROM fits")
    await check(path, batch)


@pytest.mark.parametrize("column", ["settled_at", "batch"])
async def test_damaged_column_makes_index_again(path: Path, column: str) -> None:
    batch = await fill(path)
    with contextlib.closing(sqlite3.connect(path.with_name("index.db"), isolation_level=None)) as db:
        # The table alone is changed: for that moment the index of SQLite is one of another table.
        db.execute("PRAGMA writable_schema = ON")
        kept = db.execute("SELECT * FROM sqlite_schema WHERE name = 'receipts_by_batch'").fetchone()
        db.execute("DELETE FROM sqlite_schema WHERE name = 'receipts_by_batch'")
        db.execute("PRAGMA writable_schema = RESET")
        db.execute(f"UPDATE receipts SET {column} = {column} - 1 WHERE place IN (3, 6)")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", kept)
    await check(path, batch)


@contextlib.asynccontextmanager
async def hanging_reader(path: Path) -> Any:
    """Receipts whose index is held by a reader until the block ends, or for 60 s."""
    file = indexed_file.IndexedFile(path)
    receipts = durable.DurableReceipts(await journal.Journal.open(path, follow=file.follow), file, path)
    await receipts.append(receipt(1))
    holds, may_end = threading.Event(), threading.Event()

    def hang(index: object) -> None:
        holds.set()
        may_end.wait(60)

    reader = threading.Thread(target=file.ask, args=(hang,))
    reader.start()
    try:
        assert await anyio.to_thread.run_sync(holds.wait, 60)
        yield receipts, reader
    finally:
        may_end.set()
        reader.join()


async def test_waiting_for_index_leaves_threads_to_others(path: Path) -> None:
    """While the index is made again or its disk hangs, all readers wait; the daemon's other work goes on."""
    async with anyio.create_task_group() as group, hanging_reader(path) as (receipts, reader):
        for _ in range(60):
            group.start_soon(receipts.get, "r1")
        await anyio.wait_all_tasks_blocked()
        assert await anyio.to_thread.run_sync(int) == 0
        assert reader.is_alive()
    await receipts.close()


async def test_reader_that_hangs_does_not_hold_up_the_close(path: Path) -> None:
    async with hanging_reader(path) as (receipts, reader):
        with anyio.move_on_after(0.1):
            await receipts.close()
        assert reader.is_alive()


async def test_value_that_no_receipt_has_is_refused(path: Path) -> None:
    """The file could not be opened with it. A chain is another program, and a changed copy is not validated."""
    batch = await fill(path)
    async with opened(path) as receipts:
        for wrong in ({"slot": -1}, {"slot": 2**64}, {"confirmed_at": -1}, {"cluster": "\ud800"}):
            with pytest.raises(errors.ReceiptError, match="a value that no receipt can have"):
                await receipts.mark_batch_confirmed(batch.batch_id, dataclasses.replace(ANCHOR, **wrong))
        with pytest.raises(errors.ReceiptError, match="a value that no receipt can have"):
            await receipts.append(receipt(9).model_copy(update={"settled_at": -1}))
    await check(path, batch)


async def test_odd_ids_and_times_are_found(path: Path) -> None:
    ids = ["a", "a\0b", "a\0c", "", "\ufeff", "e\u0301", "\u00e9", "x" * (1 << 20)]
    times = [0, 2**63 - 1, 2**63, 2**64 - 1]
    made = [receipt(1).model_copy(update={"id": one}) for one in ids]
    made += [receipt(1, settled_at=moment).model_copy(update={"id": str(moment)}) for moment in times]
    async with opened(path) as receipts:
        for one in made:
            await receipts.append(one)
            await receipts.append(one)
    async with opened(path) as receipts:
        assert list(await receipts.unsettled(99)) == made
        assert [await receipts.get(one.id) for one in made] == made
        assert await receipts.get("\ud800") is None
        with pytest.raises(errors.ReceiptError, match="is not there"):
            await receipts.mark_batch(["a", "\ud800"])
        assert len(await receipts.recent(99, since_ms=-(2**64))) == len(made)
        for moment in times[1:]:
            since = await receipts.recent(99, since_ms=moment)
            assert sorted(one.settled_at for one in since) == [one for one in times if one >= moment]
        assert not await receipts.recent(99, since_ms=2**64)
