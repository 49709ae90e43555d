"""The vectors are read once, ahead or at the first search, with all that is committed meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest

from covenant.stores.memory import durable, load
from covenant.stores.memory.durable import DurableMemory
from covenant.stores.memory.index.vectors import Block
from covenant.stores.memory.interface import RecordDeletion
from covenant.wire.types import Tier
from policy import errors
from tests.memory_kit import name, record

pytestmark = pytest.mark.anyio


class Gate:
    """Readings of the vectors: how many were begun, each held after its first block until ``go_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.first = anyio.Event()
        self.go_on = anyio.Event()
        self._vectors = load.vectors
        monkeypatch.setattr(load, "ROWS", 2)
        monkeypatch.setattr(load, "vectors", self.vectors)

    async def vectors(self, path: Path, label: str | None) -> AsyncGenerator[tuple[int, Sequence[Block]], None]:
        self.begun += 1
        async for each in self._vectors(path, label):
            yield each
            self.first.set()
            await self.go_on.wait()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DurableMemory]:
    made = await DurableMemory.open(tmp_path / "memory.db", space="test")
    for number in range(1, 6):
        await made.put(record(number, embedding=(1.0, number / 10)))
    yield made
    await made.close()


async def found(store: DurableMemory) -> list[int]:
    return [hit.record.created_at for hit in await store.search((1.0, 0.0), "", None, 10, None)]


async def test_what_was_read_ahead_is_not_read_again(store: DurableMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.go_on.set()
    await store.warm()
    await store.warm()
    assert await found(store) == [1, 2, 3, 4, 5]
    assert gate.begun == 1


async def test_search_joins_reading_and_sees_what_was_committed_meanwhile(
    store: DurableMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    seen: list[list[int]] = []

    async def search() -> None:
        seen.append(await found(store))

    async with anyio.create_task_group() as group:
        group.start_soon(store.warm)
        await gate.first.wait()
        # Of what was read already, of what was not, and what comes only now.
        await store.repair(RecordDeletion(name(1)), apply=True)
        await store.repair(RecordDeletion(name(5)), apply=True)
        await store.promote(name(2), Tier.EPISODIC, at_ms=1)
        await store.put(record(9, embedding=(1.0, 0.0)))
        await store.put(record(3, embedding=(-1.0, 0.0)))
        group.start_soon(search)
        # Words are found while the vectors are still being read.
        assert len(await store.search((), "something", None, 10, None)) == 4
        await anyio.wait_all_tasks_blocked()
        assert seen == []
        gate.go_on.set()
    assert seen == [[9, 2, 4]]
    assert gate.begun == 1
    hits = await store.search((1.0, 0.0), "", Tier.EPISODIC, 10, None)
    assert [hit.record.created_at for hit in hits] == [2]


async def test_reading_ended_is_begun_anew_by_whoever_searches(
    store: DurableMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    async with anyio.create_task_group() as group:
        group.start_soon(store.warm)
        await gate.first.wait()
        group.cancel_scope.cancel()
    await store.put(record(6, embedding=(1.0, 0.6)))
    gate.go_on.set()
    assert await found(store) == [1, 2, 3, 4, 5, 6]
    assert gate.begun == 2


async def test_much_is_not_read_ahead(store: DurableMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.go_on.set()
    monkeypatch.setattr(durable, "MOST_WARM_BYTES", 3)
    await store.warm()
    assert await found(store) == [1, 2, 3, 4, 5]
    assert gate.begun == 2


async def test_store_that_was_closed_meanwhile_says_so(store: DurableMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    refused: list[errors.MemoryStoreError] = []

    async def search() -> None:
        with pytest.raises(errors.MemoryStoreError, match="closed") as caught:
            await found(store)
        refused.append(caught.value)

    async with anyio.create_task_group() as group:
        group.start_soon(store.warm)
        await gate.first.wait()
        group.start_soon(search)
        await anyio.wait_all_tasks_blocked()
        await store.close()
        gate.go_on.set()
    assert len(refused) == 1
    with pytest.raises(errors.MemoryStoreError, match="closed"):
        await store.warm()


async def test_rows_without_vector_among_many_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "ROWS", 2)
    store = await DurableMemory.open(tmp_path / "memory.db", space="test")
    for number in range(1, 13):
        await store.put(record(number, embedding=(1.0,) * (2 + number % 2)))
    # A whole page of them, and one of each kind beside good ones.
    spoil = {1: b"abc", 3: b"", 4: "text", 5: b"abc", 6: b"abc", 9: b"\x00\x00\xc0\x7f" * 3, 10: b"\0" * 8}
    with sqlite3.connect(tmp_path / "memory.db") as db:
        for number, value in spoil.items():
            db.execute("UPDATE memories SET embedding = ? WHERE id = ?", (value, name(number)))
        db.execute("UPDATE memories SET tier = 'eternal' WHERE id = ?", (name(12),))
    db.close()
    assert await found(store) == [8, 2]
    hits = await store.search((1.0, 1.0, 1.0), "", None, 10, None)
    assert [hit.record.created_at for hit in hits] == [11, 7]
    await store.close()
