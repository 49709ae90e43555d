"""The memory use of each owner: counted on first use, then updated by each write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import aiosqlite

from covenant.stores.memory import rows
from covenant.stores.memory.interface import Room
from policy import errors

_OWNER: Final = rows.COLUMNS.index("owner_pubkey")
_MEASURED: Final = ("text", "embedding", "metadata")
_PLACES: Final = tuple(rows.COLUMNS.index(name) for name in _MEASURED)
_COUNT: Final = (
    f"SELECT count(*), total({' + '.join(f'length(CAST({name} AS BLOB))' for name in _MEASURED)}) "  # noqa: S608
    "FROM memories WHERE owner_pubkey = ?"
)


def size_of(row: Sequence[Any]) -> int:
    """Return the bytes of a row that count against its owner's room."""
    return sum(len(one.encode()) if isinstance(one := row[place], str) else len(one) for place in _PLACES)


def check(room: Room, records: int, size: int) -> None:
    """Check a number of records and their bytes against the limits.

    Raises:
        errors.MemoryFullError: they exceed ``room``.
    """
    if records > room.records or size > room.bytes:
        raise errors.MemoryFullError(
            f"one caller may have {room.records} records of {room.bytes} bytes in all",
            hint="purge what is not needed: covenant memory purge",
        )


class Tallies:
    """The use of each owner. Called only within transactions, which run one at a time."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, int]] = {}

    async def check(self, db: aiosqlite.Connection, row: Sequence[Any], room: Room) -> None:
        """Check that there is room for a row.

        Raises:
            errors.MemoryFullError: there is none.
        """
        held = self._held.get(row[_OWNER])
        if held is None:
            ((count, size),) = await db.execute_fetchall(_COUNT, (row[_OWNER],))
            held = self._held[row[_OWNER]] = int(count), int(size)
        check(room, held[0] + 1, held[1] + size_of(row))

    async def grew(self, db: aiosqlite.Connection, owner: str, by: int, room: Room | None) -> None:
        """Record that a row of the owner grew by ``by`` bytes.

        Raises:
            errors.MemoryFullError: its owner now has more than ``room``.
        """
        held = self._held.get(owner)
        if held is not None:
            held = self._held[owner] = held[0], held[1] + by
        if room is None or by <= 0:
            return
        if held is None:
            ((count, size),) = await db.execute_fetchall(_COUNT, (owner,))
            held = self._held[owner] = int(count), int(size)
        check(room, *held)

    def note(self, row: Sequence[Any]) -> None:
        """Record that a row was written. A row that replaced another counts twice until the next deletion."""
        held = self._held.get(row[_OWNER])
        if held is not None:
            self._held[row[_OWNER]] = held[0] + 1, held[1] + size_of(row)

    def forget(self) -> None:
        """Drop all counts: a row was deleted, or a transaction was rolled back."""
        self._held.clear()
