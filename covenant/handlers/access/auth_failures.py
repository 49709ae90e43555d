"""Refusals of strangers on their way into the log: each of the first in a second, and of a flood its number.

Anybody who can connect can be refused, as often as they like. A row for each would let a stranger fill the disk, and no
row would let one try tokens unseen: so each is counted in exactly one row.
"""

from __future__ import annotations

import logging
from typing import Final

import anyio
import anyio.abc

from covenant.handlers.access import authentication
from covenant.handlers.server import Server
from policy import errors

_LOG = logging.getLogger(__name__)

_WRITING_SECONDS: Final = 5.0


class Refusals:
    """At most ``most`` rows in each ``seconds``, and one more that says how many refusals had none.

    ``group`` writes that one, when the time is over or the group ends.
    """

    def __init__(
        self,
        server: Server,
        transport: authentication.Transport,
        group: anyio.abc.TaskGroup,
        *,
        most: int,
        seconds: float,
    ) -> None:
        self._server = server
        self._transport = transport
        self._group = group
        self._most = most
        self._seconds = seconds
        self._since = float("-inf")
        self._written = self._unwritten = 0
        self._last = ""

    async def write(self, reason: str) -> bool:
        """Write a refused authentication, or count it for the next summary. Return whether it has a row of its own.

        Raises:
            errors.CovenantError: it cannot be written.
        """
        now = anyio.current_time()
        if now - self._since >= self._seconds:
            self._since, self._written = now, 0
        if self._written < self._most:
            self._written += 1
            await authentication.refused(self._server, reason, self._transport)
            return True
        self._server.meter.unwritten[self._transport] += 1
        self._unwritten, self._last = self._unwritten + 1, reason
        if self._unwritten == 1:
            self._group.start_soon(self._sum_up, self._since + self._seconds)
        return False

    async def _sum_up(self, until: float) -> None:
        try:
            await anyio.sleep_until(until)
        finally:
            count, self._unwritten = self._unwritten, 0
            reason = f"{count} more were refused and not written one by one; the last: {self._last}"
            # Shielded: what was counted is written also where the daemon ends.
            with anyio.move_on_after(_WRITING_SECONDS, shield=True):
                try:
                    await authentication.refused(self._server, reason, self._transport)
                except (errors.CovenantError, OSError):
                    _LOG.exception("%d refusals cannot be written to the audit log", count)
