"""Limit the rows of one response: a response longer than a frame cannot be sent.

Every list in a response goes through ``that_fit``; ``tests/unit/covenant/respond/test_listings.py`` tests each of them
with rows of maximum length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from pydantic_core import to_json

from covenant.wire import frames

Row = TypeVar("Row")

# The part of a frame's 8 MiB for the rows of a response; the rest is for the fields around them.
ROOM: Final = 7 * 1024 * 1024
# A longer row fits in no frame, even alone.
_LONGEST: Final = frames.MAX_BYTES - 64 * 1024


def size_of(row: object) -> int:
    """Return the bytes of a row on the wire: a character takes up to four bytes, or six escaped."""
    return len(to_json(row, by_alias=True))


def that_fit(rows: Iterable[Row], room: int = ROOM) -> tuple[Row, ...]:
    """Return the first rows that take at most ``room`` bytes on the wire. The first row always fits, unless no frame
    could carry it. Such a row is left out, so that it does not block the others."""
    return cut(rows, room)[0]


def cut(rows: Iterable[Row], room: int = ROOM) -> tuple[tuple[Row, ...], bool]:
    """As ``that_fit``. Returns also True if there was no room for another row."""
    fitting: list[Row] = []
    for row in rows:
        # Plus the comma after it.
        size = size_of(row) + 1
        if size > _LONGEST:
            continue
        room -= size
        if room < 0 and fitting:
            return tuple(fitting), True
        fitting.append(row)
    return tuple(fitting), False
