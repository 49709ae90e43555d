"""Read rows as records, over any connection: one by id, the newest, or all in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiosqlite
import anyio.to_thread

from covenant.stores.memory import interface, plans, rows, sqlite
from covenant.stores.memory.interface import BadRow
from covenant.wire.types import MemoryRecord, Tier


async def one(db: aiosqlite.Connection, record_id: str) -> MemoryRecord | None:
    """Return the record with this id."""
    found = await row(db, record_id)
    return found if isinstance(found, MemoryRecord) else None


async def row(db: aiosqlite.Connection, record_id: str) -> MemoryRecord | BadRow | None:
    """Return the row with this id, good or bad."""
    if not sqlite.sayable(record_id):
        return None
    found = list(await db.execute_fetchall(f"{rows.SELECT} WHERE id = ?", (record_id,)))
    return rows.parse(found[0]) if found else None


async def existing(db: aiosqlite.Connection, ids: Sequence[str]) -> set[str]:
    """Return those of the ids that have rows, good or bad."""
    found: set[str] = set()
    for part in sqlite.parts([one for one in ids if sqlite.sayable(one)]):
        marks = ", ".join("?" * len(part))
        known = await db.execute_fetchall(f"SELECT id FROM memories WHERE id IN ({marks})", part)  # noqa: S608
        found |= {str(row[0]) for row in known}
    return found


async def counts(db: aiosqlite.Connection) -> dict[Tier, int]:
    """Return the number of rows of each tier, good or bad."""
    # The index on (tier, created_at) covers this query.
    found = await db.execute_fetchall("SELECT tier, count(*) FROM memories GROUP BY tier")
    known = {str(tier): int(count) for tier, count in found}
    return {tier: known.get(tier, 0) for tier in Tier}


async def recent(
    db: aiosqlite.Connection, tier: Tier | None, limit: int, owner: str | None, *, vectors: bool = True
) -> list[MemoryRecord]:
    """Return the newest first, then by id. Returns fewer than ``limit`` if they exceed the bytes held at once.

    A vector takes some 10 KB as numbers of Python: ``vectors`` False drops those of each page.
    """
    where, values = sqlite.where(tier=tier, owner=owner)
    found: list[MemoryRecord] = []
    statement = f"{rows.SELECT} WHERE {where} ORDER BY created_at DESC, id LIMIT ? OFFSET ?"
    start, room = 0, sqlite.MOST_HELD_BYTES
    # Bad rows do not count towards the limit.
    while len(found) < limit and room > 0:
        wanted = min(limit - len(found), sqlite.PAGE)
        page = list(await db.execute_fetchall(statement, (*values, wanted, start)))
        whole = await records(page)
        found += whole if vectors else [one.model_copy(update={"embedding": ()}) for one in whole]
        start += len(page)
        room -= sqlite.held(page)
        if len(page) < wanted:
            break
    return found


async def records(page: Sequence[Any]) -> list[MemoryRecord]:
    """Return the rows that are valid records."""
    return [one for one in await rows.parse_all(page) if isinstance(one, MemoryRecord)]


async def payables(db: aiosqlite.Connection, owner: str | None = None) -> list[interface.Payable]:
    """Return the fields of each record that settlement needs, without text and embedding."""
    where, values = sqlite.where(tier=None, owner=owner)
    found: list[interface.Payable] = []
    async for chunk in chunks(db, rows.SELECT, where, values):
        found.extend(plans.payable(record) for record in await records(chunk))
    return found


async def bad_rows(db: aiosqlite.Connection, limit: int) -> list[BadRow]:
    """Return rows that are not valid records."""
    found: list[BadRow] = []
    async for chunk in chunks(db, rows.SELECT):
        found += await anyio.to_thread.run_sync(rows.bad_rows, chunk)
        if len(found) >= limit:
            break
    return found[:limit]


async def chunks(
    db: aiosqlite.Connection, select: str, where: str = "TRUE", values: Sequence[Any] = ()
) -> AsyncIterator[list[Any]]:
    """Yield all rows of a SELECT whose first column is the rowid, in chunks."""
    statement = f"{select} WHERE rowid > ? AND {where} ORDER BY rowid LIMIT {sqlite.CHUNK}"
    last = -(2**63)
    while True:
        chunk = list(await db.execute_fetchall(statement, (last, *values)))
        if chunk:
            yield chunk
        if len(chunk) < sqlite.CHUNK:
            return
        last = chunk[-1][0]
