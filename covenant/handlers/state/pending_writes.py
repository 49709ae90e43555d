"""Ends of intents that ran, and receipts of stored records, that the disk did not take: kept until it does.

An intent with a reservation has an end to write: its receipt, its rows, its answer and its settlement. If the disk is
full, the log fails or the write is interrupted, none of that is stored although an agent ran. The reservation stays
open meanwhile, so its usage is neither lost nor refunded. The end is written before the next intent is admitted, at
intervals, and when the daemon ends. Until then no other intent runs, so that a full disk cannot cause unpaid runs, and
the number of ends kept here is bounded by the concurrent runs. The receipt of a record that a client stored is kept in
the same way, under the record's id. After a kill the reservation is still open:
``covenant.handlers.intents.recovery`` handles it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio

from policy import errors

_LOG: Final = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 30.0
# The limit for each write, even if the request that caused it is cancelled.
_WRITING_SECONDS: Final = 60.0
# What another try may fix: a disk without room, or a log that cannot be written now.
_MENDED_LATER: Final = (errors.StoreError, errors.LedgerError)
T = TypeVar("T")


class PendingWrites:
    """The unwritten ends, by the id of their intent or record. One per daemon."""

    def __init__(self) -> None:
        self._left: dict[str, Callable[[], Awaitable[Any]]] = {}
        self._turn = anyio.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, intent_id: str) -> bool:
        return intent_id in self._left

    def keep(self, intent_id: str, write: Callable[[], Awaitable[Any]]) -> None:
        """Keep a function that writes the end of an intent. Each call continues where the last one failed."""
        self._left[intent_id] = write

    async def write_or_keep(self, name: str, write: Callable[[], Awaitable[T]], *, what: str, hint: str) -> T:
        """Write an end now, and keep it if that fails or is cut off. ``what`` and ``hint`` are for the error.

        Raises:
            errors.StoreError, errors.LedgerError: it cannot be written now.
        """
        try:
            return await write()
        except _MENDED_LATER as e:
            self.keep(name, write)
            told = {
                "code": e.code,
                "message": f"{what} cannot be written now: {e.message}",
                "hint": hint,
                "where": e.where,
            }
            raise errors.restored(told) from e
        except anyio.get_cancelled_exc_class():
            self.keep(name, write)
            raise

    async def write(self) -> None:
        """Write all kept ends.

        Raises:
            errors.StoreError, errors.LedgerError: one cannot be written; it and those after it are kept.
        """
        if not self._left:
            return
        async with self._turn:
            for intent_id, write in list(self._left.items()):
                with anyio.move_on_after(_WRITING_SECONDS, shield=True) as scope:
                    try:
                        await write()
                    except Exception as e:
                        # A failed write of memory is part of the answer, and an answer that cannot be read ends here.
                        if isinstance(e, _MENDED_LATER) and not isinstance(e, errors.MemoryStoreError):
                            raise
                        # More space would not help: this end must not block all others. The next start handles its
                        # reservation.
                        _LOG.exception("the end of %s cannot be written", intent_id)
                    del self._left[intent_id]
                if scope.cancelled_caught:
                    raise errors.StoreError("what became of an intent could not be written in time")

    async def run(self) -> None:
        """Write the kept ends at intervals, until cancelled."""
        while True:
            await anyio.sleep(_AGAIN_SECONDS)
            try:
                await self.write()
            except errors.CovenantError as e:
                _LOG.error("%d ends of intents or records are not written down: %s", len(self), e)
