"""How many rows one answer takes: an answer longer than a frame is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from covenant.wire.types import Wire

Row = TypeVar("Row", bound=Wire)


def that_fit(rows: Iterable[Row], room: int) -> tuple[Row, ...]:
    """The first rows, as many as take ``room`` bytes on the wire. One fits in any case: none is longer than a frame."""
    fitting: list[Row] = []
    for row in rows:
        # Bytes, not characters: a frame counts bytes, and a character takes up to four.
        room -= len(row.model_dump_json().encode())
        if room < 0 and fitting:
            break
        fitting.append(row)
    return tuple(fitting)
