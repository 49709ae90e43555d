"""Check that deleted records give their disk and memory back, and that a crash meanwhile loses no record."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from covenant.stores.memory import shrink
from covenant.stores.memory.durable import DurableMemory
from covenant.stores.memory.index.vectors import Block, Matrices
from covenant.stores.memory.interface import CompactionCutoffs
from covenant.wire.types import Tier
from tests.memory_kit import ALICE, name, opened, record

pytestmark = pytest.mark.anyio

MANY, LEFT = 20_000, 100
PURGE = """
import anyio, pathlib, sys
from covenant.stores.memory.durable import DurableMemory

async def main():
    store = await DurableMemory.open(pathlib.Path(sys.argv[1]), space="test")
    print("open", flush=True)
    print(await store.purge(None, int(sys.argv[2])), flush=True)

anyio.run(main)
"""


def _vector(number: int) -> list[float]:
    return [float(one) for one in np.random.default_rng(number).random(64, dtype=np.float32)]


@pytest.fixture(scope="module")
async def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of many records, with vectors and words."""
    path = tmp_path_factory.mktemp("memory") / "memory.db"
    async with opened("durable", path):
        pass
    rows = (
        (name(n), "working", ALICE.display, ALICE.pubkey, f"word{n} " + "lorem ipsum " * 40,
         np.asarray(_vector(n), dtype="<f4").tobytes(), "null", n, None, "test")
        for n in range(MANY)
    )  # fmt: skip
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.executemany(f"INSERT INTO memories VALUES ({', '.join('?' * 10)}, NULL, NULL)", rows)
    return path


@pytest.fixture
def path(full: Path, tmp_path: Path) -> Path:
    return Path(shutil.copyfile(full, tmp_path / "memory.db"))


def _bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in path.parent.iterdir() if one.suffix != ".db-shm")


async def _check(store: DurableMemory, *numbers: int) -> None:
    """Check that exactly these of the records with the numbers are found: by word, by vector and by id."""
    for number in (0, MANY - LEFT - 1, MANY - LEFT, MANY - 1):
        there = number in numbers
        words = await store.search((), f"word{number}", None, 5, None)
        near = await store.search(_vector(number), "", None, 1, 0.999)
        assert [hit.record.id for hit in words] == [name(number)] * there, number
        assert [hit.record.id for hit in near] == [name(number)] * there, number
        assert (await store.get(name(number)) is not None) is there, number


@contextlib.asynccontextmanager
async def _open(path: Path) -> AsyncIterator[DurableMemory]:
    store = await DurableMemory.open(path, space="test")
    try:
        yield store
    finally:
        await store.close()


async def test_purge_gives_disk_back(path: Path) -> None:
    async with _open(path) as store:
        await _check(store, 0, MANY - LEFT - 1, MANY - LEFT, MANY - 1)
        before = _bytes(path)
        assert await store.purge(None, MANY - LEFT) == MANY - LEFT
        assert before > 20_000_000
        assert _bytes(path) < before / 20
        assert path.with_name("memory.db-wal").stat().st_size == 0
        await _check(store, MANY - LEFT, MANY - 1)
        assert f"word{MANY - LEFT - 1}".encode() not in path.read_bytes()
        assert f"word{MANY - LEFT}".encode() in path.read_bytes()
        await store.put(record(1, "written later", embedding=_vector(1)))
        assert [hit.record.id for hit in await store.search((), "later", None, 5, None)] == [name(1)]
    async with _open(path) as store:
        await _check(store, MANY - LEFT, MANY - 1)


async def test_compaction_gives_disk_back(path: Path) -> None:
    policy = CompactionCutoffs(delete_working_before_ms=MANY - LEFT)
    async with _open(path) as store:
        before = _bytes(path)
        for apply in (False, True):
            await store.compact(policy, reason="r", now_ms=MANY, apply=apply)
            assert (_bytes(path) < before / 20) is apply
        await _check(store, MANY - LEFT, MANY - 1)


async def test_few_deleted_records_leave_file(path: Path) -> None:
    async with _open(path) as store:
        before = path.stat().st_size
        assert await store.purge(None, 500) == 500
        # Neither so many bytes nor such a part of the file that it is written anew.
        assert path.stat().st_size == before
        assert path.with_name("memory.db-wal").stat().st_size == 0


async def test_reader_delays_cut_and_not_purge(path: Path) -> None:
    async with _open(path) as store:
        before = _bytes(path)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM memories").fetchone() == (MANY,)
            assert await store.purge(None, MANY - LEFT) == MANY - LEFT
            # Its snapshot stays whole.
            assert reader.execute("SELECT count(*) FROM memories").fetchone() == (MANY,)
            await _check(store, MANY - LEFT, MANY - 1)
        assert await store.purge(None, 1) == 0
        assert _bytes(path) < before / 20


async def test_failure_to_shrink_keeps_purge(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full_disk(db: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with _open(path) as store:
        before = path.stat().st_size
        with monkeypatch.context() as patch:
            patch.setattr(shrink, "give_back", full_disk)
            assert await store.purge(None, MANY - LEFT) == MANY - LEFT
        assert "database or disk is full" in caplog.text
        assert path.stat().st_size >= before
    # As after a crash between the two: the next purge gives back what this one did not.
    async with _open(path) as store:
        await _check(store, MANY - LEFT, MANY - 1)
        assert await store.purge(None, 0) == 0
        assert _bytes(path) < before / 20
        await _check(store, MANY - LEFT, MANY - 1)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6, 1.0])
async def test_kill_while_shrinking_loses_no_record(path: Path, seconds: float) -> None:
    command = [sys.executable, "-c", PURGE, str(path), str(MANY - LEFT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        time.sleep(seconds)  # noqa: ASYNC251
        process.send_signal(signal.SIGKILL)
    async with _open(path) as store:
        count = (await store.counts())[Tier.WORKING]
        assert count in (MANY, LEFT)
        purged = (0, MANY - LEFT - 1) if count == MANY else ()
        await _check(store, *purged, MANY - LEFT, MANY - 1)
        assert await store.purge(None, MANY - LEFT) == count - LEFT
        await _check(store, MANY - LEFT, MANY - 1)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA page_count").fetchone()[0] < 1000


async def test_rows_of_another_number_are_found_after_purge(path: Path) -> None:
    """As a VACUUM may number them: the index of words is mended in the same turn."""
    async with _open(path) as store:
        await _check(store, 0, MANY - LEFT - 1, MANY - LEFT, MANY - 1)
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE memories SET rowid = rowid + 1000000")
        assert await store.search((), f"word{MANY - 1}", None, 5, None) == []
        await store.purge(None, MANY - LEFT)
        await _check(store, MANY - LEFT, MANY - 1)


def test_matrices_give_memory_back() -> None:
    ids = [name(number) for number in range(MANY)]
    rows = np.random.default_rng(1).random((MANY, 64), dtype=np.float32)
    matrices = Matrices()
    matrices.add_new(Block(ids, [Tier.WORKING] * MANY, ["o"] * MANY, list(range(MANY)), rows), MANY)
    before = matrices.bytes_of_rows
    for one in ids[: MANY - LEFT]:
        matrices.discard(one)
    assert matrices.bytes_of_rows < before / 20
    matrix = matrices.matrix(64)
    assert matrix is not None
    for place in (MANY - LEFT, MANY - 1):
        query = rows[place] / np.linalg.norm(rows[place])
        assert matrix.best(query, 1)[0].id == ids[place]
    assert len(matrix) == LEFT
