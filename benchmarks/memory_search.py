#!/usr/bin/env python3
"""Search in memory beside the bare numpy product that it cannot do without, in the same run.

    100,000 records of 384 dimensions in memory.db; the ten best for a query, by vector alone, with words that few
    records have, with words that all of them have (also with a write before each, since how many records have a word
    is counted once between two commits), and among one owner's, who has a tenth of them, with and without words.

The ranking is compared with that of the bare product, and with one in float64. Wall clock, the two taken in turns: the
medians, and the tenth of each that were fastest, which other work on the machine disturbs least; and the processor time
of both, in which BLAS counts what its second thread waits for the next product.

.venv/bin/python benchmarks/memory_search.py [records] [runs]
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import anyio
import numpy as np

from covenant.stores.memory.durable import DurableMemory
from covenant.stores.memory.index import vectors
from tests.memory_kit import ALICE, BOB, record

DIMENSIONS = 384
LIMIT = 10


async def filled(path: Path, rows: np.ndarray[Any, Any]) -> tuple[DurableMemory, float]:
    """A store of these rows, and how many records a second it took."""
    store = await DurableMemory.open(path, space="benchmark")
    chooser = random.Random(1)
    begin = time.perf_counter()
    for start in range(0, len(rows), 512):
        async with anyio.create_task_group() as group:
            for number in range(start, min(start + 512, len(rows))):
                text = f"a record of memory about topic{number % 5000} and word{chooser.randrange(10**6)}"
                owner = BOB if number % 10 == 0 else ALICE
                group.start_soon(store.put, record(number, text, embedding=rows[number].tolist(), owner=owner))
    return store, len(rows) / (time.perf_counter() - begin)


async def medians(
    first: Callable[[], Awaitable[object]],
    second: Callable[[], object],
    runs: int,
    *,
    before: Callable[[], Awaitable[object]] | None = None,
) -> list[tuple[float, float]]:
    """Return milliseconds of both: the medians, the fastest tenth, and the medians of processor time.

    The calls alternate. Each comes as often before the other as after it.
    """
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []

    async def measured(times: list[tuple[float, float]], ask: Callable[[], Awaitable[object]] | None) -> None:
        begin, used = time.perf_counter(), time.process_time()
        if ask is None:
            second()
        else:
            await ask()
        times.append((time.perf_counter() - begin, time.process_time() - used))

    for number in range(runs + 4):
        if before is not None:
            await before()
        turns = [(ours, first), (theirs, None)]
        for times, ask in turns if number % 2 else reversed(turns):
            await measured(times, ask)
    wall, used = (np.array([[one[n] for one in times[4:]] for times in (ours, theirs)]) * 1000 for n in (0, 1))
    found = (np.median(wall, axis=1), np.quantile(wall, 0.1, axis=1), np.median(used, axis=1))
    return [(float(one[0]), float(one[1])) for one in found]


async def main(count: int, runs: int) -> None:
    generator = np.random.default_rng(7)
    rows = generator.standard_normal((count, DIMENSIONS)).astype(np.float32)
    queries = generator.standard_normal((200, DIMENSIONS)).astype(np.float32)
    print(f"load {os.getloadavg()[0]:.1f}, {count:,} records of {DIMENSIONS} dimensions, {runs} runs")
    with tempfile.TemporaryDirectory(prefix="covenant-benchmark-") as base:
        store, rate = await filled(Path(base) / "memory.db", rows)
        try:
            print(f"  written, 512 at a time             {rate:10,.0f} records a second")
            begin = time.perf_counter()
            await store.search(queries[0].tolist(), "", None, LIMIT, None)
            print(f"  first search, which reads them     {(time.perf_counter() - begin) * 1000:10,.0f} ms")
            await report(store, rows, queries, runs)
        finally:
            await store.close()


async def report(store: DurableMemory, rows: np.ndarray[Any, Any], queries: np.ndarray[Any, Any], runs: int) -> None:
    """Every setting beside the product, and how the rankings compare."""
    # As the store has them, and in its order: the product of the same bytes.
    plain = np.ascontiguousarray([vectors.normalised(row) for row in rows])
    turn = iter(range(10**9))
    everywhere = "a record of memory about topic77"
    settings: dict[str, tuple[str, Any, bool]] = {
        "by vector": ("", None, False),
        "and words of few": ("topic77 word123", None, False),
        "and words of all": (everywhere, None, False),
        "and after each write": (everywhere, None, True),
        "of one owner": ("", BOB.pubkey, False),
        "and words of all others": (everywhere, BOB.pubkey, False),
        "and after a write": (everywhere, BOB.pubkey, True),
    }

    async def write() -> None:
        # Without a vector, so that both sides go on comparing the same.
        await store.put(record(len(rows), "written meanwhile"))

    for name, (text, owner, written) in settings.items():

        async def ours(text: str = text, owner: str | None = owner) -> None:
            query = queries[next(turn) % len(queries)].tolist()
            await store.search(query, text, None, LIMIT, None, owner=owner)

        def product() -> None:
            plain @ queries[next(turn) % len(queries)]

        measured = await medians(ours, product, runs, before=write if written else None)
        (search, bare), (fast, fast_bare), (used, used_bare) = measured
        print(
            f"  {name:<24} {search:7.2f} ms   product {bare:7.2f} ms   ratio {search / bare:5.2f}"
            f"   fastest tenth {fast / fast_bare:5.2f}   processor {used / used_bare:5.2f}"
        )
    same32 = same64 = 0
    wide = plain.astype(np.float64)
    for query in queries:
        hits = await store.search(query.tolist(), "", None, LIMIT, None)
        found = [hit.record.created_at for hit in hits]
        unit = vectors.query_vector(query.tolist())
        assert unit is not None
        same32 += found == np.argsort(-(plain @ unit), kind="stable")[:LIMIT].tolist()
        same64 += found == np.argsort(-(wide @ unit.astype(np.float64)), kind="stable")[:LIMIT].tolist()
    print(
        f"  the same ten in the same order: {same32} of {len(queries)} as the float32 product, {same64} as in float64"
    )


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:]]
    anyio.run(main, given[0] if given else 100_000, given[1] if len(given) > 1 else 60)
