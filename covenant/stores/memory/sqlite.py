"""The door to SQLite: private files, errors of ours, and conditions of bound values."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import stat
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiosqlite

from covenant.wire.types import Tier
from policy import errors

# How many rows are read, or ids asked for, at a time.
CHUNK: Final = 2000
# Records may be long, and anybody may write thousands: so many whole ones are read at a time, about so much is held.
PAGE: Final = 64
MOST_HELD_BYTES: Final = 64 * 1024 * 1024
BUSY_MS: Final = 10_000
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ROOM: Final = "make room on the disk and repeat"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def where(*, tier: Tier | None, owner: str | None, table: str = "memories") -> tuple[str, list[Any]]:
    """A condition, and the values of its marks."""
    found = [("tier", tier.value)] if tier is not None else []
    if owner is not None:
        found.append(("owner_pubkey", owner))
    return " AND ".join([f"{table}.{name} = ?" for name, _ in found] or ["TRUE"]), [value for _, value in found]


def held(page: Iterable[Sequence[Any]]) -> int:
    """About how many bytes these rows are."""
    return sum(len(value) for row in page for value in row if isinstance(value, str | bytes))


def clipped(number: int) -> int:
    """As far as SQLite's integers go."""
    return min(number, 2**63 - 1)


def parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """The ids, as many at a time as one statement is asked for."""
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of SQLite and of the disk as errors of ours that say where.

    Raises:
        errors.MemoryStoreError: in their place.
    """
    try:
        yield
    except (sqlite3.Error, OSError) as e:
        reason = (isinstance(e, OSError) and e.strerror) or str(e)
        full = getattr(e, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL or getattr(e, "errno", None) in _FULL
        raise errors.MemoryStoreError(
            f"memory cannot be read or written: {reason}", hint=_ROOM if full else "", where=str(path)
        ) from e


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[aiosqlite.Connection]:
    """A connection that begins its own transactions, waits for other processes, and reads any bytes as text."""
    async with aiosqlite.connect(path, isolation_level=None) as db:
        await db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        # A text that is no UTF-8 would otherwise be an error of every statement that meets its row.
        db.text_factory = _text
        yield db


def reading(path: Path) -> sqlite3.Connection:
    """A connection for threads of ours: it only reads, and is used by one of them at a time."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.text_factory = _text
    db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    db.execute("PRAGMA query_only = ON")
    return db


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def sayable(text: str) -> bool:
    """Whether SQLite takes it as text: no half of a character is in it."""
    return text.isascii() or not _SURROGATE.search(text)


def make_private(path: Path) -> None:
    """Make the file if there is none, for its owner alone: what SQLite puts beside it gets the same mode.

    Raises:
        errors.MemoryStoreError: it is a symlink or no plain file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise errors.MemoryStoreError(f"`{path}` is no plain file of this user", where=str(path))
        if stat.S_IMODE(info.st_mode) != 0o600:
            os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
