"""How many rows one answer takes: an answer longer than a frame is none.

Every list in an answer goes through ``that_fit``; ``tests/unit/covenant/respond/test_listings.py`` holds each of them
to it with the longest rows that there may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from pydantic_core import to_json

from covenant.wire import frames

Row = TypeVar("Row")

# Of a frame's 8 MiB, for the rows of an answer; the rest is for what stands around them.
ROOM: Final = 7 * 1024 * 1024
# A row that no frame could carry, even alone.
_LONGEST: Final = frames.MAX_BYTES - 64 * 1024


def size_of(row: object) -> int:
    """The bytes of a row on the wire: a frame counts bytes, and a character takes up to four, or six escaped."""
    return len(to_json(row, by_alias=True))


def that_fit(rows: Iterable[Row], room: int = ROOM) -> tuple[Row, ...]:
    """The first rows, as many as take ``room`` bytes on the wire. The first fits in any case, but for one that no
    frame could carry: that one is left out, so that it does not keep the others from whoever asks."""
    return cut(rows, room)[0]


def cut(rows: Iterable[Row], room: int = ROOM) -> tuple[tuple[Row, ...], bool]:
    """As ``that_fit``, and whether there was no room for another."""
    fitting: list[Row] = []
    for row in rows:
        # With the comma behind it.
        size = size_of(row) + 1
        if size > _LONGEST:
            continue
        room -= size
        if room < 0 and fitting:
            return tuple(fitting), True
        fitting.append(row)
    return tuple(fitting), False
