"""The only connection that writes: whole transactions; queued writes share one transaction and one sync."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import aiosqlite
import anyio

from covenant.stores.memory import rows
from covenant.stores.memory.index.cache import Cache, Change, Gone, Moved, Put
from covenant.stores.memory.index.vectors import RecordVectors
from covenant.stores.memory.interface import Room
from covenant.stores.memory.quotas import Tallies, size_of
from covenant.wire.types import MemoryRecord, Tier
from policy import errors

_COLUMNS: Final = ", ".join(rows.COLUMNS)
_ASSIGN: Final = ", ".join(f"{name} = excluded.{name}" for name in (*rows.COLUMNS[1:], "embedder"))
_PUT: Final = (
    f"INSERT INTO memories ({_COLUMNS}, embedder) VALUES ({', '.join('?' * (len(rows.COLUMNS) + 1))}) "  # noqa: S608
    f"ON CONFLICT (id) DO UPDATE SET {_ASSIGN}"
)
_EMBEDDING: Final = rows.COLUMNS.index("embedding")


class Transaction:
    """An open transaction: all of it or nothing. The cache receives ``changes`` when it is committed.

    ``reindexed``: words of rows outside ``changes`` were written as well.
    """

    def __init__(self, db: aiosqlite.Connection, label: str | None) -> None:
        self.db = db
        self.changes: list[Change] = []
        self.reindexed = False
        self._label = label

    async def write(self, record: MemoryRecord, row: Sequence[Any]) -> None:
        """Write a record, given with its row, in place of one with the same id."""
        await self.db.execute(_PUT, (*row, self._label if record.embedding else None))
        vector = rows.vector(row[_EMBEDDING])
        self.changes.append(
            Gone(record.id)
            if vector is None
            else Put(RecordVectors(record.id, record.tier, record.owner.pubkey, record.created_at, vector))
        )

    async def delete(self, record_id: str) -> None:
        """Delete a row."""
        await self.db.execute("DELETE FROM memories WHERE id = ?", (record_id,))
        self.changes.append(Gone(record_id))

    async def update(self, record: MemoryRecord) -> None:
        """Write the fields that repairs change; the vector and its space stay unchanged."""
        row = dict(zip(rows.COLUMNS, rows.encode(record), strict=True))
        await self.db.execute(
            "UPDATE memories SET tier = ?, metadata = ?, parent = ? WHERE id = ?",
            (row["tier"], row["metadata"], row["parent"], record.id),
        )

    async def move(self, record_id: str, tier: Tier, *, from_tier: Tier, at_ms: int) -> None:
        """Move a record to another tier."""
        await self.db.execute(
            "UPDATE memories SET tier = ?, promoted_from = ?, promoted_at = ? WHERE id = ?",
            (tier.value, from_tier.value, at_ms, record_id),
        )
        self.changes.append(Moved(record_id, tier))


class _Waiting:
    __slots__ = ("done", "error", "record", "room", "row")

    def __init__(self, record: MemoryRecord, room: Room | None) -> None:
        self.record = record
        self.room = room
        self.row = rows.encode(record)
        self.done = False
        self.error: errors.CovenantError | None = None


class Writer:
    """Serialises writes by a lock. ``guarded`` checks that the store is open and converts errors; ``committed`` is
    called with the number of rows that each commit wrote or deleted."""

    def __init__(
        self,
        db: aiosqlite.Connection,
        cache: Cache,
        committed: Callable[[int], None],
        label: str | None,
        guarded: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.turn = anyio.Lock()
        self._db = db
        self._cache = cache
        self._committed = committed
        self._label = label
        self._guarded = guarded
        self._queue: list[_Waiting] = []
        self._tallies = Tallies()

    async def put(self, record: MemoryRecord, room: Room | None) -> None:
        """Write a record, in place of one with the same id.

        Raises:
            errors.MemoryFullError: with it, its owner would have more than ``room``.
        """
        waiting = _Waiting(record, room)
        self._queue.append(waiting)
        try:
            async with self.turn:
                if not waiting.done:
                    await self._put_queued()
        finally:
            # INVARIANT: a record whose put is cancelled before a group took it is never written.
            if waiting in self._queue:
                self._queue.remove(waiting)
        await self._cache.settle()
        if waiting.error is not None:
            raise waiting.error

    async def _put_queued(self) -> None:
        """Write all queued records in one transaction, with one sync. The holder of the lock does it for the others."""
        group, self._queue = self._queue, []
        with anyio.CancelScope(shield=True):
            try:
                async with self._transaction("memory_write") as under_way:
                    for one in group:
                        await self._put_one(under_way, one)
            except errors.MemoryStoreError as e:
                for one in group:
                    one.error = errors.MemoryStoreError(e.message, hint=e.hint, where=e.where)
            except BaseException as e:
                # After any error no record of the group is written, and every waiting caller gets the error.
                for one in group:
                    one.error = errors.MemoryStoreError(f"memory cannot be written: {type(e).__name__}")
                raise
            finally:
                for one in group:
                    one.done = True

    async def _put_one(self, under_way: Transaction, one: _Waiting) -> None:
        if one.room is not None:
            try:
                await self._tallies.check(under_way.db, one.row, one.room)
            except errors.MemoryFullError as e:
                # The error is this record's alone: the others of the group are written.
                one.error = e
                return
        await under_way.write(one.record, one.row)
        self._tallies.note(one.row)

    async def grew(self, under_way: Transaction, before: MemoryRecord, after: MemoryRecord, room: Room | None) -> None:
        """Within a transaction: record that a record replaced another of the same id and owner.

        Raises:
            errors.MemoryFullError: with it, its owner has more than ``room``.
        """
        by = size_of(rows.encode(after)) - size_of(rows.encode(before))
        await self._tallies.grew(under_way.db, after.owner.pubkey, by, room)

    @contextlib.asynccontextmanager
    async def exclusive(self, savepoint: str = "memory_write") -> AsyncIterator[Transaction]:
        """Wait for the lock and open a transaction; a cancellation does not interrupt it."""
        async with self.turn:
            with anyio.CancelScope(shield=True):
                async with self._transaction(savepoint) as under_way:
                    yield under_way
                if any(isinstance(change, Gone) for change in under_way.changes):
                    self._tallies.forget()
        await self._cache.settle()

    @contextlib.asynccontextmanager
    async def between(self) -> AsyncIterator[aiosqlite.Connection]:
        """Wait for the lock and yield the connection without a transaction; a cancellation does not interrupt it."""
        async with self.turn:
            with anyio.CancelScope(shield=True), self._guarded():
                yield self._db

    @contextlib.asynccontextmanager
    async def _transaction(self, savepoint: str) -> AsyncIterator[Transaction]:
        """Open a transaction: all or nothing. The caller holds the lock and is shielded."""
        with self._guarded():
            under_way = Transaction(self._db, self._label)
            await self._db.execute("BEGIN IMMEDIATE")
            try:
                await self._db.execute(f"SAVEPOINT {savepoint}")
                before = self._db.total_changes
                yield under_way
                await self._db.execute(f"RELEASE {savepoint}")
                await self._db.execute("COMMIT")
                self._cache.add(under_way.changes)
                # A commit that wrote nothing is not counted, and a rebuilt index changed more words than ``changes``
                # says.
                if self._db.total_changes != before and not under_way.reindexed:
                    self._committed(sum(not isinstance(change, Moved) for change in under_way.changes))
            except BaseException:
                self._tallies.forget()
                if self._db.in_transaction:
                    await self._db.execute("ROLLBACK")
                raise
