"""Memory in SQLite: ``memory.db``, which version 1 made or could have made.

WAL with synchronous=FULL: a commit that returned is on disk. Writers that wait for each other share one transaction.
One connection writes, another reads, so that a search waits for no sync.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiosqlite
import anyio
import anyio.to_thread

from covenant.stores.memory import plans, ranking, rows, schema, sqlite
from covenant.stores.memory.cache import Cache, Change, Gone, Moved, Put
from covenant.stores.memory.interface import (
    BACKFILL_SAVEPOINT,
    COMPACT_SAVEPOINT,
    BadRow,
    Compacted,
    CompactionPolicy,
    DeleteRecord,
    Hit,
    Repair,
    Repaired,
)
from covenant.stores.memory.vectors import Entry
from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier
from policy import errors

_COLUMNS: Final = ", ".join(rows.COLUMNS)
_SELECT: Final = f"SELECT rowid, {_COLUMNS} FROM memories"  # noqa: S608 - names of columns and marks, here and below
_ASSIGN: Final = ", ".join(f"{name} = excluded.{name}" for name in (*rows.COLUMNS[1:], "embedder"))
_PUT: Final = (
    f"INSERT INTO memories ({_COLUMNS}, embedder) VALUES ({', '.join('?' * (len(rows.COLUMNS) + 1))}) "  # noqa: S608
    f"ON CONFLICT (id) DO UPDATE SET {_ASSIGN}"
)

_TIERS: Final = frozenset(Tier)
_SPARE: Final = 8


class _Waiting:
    __slots__ = ("done", "error", "record", "values")

    def __init__(self, record: MemoryRecord) -> None:
        self.record = record
        self.values = rows.encode(record)
        self.done = False
        self.error: errors.CovenantError | None = None


class DurableMemory:
    """``Memory`` in one SQLite file; made by ``open``."""

    def __init__(
        self,
        path: Path,
        space: str,
        writer: aiosqlite.Connection,
        reader: aiosqlite.Connection,
        connections: contextlib.AsyncExitStack,
    ) -> None:
        self._path = path
        self._space = space
        self._writer = writer
        self._reader = reader
        self._connections = connections
        self._writing = anyio.Lock()
        self._queue: list[_Waiting] = []
        # What the transaction that is under way changes; the cache learns of it when it is committed.
        self._changes: list[Change] = []
        self._cache = Cache(self._load)
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
                return cls(path, space, writer, reader, stack.pop_all())

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
            async with self._writing:
                self._closed = True
                await self._connections.aclose()

    # Writing --------------------------------------------------------------------------------------------------

    async def put(self, record: MemoryRecord) -> None:
        """Write a record, in the place of the one of the same id."""
        waiting = _Waiting(record)
        self._queue.append(waiting)
        try:
            async with self._writing:
                if not waiting.done:
                    await self._put_queued()
        finally:
            # INVARIANT: what was cancelled before anybody took it is never written.
            if waiting in self._queue:
                self._queue.remove(waiting)
        await self._cache.settle()
        if waiting.error is not None:
            raise waiting.error

    async def _put_queued(self) -> None:
        """One transaction, and so one sync, for all that wait. Whoever holds the lock does it for the others."""
        group, self._queue = self._queue, []
        with anyio.CancelScope(shield=True):
            try:
                async with self._transaction():
                    for one in group:
                        await self._write(one.record, one.values)
            except errors.MemoryStoreError as e:
                for one in group:
                    one.error = errors.MemoryStoreError(e.message, hint=e.hint, where=e.where)
            finally:
                for one in group:
                    one.done = True

    async def _write(self, record: MemoryRecord, values: Sequence[Any] | None = None) -> None:
        row = rows.encode(record) if values is None else values
        await self._writer.execute(_PUT, (*row, self._label if record.embedding else None))
        vector = rows.vector(row[rows.COLUMNS.index("embedding")])
        self._changes.append(
            Gone(record.id)
            if vector is None
            else Put(Entry(record.id, record.tier, record.owner.pubkey, record.created_at, vector))
        )

    @contextlib.asynccontextmanager
    async def _transaction(self, savepoint: str = "memory_write") -> AsyncIterator[None]:
        """All or nothing. The caller holds the lock and is shielded."""
        with self._guarded():
            self._changes = []
            await self._writer.execute("BEGIN IMMEDIATE")
            try:
                await self._writer.execute(f"SAVEPOINT {savepoint}")
                yield
                await self._writer.execute(f"RELEASE {savepoint}")
                await self._writer.execute("COMMIT")
                self._cache.add(self._changes)
            except BaseException:
                if self._writer.in_transaction:
                    await self._writer.execute("ROLLBACK")
                raise

    @contextlib.asynccontextmanager
    async def _exclusive(self, savepoint: str = "memory_write") -> AsyncIterator[None]:
        async with self._writing:
            with anyio.CancelScope(shield=True):
                async with self._transaction(savepoint):
                    yield
        await self._cache.settle()

    async def purge(self, tier: Tier | None, before_ms: int, *, owner: str | None = None) -> int:
        """Delete what was made before; how many."""
        where, values = sqlite.where(tier=tier, owner=owner)
        async with self._exclusive():
            found = await self._writer.execute_fetchall(
                f"DELETE FROM memories WHERE created_at < ? AND {where} RETURNING id",  # noqa: S608
                (sqlite.clipped(before_ms), *values),
            )
            gone = [str(row[0]) for row in found]
            for record_id in gone:
                self._changes.append(Gone(record_id))
        return len(gone)

    async def repair(self, command: Repair, *, apply: bool, owner: str | None = None) -> Repaired | None:
        """What the command does, done when ``apply``; None when there is no such record.

        Raises:
            errors.MemoryConflictError: the parent is not the expected one.
        """
        async with self._exclusive():
            before = await self._row(self._writer, command.id)
            if isinstance(before, BadRow):
                # All that can be done with it, and only by whoever may see every row.
                if owner is not None or not isinstance(command, DeleteRecord):
                    return None
                after = None
            elif before is None or owner not in (None, before.owner.pubkey):
                return None
            else:
                after = plans.repaired(before, command)
            changed = apply and after != before
            if changed:
                await self._put_or_delete(command.id, after)
        return Repaired(before, after, changed)

    async def _put_or_delete(self, record_id: str, after: MemoryRecord | None) -> None:
        """Keeps the vector and its space as they are: only what people wrote is repaired."""
        if after is None:
            await self._writer.execute("DELETE FROM memories WHERE id = ?", (record_id,))
            self._changes.append(Gone(record_id))
            return
        row = dict(zip(rows.COLUMNS, rows.encode(after), strict=True))
        await self._writer.execute(
            "UPDATE memories SET tier = ?, metadata = ?, parent = ? WHERE id = ?",
            (row["tier"], row["metadata"], row["parent"], record_id),
        )

    async def promote(self, record_id: str, tier: Tier, *, at_ms: int, owner: str | None = None) -> Repaired | None:
        """Move a record up to ``tier``; None when there is none.

        Raises:
            errors.MemoryConflictError: the record stands in a higher tier already.
        """
        async with self._exclusive():
            before = await self._one(self._writer, record_id)
            if before is None or (owner not in (None, before.owner.pubkey)):
                return None
            after = plans.promoted(before, tier)
            if after != before:
                await self._writer.execute(
                    "UPDATE memories SET tier = ?, promoted_from = ?, promoted_at = ? WHERE id = ?",
                    (after.tier.value, before.tier.value, at_ms, record_id),
                )
                self._changes.append(Moved(record_id, after.tier))
        return Repaired(before, after, after != before)

    async def compact(
        self, policy: CompactionPolicy, *, reason: str, now_ms: int, apply: bool, owner: str | None = None
    ) -> Compacted:
        """What the policy does, done when ``apply``, all of it or nothing."""
        marked_at_ms = now_ms if policy.marked_at_ms is None else policy.marked_at_ms
        async with self._exclusive(COMPACT_SAVEPOINT):
            lines, ids = await self._lines(policy)
            plan = plans.compaction(lines, policy, ids=ids, owner=owner)
            if apply:
                for record_id in plan.deleted:
                    await self._put_or_delete(record_id, None)
                for record_id in plan.parents_detached:
                    await self._writer.execute("UPDATE memories SET parent = NULL WHERE id = ?", (record_id,))
                for record_id in plan.stale_marked:
                    record = await self._one(self._writer, record_id)
                    assert record is not None  # it was planned from within this transaction
                    await self._put_or_delete(record_id, plans.stale(record, marked_at_ms=marked_at_ms, reason=reason))
        return plan

    async def _lines(self, policy: CompactionPolicy) -> tuple[list[plans.Line], list[str]]:
        """What the plan has to know, and the ids of bad rows. Only a row that may be marked is read whole."""
        lines, bad = [], []
        select = "SELECT rowid, id, tier, owner_pubkey, created_at, parent FROM memories"
        cut = policy.mark_longterm_stale_before_ms
        async for chunk in self._chunks(self._writer, select):
            for _, record_id, tier, owner, created_at, parent in chunk:
                good = isinstance(created_at, int) and created_at >= 0 and tier in _TIERS
                good = good and isinstance(record_id, str) and isinstance(parent, str | None)
                good = good and sqlite.sayable(record_id + (parent or ""))
                marks = good and cut is not None and tier == Tier.LONGTERM and created_at < cut
                record = await self._one(self._writer, record_id) if marks else None
                if not good or (marks and record is None):
                    bad.append(str(record_id))
                    continue
                is_stale = record is not None and plans.is_stale(record.metadata)
                lines.append(plans.Line(record_id, Tier(tier), owner, created_at, parent, is_stale))
        return lines, bad

    async def backfill(self, receipts: Sequence[SettlementReceipt], *, apply: bool) -> tuple[tuple[str, str], ...]:
        """Write into ``metadata.receipt_id`` what receipt paid for a record: (record id, receipt id); see ``plans``."""
        async with self._exclusive(BACKFILL_SAVEPOINT):
            payable: list[plans.Payable] = []
            async for chunk in self._chunks(self._writer, _SELECT):
                records = [one for one in await rows.parse_all(chunk) if isinstance(one, MemoryRecord)]
                payable.extend(plans.payable(record) for record in records)
            found = plans.correlations(payable, receipts)
            for record_id, receipt_id in found if apply else ():
                paid = await self._one(self._writer, record_id)
                assert paid is not None  # it was read within this transaction
                await self._put_or_delete(record_id, plans.correlated(paid, receipt_id))
        return found

    async def payables(self, *, owner: str | None = None) -> list[plans.Payable]:
        """What settlement has to know of each record, without its text and embedding."""
        where, values = sqlite.where(tier=None, owner=owner)
        found: list[plans.Payable] = []
        with self._guarded():
            async for chunk in self._chunks(self._reader, _SELECT, where, values):
                records = [one for one in await rows.parse_all(chunk) if isinstance(one, MemoryRecord)]
                found.extend(plans.payable(record) for record in records)
        return found

    # Reading --------------------------------------------------------------------------------------------------

    async def get(self, record_id: str) -> MemoryRecord | None:
        """The record of an id."""
        with self._guarded():
            return await self._one(self._reader, record_id)

    async def existing(self, ids: Sequence[str]) -> set[str]:
        """Which of the ids are those of rows, good or bad."""
        found: set[str] = set()
        with self._guarded():
            for part in sqlite.parts([one for one in ids if sqlite.sayable(one)]):
                marks = ", ".join("?" * len(part))
                known = await self._reader.execute_fetchall(f"SELECT id FROM memories WHERE id IN ({marks})", part)  # noqa: S608
                found |= {str(row[0]) for row in known}
        return found

    async def counts(self) -> dict[Tier, int]:
        """How many rows each tier has, good or bad."""
        with self._guarded():
            # The index on (tier, created_at) has all that it needs.
            found = await self._reader.execute_fetchall("SELECT tier, count(*) FROM memories GROUP BY tier")
        known = {str(tier): int(count) for tier, count in found}
        return {tier: known.get(tier, 0) for tier in Tier}

    async def recent(self, tier: Tier | None, limit: int, *, owner: str | None = None) -> list[MemoryRecord]:
        """The newest first; of the same moment, by id. Fewer than ``limit`` where they are more than may be held."""
        where, values = sqlite.where(tier=tier, owner=owner)
        found: list[MemoryRecord] = []
        statement = f"{_SELECT} WHERE {where} ORDER BY created_at DESC, id LIMIT ? OFFSET ?"
        with self._guarded():
            start, room = 0, sqlite.MOST_HELD_BYTES
            # Bad rows take no good one's place.
            while len(found) < limit and room > 0:
                wanted = min(limit - len(found), sqlite.PAGE)
                page = list(await self._reader.execute_fetchall(statement, (*values, wanted, start)))
                found += [one for one in await rows.parse_all(page) if isinstance(one, MemoryRecord)]
                start += len(page)
                room -= sqlite.held(page)
                if len(page) < wanted:
                    break
        return found

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
        depth = ranking.depth(limit)
        with self._guarded():
            by_words = await self._by_words(text, tier, depth, owner)
            # Without another ranking this one is the answer, and a little more for what is deleted meanwhile.
            count = depth if by_words else min(depth, limit + _SPARE)
            by_cosine, scores = await self._cache.best(
                embedding, count, tier=tier, owner=owner, floor=min_relevance or 0.0, also=list(by_words)
            )
            order = ranking.fused(by_cosine, by_words, scores, min_relevance=min_relevance)
            hits: list[Hit] = []
            room = sqlite.MOST_HELD_BYTES
            # Only what is answered is read whole; what was deleted meanwhile makes room for the next.
            while order and len(hits) < limit and room > 0:
                count = min(limit - len(hits), sqlite.PAGE)
                page, order = order[:count], order[count:]
                known = await self._many(record_id for record_id, _ in page)
                hits += [Hit(known[record_id], score) for record_id, score in page if record_id in known]
                room -= sum(len(record.text) for record in known.values())
        return hits

    async def _by_words(self, text: str, tier: Tier | None, depth: int, owner: str | None) -> dict[str, int]:
        """When what has the words was made, best first."""
        terms = await self._telling(ranking.words(text))
        expression = ranking.match_expression(terms)
        if not expression:
            return {}
        where, values = sqlite.where(tier=tier, owner=owner, table="m")
        found = await self._reader.execute_fetchall(
            f"SELECT m.id, m.created_at FROM memory_fts f JOIN memories m ON m.rowid = f.rowid AND m.id = f.id "  # noqa: S608
            f"WHERE memory_fts MATCH ? AND {where} ORDER BY f.rank, m.created_at DESC, m.id LIMIT ?",
            (expression, *values, depth),
        )
        return {str(row[0]): row[1] for row in found if isinstance(row[1], int)}

    async def _telling(self, terms: Sequence[str]) -> list[str]:
        """The words of at most ``ranking.COMMON`` records: to rank by the others takes long and tells little."""
        if not terms:
            return []
        count = "SELECT count(*) FROM (SELECT 1 FROM memory_fts WHERE memory_fts MATCH ? LIMIT ?)"
        values = [v for term in terms for v in (ranking.match_expression([term]) or '""', ranking.COMMON + 1)]
        found = await self._reader.execute_fetchall(" UNION ALL ".join([count] * len(terms)), values)
        return [term for term, row in zip(terms, found, strict=True) if row[0] <= ranking.COMMON]

    async def bad_rows(self, limit: int) -> list[BadRow]:
        """Rows that are no records."""
        found: list[BadRow] = []
        with self._guarded():
            async for chunk in self._chunks(self._reader, _SELECT):
                found += await anyio.to_thread.run_sync(rows.bad_rows, chunk)
                if len(found) >= limit:
                    break
        return found[:limit]

    async def _one(self, db: aiosqlite.Connection, record_id: str) -> MemoryRecord | None:
        row = await self._row(db, record_id)
        return row if isinstance(row, MemoryRecord) else None

    async def _row(self, db: aiosqlite.Connection, record_id: str) -> MemoryRecord | BadRow | None:
        if not sqlite.sayable(record_id):
            return None
        found = list(await db.execute_fetchall(f"{_SELECT} WHERE id = ?", (record_id,)))
        return rows.parse(found[0]) if found else None

    async def _many(self, ids: Iterable[str]) -> Mapping[str, MemoryRecord]:
        found: dict[str, MemoryRecord] = {}
        for part in sqlite.parts(sorted(filter(sqlite.sayable, ids))):
            marks = ", ".join("?" * len(part))
            page = await self._reader.execute_fetchall(f"{_SELECT} WHERE id IN ({marks})", part)
            records = [one for one in await rows.parse_all(page) if isinstance(one, MemoryRecord)]
            found.update((record.id, record) for record in records)
        return found

    async def _chunks(
        self, db: aiosqlite.Connection, select: str, where: str = "TRUE", values: Sequence[Any] = ()
    ) -> AsyncIterator[list[Any]]:
        """All rows of a SELECT whose first column is the rowid, a few at a time."""
        statement = f"{select} WHERE rowid > ? AND {where} ORDER BY rowid LIMIT {sqlite.CHUNK}"
        last = -(2**63)
        while True:
            chunk = list(await db.execute_fetchall(statement, (last, *values)))
            if chunk:
                yield chunk
            if len(chunk) < sqlite.CHUNK:
                return
            last = chunk[-1][0]

    async def _load(self) -> AsyncIterator[tuple[Mapping[int, int], list[Entry]]]:
        """Every vector of this space, for the cache. The index of words is looked at on the way."""
        async with self._writing:
            with anyio.CancelScope(shield=True):
                async with self._transaction():
                    await schema.mend_index(self._writer)
        with self._guarded():
            where, label = "embedder IS ?", (self._label,)
            counted = await self._reader.execute_fetchall(
                f"SELECT length(embedding) / 4, count(*) FROM memories WHERE {where} GROUP BY 1",  # noqa: S608
                label,
            )
            sizes = {size: count for size, count in counted if size}
            yield sizes, []
            select = "SELECT rowid, id, tier, owner_pubkey, created_at, embedding FROM memories"
            async for chunk in self._chunks(self._reader, select, where, label):
                yield {}, await anyio.to_thread.run_sync(_entries, chunk)


def _entries(found: Sequence[Any]) -> list[Entry]:
    return [entry for row in found if (entry := _entry(row)) is not None]


def _entry(row: Any) -> Entry | None:
    _, record_id, tier, owner, created_at, blob = row
    vector = rows.vector(blob) if isinstance(blob, bytes) else None
    if vector is None or tier not in _TIERS or not isinstance(created_at, int):
        return None
    return Entry(str(record_id), Tier(tier), str(owner), created_at, vector)
