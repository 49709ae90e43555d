"""Searches beside purges, compactions, promotions and writes: nothing out of scope, nothing torn, nothing left over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.stores.memory import search as memory_search
from covenant.stores.memory import write
from covenant.stores.memory.durable import DurableMemory
from covenant.stores.memory.interface import CompactionCutoffs
from covenant.wire.types import MemoryRecord, Tier
from policy import errors
from tests.memory_kit import ALICE, BOB, name, record

pytestmark = pytest.mark.anyio

ROUNDS = 12
EACH = 24


async def test_no_search_shows_what_is_out_of_scope_while_all_is_moved_and_purged(tmp_path: Path) -> None:
    store = await DurableMemory.open(tmp_path / "memory.db", space="test")
    searched = 0
    done, enough = anyio.Event(), anyio.Event()

    async def search(tier: Tier | None, owner: str | None) -> None:
        nonlocal searched
        while not done.is_set():
            for embedding in ((1.0, 0.0), ()):
                hits = await store.search(embedding, "round fox", tier, 30, None, owner=owner)
                assert len({hit.record.id for hit in hits}) == len(hits)
                for hit in hits:
                    assert tier in (None, hit.record.tier)
                    assert owner in (None, hit.record.owner.pubkey)
                    assert hit.record.text.startswith("round")
                searched += 1
            if searched >= 12:
                enough.set()

    async with anyio.create_task_group() as group:
        for tier in (None, Tier.WORKING, Tier.EPISODIC):
            for owner in (None, BOB.pubkey):
                group.start_soon(search, tier, owner)
        for number in range(ROUNDS):
            async with anyio.create_task_group() as writers:
                for one in range(EACH):
                    made = record(
                        number * EACH + one,
                        f"round {number} fox",
                        embedding=(1.0, one / EACH),
                        owner=BOB if one % 2 else ALICE,
                        created_at=number * EACH + one,
                    )
                    writers.start_soon(store.put, made)
            for one in range(0, EACH, 3):
                await store.promote(name(number * EACH + one), Tier.EPISODIC, at_ms=1)
            cut = (number - 1) * EACH
            if number % 2:
                policy = CompactionCutoffs(delete_working_before_ms=max(cut, 0), delete_episodic_before_ms=max(cut, 0))
                await store.compact(policy, reason="r", now_ms=1, apply=True)
            else:
                await store.purge(None, max(cut, 0))
        # However seldom they came to their turn.
        await enough.wait()
        done.set()
    # What the matrices hold is what the table holds, neither more nor less.
    left = {one.id for one in await store.recent(None, 1000)}
    assert len(left) == 2 * EACH
    hits = await store.search((1.0, 0.0), "", None, 1000, None)
    assert {hit.record.id for hit in hits} == left
    await store.purge(None, 10**6)
    assert await store.search((1.0, 0.0), "round fox", None, 1000, None) == []
    await store.close()


async def test_what_is_moved_between_product_and_reading_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await DurableMemory.open(tmp_path / "memory.db", space="test")
    for number in range(1, 5):
        await store.put(record(number, "fox", embedding=(1.0, number / 10)))
    read = memory_search.records
    changes: list[Any] = [
        lambda: store.promote(name(1), Tier.EPISODIC, at_ms=1),
        lambda: store.put(record(2, "stolen", embedding=(1.0, 0.2), owner=BOB)),
        lambda: store.purge(None, 4),
    ]

    def late(*arguments: Any) -> dict[str, MemoryRecord]:
        # In the thread that searches, when it has decided whom to read.
        if changes:
            asyncio.run_coroutine_threadsafe(changes.pop(0)(), loop).result(60)
        return read(*arguments)

    monkeypatch.setattr(memory_search, "records", late)
    loop = asyncio.get_running_loop()

    async def found() -> list[int]:
        hits = await store.search((1.0, 0.0), "fox", Tier.WORKING, 10, None, owner=ALICE.pubkey)
        return [hit.record.created_at for hit in hits]

    assert sorted(await found()) == [2, 3, 4]
    assert sorted(await found()) == [3, 4]
    assert await found() == [4]
    assert changes == []
    await store.close()


async def test_fault_in_one_s_hands_is_told_to_all_who_were_written_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await DurableMemory.open(tmp_path / "memory.db", space="test")
    said: list[str] = []

    async def breaks(*given: Any) -> None:
        raise MemoryError

    async def puts(number: int) -> None:
        try:
            await store.put(record(number, "fox"))
        except (MemoryError, errors.MemoryStoreError) as e:
            said.append(type(e).__name__)

    with monkeypatch.context() as broken:
        broken.setattr(write.Transaction, "write", breaks)
        async with anyio.create_task_group() as group, store._writer.turn:
            for number in (1, 2, 3):
                group.start_soon(puts, number)
            await anyio.wait_all_tasks_blocked()
    assert sorted(said) == ["MemoryError", "MemoryStoreError", "MemoryStoreError"]
    assert await store.recent(None, 9) == []
    await store.put(record(4, "fox"))
    assert [one.id for one in await store.recent(None, 9)] == [name(4)]
    await store.close()
