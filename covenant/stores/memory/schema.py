"""The database: version 1's tables and indexes, unchanged, and additions by ``user_version``.

    0    version 1: table `memories`, indexes on (tier, created_at DESC) and (created_at DESC)
    1    columns `embedder`, `promoted_from`, `promoted_at`; table `memory_fts` and the triggers that update it
    2    index on (owner_pubkey, created_at DESC)
    3    table `memory_numbers`; the index of words has characters and pairs of scripts without spaces

Every addition may be empty and version 1 needs none of them, so it can still write the same file. Its rows have no
embedder, and the triggers add their words to the index.
"""

from __future__ import annotations

import sqlite3
from typing import Final

import aiosqlite

from covenant.stores.memory.index import terms
from covenant.stores.memory.rows import COLUMNS
from policy import errors

VERSION: Final = 3

_TABLE: Final = """
CREATE TABLE memories (
    id TEXT PRIMARY KEY,
    tier TEXT NOT NULL,
    owner_display TEXT NOT NULL,
    owner_pubkey TEXT NOT NULL,
    text TEXT NOT NULL,
    embedding BLOB NOT NULL,
    metadata TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    parent TEXT
)"""
# (name, columns) in the form of PRAGMA index_xinfo; an index of version 1 has the same columns under any name.
_INDEXES: Final = (
    ("memories_by_tier", (("tier", 0), ("created_at", 1))),
    ("memories_by_time", (("created_at", 1),)),
)
_ADDITIONS: Final = (
    "ALTER TABLE memories ADD COLUMN embedder TEXT",
    "ALTER TABLE memories ADD COLUMN promoted_from TEXT",
    "ALTER TABLE memories ADD COLUMN promoted_at INTEGER",
    'CREATE VIRTUAL TABLE memory_fts USING fts5(id UNINDEXED, text, tokenize = "unicode61 remove_diacritics 2")',
)
# INVARIANT: every trigger deletes before it inserts, so that any statement leaves a row in the index exactly once: an
# `INSERT OR REPLACE` of version 1 fires no delete trigger (sqlite.org/lang_conflict.html).
_TRIGGERS: Final = (
    f"""CREATE TRIGGER memory_fts_insert AFTER INSERT ON memories BEGIN
        DELETE FROM memory_fts WHERE rowid = new.rowid;
        INSERT INTO memory_fts (rowid, id, text) VALUES (new.rowid, new.id, {terms.indexed("new.text")});
    END""",  # noqa: S608
    f"""CREATE TRIGGER memory_fts_update AFTER UPDATE OF id, text ON memories BEGIN
        DELETE FROM memory_fts WHERE rowid = old.rowid;
        DELETE FROM memory_fts WHERE rowid = new.rowid;
        INSERT INTO memory_fts (rowid, id, text) VALUES (new.rowid, new.id, {terms.indexed("new.text")});
    END""",  # noqa: S608
    """CREATE TRIGGER memory_fts_delete AFTER DELETE ON memories BEGIN
        DELETE FROM memory_fts WHERE rowid = old.rowid;
    END""",
)
_OLD_TRIGGERS: Final = ("memory_fts_insert", "memory_fts_update", "memory_fts_delete")
_BY_OWNER: Final = "CREATE INDEX IF NOT EXISTS memories_by_owner ON memories (owner_pubkey, created_at DESC)"
_EMPTY: Final = "DELETE FROM memory_fts"
_FILL: Final = f"""
INSERT INTO memory_fts (rowid, id, text) SELECT rowid, id, {terms.indexed("text")} FROM memories"""  # noqa: S608
# Rows that are missing from the index or have another number there: VACUUM may renumber such a table.
_ASTRAY: Final = """
SELECT (SELECT count(*) FROM memories) != (SELECT count(*) FROM memory_fts_content)
    OR EXISTS (SELECT 1 FROM memories m LEFT JOIN memory_fts_content c ON c.id = m.rowid WHERE c.c0 IS NOT m.id)"""


async def prepare(db: aiosqlite.Connection, *, where: str) -> None:
    """Upgrade a database, whether new, of version 1 or of an older daemon, to ``VERSION`` in one transaction.

    Raises:
        errors.MemoryStoreError: a newer daemon made it, or its table is not version 1's.
    """
    version = await number(db, "PRAGMA user_version")
    if version > VERSION:
        raise errors.MemoryStoreError(
            f"database has version {version}; this daemon knows {VERSION}",
            hint="start the newer daemon that made it",
            where=where,
        )
    if version == VERSION:
        return
    await db.execute("BEGIN IMMEDIATE")
    try:
        if version < 1:
            await _to_1(db, where)
        await db.execute(_BY_OWNER)
        await _to_3(db)
        await db.execute(f"PRAGMA user_version = {VERSION}")
        await db.execute("COMMIT")
    except BaseException:
        await db.execute("ROLLBACK")
        raise


async def _to_1(db: aiosqlite.Connection, where: str) -> None:
    present = [row[1] for row in await db.execute_fetchall("PRAGMA table_info(memories)")]
    if not present:
        await db.execute(_TABLE)
    elif missing := [name for name in COLUMNS if name not in present]:
        raise errors.MemoryStoreError(f"table `memories` has no column `{missing[0]}`", where=where)
    indexed = set()
    for row in await db.execute_fetchall("PRAGMA index_list(memories)"):
        quoted = str(row[1]).replace('"', '""')
        columns = await db.execute_fetchall(f'PRAGMA index_xinfo("{quoted}")')
        indexed.add(tuple((c[2], c[3]) for c in columns if c[5]))
    for name, wanted in _INDEXES:
        if wanted not in indexed:
            columns_sql = ", ".join(f"{column}{' DESC' if down else ''}" for column, down in wanted)
            await db.execute(f"CREATE INDEX {name} ON memories ({columns_sql})")
    for statement in _ADDITIONS:
        await db.execute(statement)


async def _to_3(db: aiosqlite.Connection) -> None:
    for name in _OLD_TRIGGERS:
        await db.execute(f"DROP TRIGGER IF EXISTS {name}")
    for statement in (terms.OLD_NUMBERS, terms.NUMBERS, *_TRIGGERS, _EMPTY, _FILL):
        await db.execute(statement)


def astray(db: sqlite3.Connection) -> bool:
    """Whether the index of words no longer matches the table."""
    return bool(db.execute(_ASTRAY).fetchone()[0])


async def mend_index(db: aiosqlite.Connection) -> None:
    """Rebuild the index of words if it no longer matches the table. The caller holds a transaction."""
    if await number(db, _ASTRAY):
        await db.execute(_EMPTY)
        await db.execute(_FILL)


async def number(db: aiosqlite.Connection, statement: str) -> int:
    """Return the single number that a statement has as its answer."""
    rows = list(await db.execute_fetchall(statement))
    return int(rows[0][0])
