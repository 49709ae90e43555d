"""Memory in SQLite: ``memory.db``, in a format that version 1 shares.

WAL with synchronous=FULL: a commit is on disk when it returns. Concurrent writers share one transaction (``writing``).
Other connections read (``reading``), search (``searching``) and fill the matrices (``loading``), so that none of these
waits for a sync.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Final

import aiosqlite
import anyio
import anyio.to_thread

from covenant.stores.memory import interface, load, maintenance, read, schema, shrink, sqlite
from covenant.stores.memory.index.cache import Cache
from covenant.stores.memory.index.vectors import Block
from covenant.stores.memory.interface import (
    BACKFILL_SAVEPOINT,
    COMPACT_SAVEPOINT,
    BadRow,
    CompactionCutoffs,
    Hit,
    MemoryCompaction,
    Repair,
    Repaired,
    Room,
)
from covenant.stores.memory.search import Asked, Searcher
from covenant.stores.memory.write import Writer
from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier
from policy import errors

_LOG: Final = logging.getLogger(__name__)
# Larger matrices are not read before the first search.
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
        """Open or create the database; ``space`` names the embedder whose vectors are compared.

        Raises:
            errors.MemoryStoreError: it is a symlink or no database, or a newer daemon made it.
        """
        with sqlite.named(path):
            await anyio.to_thread.run_sync(sqlite.make_private, path)
            async with contextlib.AsyncExitStack() as stack:
                writer = await stack.enter_async_context(sqlite.connected(path))
                await writer.execute("PRAGMA journal_mode = WAL")
                await shrink.bound_journal(writer)
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
        """The name of the space in rows; version 1's rows have none."""
        return self._space or None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._closed:
            raise errors.MemoryStoreError("memory is closed", where=str(self._path))
        with sqlite.named(self._path):
            yield

    async def close(self) -> None:
        """Write the queued records, and close the file."""
        with anyio.CancelScope(shield=True):
            async with self._writer.turn:
                self._closed = True
                await self._connections.aclose()

    # Writing --------------------------------------------------------------------------------------------------

    async def put(self, record: MemoryRecord, *, room: Room | None = None) -> None:
        """Write a record, in place of one with the same id.

        Raises:
            errors.MemoryFullError: with it, its owner would have more than ``room``.
        """
        await self._writer.put(record, room)

    async def purge(self, tier: Tier | None, before_ms: int, *, owner: str | None = None) -> int:
        """Delete records created before ``before_ms``, and give their disk back. Returns their number."""
        async with self._writer.exclusive() as under_way:
            purged = await maintenance.purge(under_way, tier, before_ms, owner=owner)
        await self._give_back()
        return purged

    async def repair(
        self, command: Repair, *, apply: bool, owner: str | None = None, room: Room | None = None
    ) -> Repaired | None:
        """Plan a repair, and execute it if ``apply``. Returns None if there is no such record.

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
        """Move a record up to ``tier``. Returns None if there is no such record.

        Raises:
            errors.MemoryConflictError: the record is in a higher tier already.
        """
        async with self._writer.exclusive() as under_way:
            return await maintenance.promote(under_way, record_id, tier, at_ms=at_ms, owner=owner)

    async def compact(
        self, policy: CompactionCutoffs, *, reason: str, now_ms: int, apply: bool, owner: str | None = None
    ) -> MemoryCompaction:
        """Plan a compaction, and execute all of it or nothing if ``apply``."""
        async with self._writer.exclusive(COMPACT_SAVEPOINT) as under_way:
            plan = await maintenance.compact(under_way, policy, reason=reason, now_ms=now_ms, apply=apply, owner=owner)
        if apply:
            await self._give_back()
        return plan

    async def backfill(self, receipts: Sequence[SettlementReceipt], *, apply: bool) -> tuple[tuple[str, str], ...]:
        """Write to ``metadata.receipt_id`` the receipt that paid for a record. Returns (record id, receipt id); see
        ``plans``."""
        async with self._writer.exclusive(BACKFILL_SAVEPOINT) as under_way:
            return await maintenance.backfill(under_way, receipts, apply=apply)

    async def _give_back(self) -> None:
        """Give the disk of deleted records back. A failure is logged: the records are deleted by now."""
        # Shielded: the caller still has to log the deletion.
        with anyio.CancelScope(shield=True):
            try:
                async with self._writer.between() as db:
                    await shrink.give_back(db)
            except errors.MemoryStoreError as e:
                _LOG.warning("the disk of deleted records is not given back: %s", e)

    # Reading --------------------------------------------------------------------------------------------------

    async def get(self, record_id: str) -> MemoryRecord | None:
        """Return the record with this id."""
        with self._guarded():
            return await read.one(self._reader, record_id)

    async def existing(self, ids: Sequence[str]) -> set[str]:
        """Return those of the ids that have rows, good or bad."""
        with self._guarded():
            return await read.existing(self._reader, ids)

    async def counts(self) -> dict[Tier, int]:
        """Return the number of rows of each tier, good or bad."""
        with self._guarded():
            return await read.counts(self._reader)

    async def recent(
        self, tier: Tier | None, limit: int, *, owner: str | None = None, vectors: bool = True
    ) -> list[MemoryRecord]:
        """As the interface says. Returns fewer than ``limit`` if they exceed the bytes held at once."""
        with self._guarded():
            return await read.recent(self._reader, tier, limit, owner, vectors=vectors)

    async def payables(self, *, owner: str | None = None) -> list[interface.Payable]:
        """Return the fields of each record that settlement needs, without text and embedding."""
        with self._guarded():
            return await read.payables(self._reader, owner)

    async def bad_rows(self, limit: int) -> list[BadRow]:
        """Return rows that are not valid records."""
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
        """Return records similar to the embedding, fused with records that contain words of the text; see
        ``ranking``."""
        if limit <= 0:
            return []
        asked = Asked(text, tier, limit, min_relevance, owner)
        with self._guarded():
            words = self._searcher.begin(asked)
            if not embedding:
                return await self._searcher.thread.run(lambda: self._searcher.hits(asked, words), owner)
            return await self._cache.use(lambda matrices: self._searcher.hits(asked, words, embedding, matrices), owner)

    async def warm(self) -> None:
        """Read the data for the first search, unless it is too large. A concurrent search waits for it."""
        with self._guarded():
            await self._cache.warm(MOST_WARM_BYTES)

    async def _load(self) -> AsyncGenerator[tuple[int, Sequence[Block]], None]:
        """Yield every vector of this space, for the cache. Repairs the index of words on the way."""
        if await anyio.to_thread.run_sync(load.astray, self._path):
            async with self._writer.exclusive() as under_way:
                under_way.reindexed = True
                await schema.mend_index(under_way.db)
        with self._guarded():
            async with contextlib.aclosing(load.vectors(self._path, self._label)) as found:
                async for each in found:
                    yield each
