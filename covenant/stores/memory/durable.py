"""Memory in SQLite: ``memory.db``, which version 1 made or could have made.

WAL with synchronous=FULL: a commit that returned is on disk. Writers that wait for each other share one transaction
(``writing``). Other connections read (``reading``), search (``searching``) and fill the matrices (``loading``), so that
none of these waits for a sync.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Final

import aiosqlite
import anyio
import anyio.to_thread

from covenant.stores.memory import interface, load, maintenance, read, schema, sqlite
from covenant.stores.memory.index.cache import Cache
from covenant.stores.memory.index.vectors import Block
from covenant.stores.memory.interface import (
    BACKFILL_SAVEPOINT,
    COMPACT_SAVEPOINT,
    BadRow,
    Compacted,
    CompactionPolicy,
    Hit,
    Repair,
    Repaired,
    Room,
)
from covenant.stores.memory.search import Asked, Searcher
from covenant.stores.memory.write import Writer
from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier
from policy import errors

# Matrices that take more than this are not read before somebody searches.
MOST_WARM_BYTES: Final = 256 * 1024 * 1024


class DurableMemory:
    """``Memory`` in one SQLite file; made by ``open``."""

    def __init__(
        self,
        path: Path,
        space: str,
        writer: aiosqlite.Connection,
        reader: aiosqlite.Connection,
        searcher: Searcher,
        connections: contextlib.AsyncExitStack,
    ) -> None:
        self._path = path
        self._space = space
        self._reader = reader
        self._searcher = searcher
        self._connections = connections
        self._cache = Cache(self._load, searcher.thread)
        self._writer = Writer(writer, self._cache, searcher.committed, self._label, self._guarded)
        self._closed = False

    @classmethod
    async def open(cls, path: Path, *, space: str = "") -> DurableMemory:
        """Open, or make, the database; ``space`` names the embedder whose vectors are compared.

        Raises:
            errors.MemoryStoreError: it is a symlink or no database, or a newer daemon made it.
        """
        with sqlite.named(path):
            await anyio.to_thread.run_sync(sqlite.make_private, path)
            async with contextlib.AsyncExitStack() as stack:
                writer = await stack.enter_async_context(sqlite.connected(path))
                await writer.execute("PRAGMA journal_mode = WAL")
                await writer.execute("PRAGMA synchronous = FULL")
                await schema.prepare(writer, where=str(path))
                reader = await stack.enter_async_context(sqlite.connected(path))
                await reader.execute("PRAGMA query_only = ON")
                searcher = await anyio.to_thread.run_sync(Searcher, path)
                stack.push_async_callback(anyio.to_thread.run_sync, searcher.close)
                return cls(path, space, writer, reader, searcher, stack.pop_all())

    @property
    def space(self) -> str:
        """The space whose vectors are compared."""
        return self._space

    @property
    def _label(self) -> str | None:
        """How rows name the space; version 1's name none."""
        return self._space or None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._closed:
            raise errors.MemoryStoreError("memory is closed", where=str(self._path))
        with sqlite.named(self._path):
            yield

    async def close(self) -> None:
        """Write what waits, and let go of the file."""
        with anyio.CancelScope(shield=True):
            async with self._writer.turn:
                self._closed = True
                await self._connections.aclose()

    # Writing --------------------------------------------------------------------------------------------------

    async def put(self, record: MemoryRecord, *, room: Room | None = None) -> None:
        """Write a record, in the place of the one of the same id.

        Raises:
            errors.MemoryFullError: with it, its owner would have more than ``room``.
        """
        await self._writer.put(record, room)

    async def purge(self, tier: Tier | None, before_ms: int, *, owner: str | None = None) -> int:
        """Delete what was made before; how many."""
        async with self._writer.exclusive() as under_way:
            return await maintenance.purge(under_way, tier, before_ms, owner=owner)

    async def repair(
        self, command: Repair, *, apply: bool, owner: str | None = None, room: Room | None = None
    ) -> Repaired | None:
        """What the command does, done when ``apply``; None when there is no such record.

        Raises:
            errors.MemoryConflictError: the parent is not the expected one.
            errors.MemoryFullError: the record grew, and its owner would have more than ``room``.
        """
        async with self._writer.exclusive() as under_way:
            done = await maintenance.repair(under_way, command, apply=apply, owner=owner)
            if done is not None and done.changed and isinstance(done.before, MemoryRecord) and done.after is not None:
                await self._writer.grew(under_way, done.before, done.after, room)
            return done

    async def promote(self, record_id: str, tier: Tier, *, at_ms: int, owner: str | None = None) -> Repaired | None:
        """Move a record up to ``tier``; None when there is none.

        Raises:
            errors.MemoryConflictError: the record stands in a higher tier already.
        """
        async with self._writer.exclusive() as under_way:
            return await maintenance.promote(under_way, record_id, tier, at_ms=at_ms, owner=owner)

    async def compact(
        self, policy: CompactionPolicy, *, reason: str, now_ms: int, apply: bool, owner: str | None = None
    ) -> Compacted:
        """What the policy does, done when ``apply``, all of it or nothing."""
        async with self._writer.exclusive(COMPACT_SAVEPOINT) as under_way:
            return await maintenance.compact(under_way, policy, reason=reason, now_ms=now_ms, apply=apply, owner=owner)

    async def backfill(self, receipts: Sequence[SettlementReceipt], *, apply: bool) -> tuple[tuple[str, str], ...]:
        """Write into ``metadata.receipt_id`` what receipt paid for a record: (record id, receipt id); see ``plans``."""
        async with self._writer.exclusive(BACKFILL_SAVEPOINT) as under_way:
            return await maintenance.backfill(under_way, receipts, apply=apply)

    # Reading --------------------------------------------------------------------------------------------------

    async def get(self, record_id: str) -> MemoryRecord | None:
        """The record of an id."""
        with self._guarded():
            return await read.one(self._reader, record_id)

    async def existing(self, ids: Sequence[str]) -> set[str]:
        """Which of the ids are those of rows, good or bad."""
        with self._guarded():
            return await read.existing(self._reader, ids)

    async def counts(self) -> dict[Tier, int]:
        """How many rows each tier has, good or bad."""
        with self._guarded():
            return await read.counts(self._reader)

    async def recent(self, tier: Tier | None, limit: int, *, owner: str | None = None) -> list[MemoryRecord]:
        """The newest first; of the same moment, by id. Fewer than ``limit`` where they are more than may be held."""
        with self._guarded():
            return await read.recent(self._reader, tier, limit, owner)

    async def payables(self, *, owner: str | None = None) -> list[interface.Payable]:
        """What settlement has to know of each record, without its text and embedding."""
        with self._guarded():
            return await read.payables(self._reader, owner)

    async def bad_rows(self, limit: int) -> list[BadRow]:
        """Rows that are no records."""
        with self._guarded():
            return await read.bad_rows(self._reader, limit)

    # Searching ------------------------------------------------------------------------------------------------

    async def search(
        self,
        embedding: Sequence[float],
        text: str,
        tier: Tier | None,
        limit: int,
        min_relevance: float | None,
        *,
        owner: str | None = None,
    ) -> list[Hit]:
        """What is like the embedding, fused with what has words of the text; see ``ranking``."""
        if limit <= 0:
            return []
        asked = Asked(text, tier, limit, min_relevance, owner)
        with self._guarded():
            words = self._searcher.begin(asked)
            if not embedding:
                return await self._searcher.thread.run(lambda: self._searcher.hits(asked, words), owner)
            return await self._cache.use(lambda matrices: self._searcher.hits(asked, words, embedding, matrices), owner)

    async def warm(self) -> None:
        """Read what the first search needs, unless it is much. A search that comes meanwhile waits for it."""
        with self._guarded():
            await self._cache.warm(MOST_WARM_BYTES)

    async def _load(self) -> AsyncGenerator[tuple[int, Sequence[Block]], None]:
        """Every vector of this space, for the cache. The index of words is looked at on the way."""
        if await anyio.to_thread.run_sync(load.astray, self._path):
            async with self._writer.exclusive() as under_way:
                under_way.reindexed = True
                await schema.mend_index(under_way.db)
        with self._guarded():
            async with contextlib.aclosing(load.vectors(self._path, self._label)) as found:
                async for each in found:
                    yield each
