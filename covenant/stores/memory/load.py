"""Reads every vector of a space from SQLite, for the matrices: one statement, in columns, a few thousand at a time.

100,000 vectors of 384 are 150 MB. What that takes is their copies and what Python makes of each row, so no row is made
an object of ours: its bytes are joined with those of others, and become rows of a matrix at once.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
import numpy as np

from covenant.stores.memory import rows, schema, sqlite
from covenant.stores.memory.index.vectors import Block
from covenant.wire.types import Tier

# As many as numpy's copies of them stay in the processor's cache.
ROWS: Final = 1024
_SELECT: Final = (
    "SELECT id, tier, owner_pubkey, created_at, embedding FROM memories WHERE embedder IS ? AND length(embedding) > 0"
)
_TIERS: Final = {tier.value: tier for tier in Tier}


def astray(path: Path) -> bool:
    """Whether the index of words has gone astray: seen without keeping anybody from writing."""
    with contextlib.closing(sqlite.reading(path)) as db:
        return schema.astray(db)


async def vectors(path: Path, label: str | None) -> AsyncGenerator[tuple[int, Sequence[Block]], None]:
    """How many records there are, and blocks of those of the space that have a vector. It ends where it is closed."""
    with contextlib.closing(await anyio.to_thread.run_sync(sqlite.reading, path)) as db:
        total, cursor = await anyio.to_thread.run_sync(_asked, db, label)
        while blocks := await anyio.to_thread.run_sync(_next, cursor):
            yield total, blocks


def _asked(db: sqlite3.Connection, label: str | None) -> tuple[int, sqlite3.Cursor]:
    # An index of times has all that this takes; how many there are of the space only the rows know.
    total = db.execute("SELECT count(*) FROM memories").fetchone()[0]
    return int(total), db.execute(_SELECT, (label,))


def _next(cursor: sqlite3.Cursor) -> list[Block]:
    """The next blocks, none at the end."""
    while found := cursor.fetchmany(ROWS):
        if blocks := _blocks([row for row in found if _is_whole(row)]):
            return blocks
    return []


def _is_whole(row: Any) -> bool:
    _, tier, _, created_at, blob = row
    return (
        isinstance(blob, bytes) and not len(blob) % rows.FLOAT.itemsize and tier in _TIERS and type(created_at) is int
    )


def _blocks(found: Sequence[Any]) -> list[Block]:
    if len(sizes := {len(row[4]) for row in found}) > 1:
        return [block for size in sizes for block in _blocks([row for row in found if len(row[4]) == size])]
    if not found:
        return []
    ids, tiers, owners, times, blobs = zip(*found, strict=True)
    joined = np.frombuffer(b"".join(blobs), dtype=rows.FLOAT).reshape(len(found), -1)
    return [
        Block(
            [str(one) for one in ids],
            [_TIERS[one] for one in tiers],
            [str(one) for one in owners],
            list(times),
            joined.astype(np.float32, copy=False),
        )
    ]
