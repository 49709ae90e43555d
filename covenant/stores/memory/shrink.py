"""Give disk back after records were deleted: free pages to the file system, and the write-ahead log cut.

SQLite keeps the pages of deleted rows for later rows, and the write-ahead log as large as its largest transaction. A
VACUUM writes what is left anew. The other way, a map of pages that lets SQLite move them in parts (auto_vacuum), makes
each deletion several times as long.
"""

from __future__ import annotations

from typing import Final

import aiosqlite

from covenant.stores.memory import schema, sqlite

# The write-ahead log is cut to this size when it begins anew (sqlite.org/pragma.html#pragma_journal_size_limit).
JOURNAL_BYTES: Final = 16 * 1024 * 1024
# Free pages are given back when they are this many bytes, and this part of the file: a few are soon used again, and
# what is left is written whole.
LEAST_BYTES: Final = 4 * 1024 * 1024
PART: Final = 4
# How long the cut of the write-ahead log waits for readers. Where they take longer, a later write cuts it.
_CUT_MS: Final = 500


async def bound_journal(db: aiosqlite.Connection) -> None:
    """Bound the write-ahead log that the writer's connection leaves."""
    await db.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")


async def give_back(db: aiosqlite.Connection) -> None:
    """Give free pages back if they are many, and cut the write-ahead log. The caller holds no transaction.

    A crash in between loses nothing: the file is the old one or the new one, and the next deletion gives back the rest.
    """
    try:
        if await _is_worth_it(db):
            # Deleted rows leave their words in the index until its parts are merged (sqlite.org/fts5.html).
            await db.execute("INSERT INTO memory_fts (memory_fts) VALUES ('optimize')")
            await db.execute("VACUUM")
            await _renumber(db)
    finally:
        await _cut(db)


async def _is_worth_it(db: aiosqlite.Connection) -> bool:
    free = await schema.number(db, "PRAGMA freelist_count")
    size = await schema.number(db, "PRAGMA page_size")
    return free * size >= LEAST_BYTES and free * PART >= await schema.number(db, "PRAGMA page_count")


async def _renumber(db: aiosqlite.Connection) -> None:
    """Mend the index of words, which knows rows by number: a VACUUM may number them anew (sqlite.org/lang_vacuum.html).

    After a crash before this, the first search with a vector mends it.
    """
    await db.execute("BEGIN IMMEDIATE")
    try:
        await schema.mend_index(db)
        await db.execute("COMMIT")
    except BaseException:
        await db.execute("ROLLBACK")
        raise


async def _cut(db: aiosqlite.Connection) -> None:
    await db.execute(f"PRAGMA busy_timeout = {_CUT_MS}")
    try:
        await db.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        await db.execute(f"PRAGMA busy_timeout = {sqlite.BUSY_MS}")
    await db.execute("PRAGMA shrink_memory")
