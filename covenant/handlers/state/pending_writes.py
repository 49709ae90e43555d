"""What became of intents that ran, and that no disk took: kept in memory until one does.

An intent that had its reservation has an end that is written: its receipt, its rows, its answer and its settlement.
Where a disk is full or the log takes nothing none of it is there, and yet an agent ran; the same where the writing was
cut off in the middle. Its reservation stays taken meanwhile, and what it used is
neither forgotten nor given back: it is written before the next intent is let through, now and then, and when the daemon
ends. Until then no other runs, so that a full disk makes no runs that nobody pays for, and what is kept here is bounded
by what ran at once. A daemon that is killed before has the open reservation: ``covenant.handlers.intents.recovery``
takes that.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from policy import errors

_LOG: Final = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 30.0
# For each, whatever becomes of whoever asks for another meanwhile.
_WRITING_SECONDS: Final = 60.0


class Unfinished:
    """The ends of intents that are still to be written, by intent. One per daemon."""

    def __init__(self) -> None:
        self._left: dict[str, Callable[[], Awaitable[Any]]] = {}
        self._turn = anyio.Lock()

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, intent_id: str) -> bool:
        return intent_id in self._left

    def keep(self, intent_id: str, write: Callable[[], Awaitable[Any]]) -> None:
        """Keep what writes the end of an intent. Asked again it goes on where it failed."""
        self._left[intent_id] = write

    async def write(self) -> None:
        """Write all of it; nothing where nothing is left.

        Raises:
            errors.StoreError, errors.LedgerError: one cannot be written; it and those behind it are left.
        """
        if not self._left:
            return
        async with self._turn:
            for intent_id, write in list(self._left.items()):
                with anyio.move_on_after(_WRITING_SECONDS, shield=True) as scope:
                    try:
                        await write()
                    except Exception as e:
                        # Memory that takes nothing is said of an answer, and one that cannot be read ends here.
                        if isinstance(e, errors.StoreError | errors.LedgerError) and not isinstance(
                            e, errors.MemoryStoreError
                        ):
                            raise
                        # No room mends that: it must not keep all others. The next start takes its reservation.
                        _LOG.exception("what became of intent %s cannot be written", intent_id)
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
                _LOG.error("%d intents ran and are not written down: %s", len(self), e)
