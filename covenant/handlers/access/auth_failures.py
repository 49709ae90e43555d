"""Limit the audit rows for refused authentications: the first of each second get a row each, the rest a count.

Any client that can connect can cause refusals without end. A row for each would let it fill the disk, and no rows would
let it try tokens unseen: so each refusal is counted in exactly one row.
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
    """Writes at most ``most`` rows in each ``seconds``, and one summary row with the count of the rest.

    A task in ``group`` writes the summary when the time is over or the group ends.
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
        """Write a refused authentication, or count it for the next summary. Returns True if it has a row of its own.

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
            # Shielded: the count is written even while the daemon ends.
            with anyio.move_on_after(_WRITING_SECONDS, shield=True):
                try:
                    await authentication.refused(self._server, reason, self._transport)
                except (errors.CovenantError, OSError):
                    _LOG.exception("%d refusals cannot be written to the audit log", count)
