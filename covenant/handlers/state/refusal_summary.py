"""Limits audit events for refused requests of authenticated peers: the first 100 refusals a minute are logged one by
one, the rest as a count.

A refusal costs its peer nothing, and each has rows: without a limit a peer could fill the disk, and without rows its
attempts would be invisible. So every refusal has its own rows or is counted in the summary row, as for unauthenticated
clients (``covenant.handlers.access.auth_failures``). The operator's own are all written.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio

from covenant.stores.audit.interface import AuditEntry
from policy import errors

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.stores.audit.interface import AuditLog

_LOG: Final = logging.getLogger(__name__)

SECONDS: Final = 60.0
# The most refusals of one peer with rows in that time, and the most bytes of its own words in them.
MOST: Final = 100
MOST_BYTES: Final = 4 * 1024 * 1024
_LOOK_SECONDS: Final = 5.0
_WRITING_SECONDS: Final = 5.0
_MOST_MESSAGE: Final = 256
# The most codes that a summary names with their counts, the most frequent first; all others are one number.
MOST_CODES: Final = 8
OTHERS: Final = "others"
_MOST_CODES_HELD: Final = 256


class Said(NamedTuple):
    """The error of an agent that could not be started."""

    code: str
    message: str
    where: str


@dataclass
class _Window:
    caller: Caller
    since: float
    since_ms: int
    written: int = 0
    size: int = 0
    unwritten: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    code: str = ""
    message: str = ""
    # Agents whose runs were refused before they began: the digest of their manifest, and the error of each.
    unstartable: dict[str, Said] = field(default_factory=dict)


class RefusalSummary:
    """Recent refusals by peer. One per daemon; ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, _Window] = {}

    def full(self, caller: Caller) -> bool:
        """Whether the refusals of this caller are only counted for now."""
        window = self._windows.get(caller.agent.pubkey)
        if window is None or caller.operator:
            return False
        if window.unwritten == 0 and self._over(window):
            del self._windows[caller.agent.pubkey]
            return False
        # Also after the time is over, until the count is in the log.
        late = window.unwritten > 0 and self._over(window)
        return late or window.written >= MOST or window.size >= MOST_BYTES

    def record(self, caller: Caller, now_ms: int, *, size: int = 0) -> None:
        """Record that a refusal of this caller was written, with ``size`` bytes of its words."""
        window = self._window(caller, now_ms)
        window.written += 1
        window.size += size

    def suppress(self, caller: Caller, now_ms: int, code: str, message: str) -> None:
        """Count a refusal of this caller that was not written."""
        window = self._window(caller, now_ms)
        window.unwritten += 1
        window.codes[code if code in window.codes or len(window.codes) < _MOST_CODES_HELD else OTHERS] += 1
        window.code, window.message = code, message[:_MOST_MESSAGE]

    def unstartable(self, caller: Caller, digest: str, error: errors.CovenantError | None) -> None:
        """Record that the agent with this manifest could not be started for this caller, or (None) could be.

        The daemon cannot predict the supervisor's reply. So for a caller that is refused repeatedly, the last reply is
        assumed to hold until the minute is over.
        """
        window = self._windows.get(caller.agent.pubkey)
        if window is None:
            return
        if error is None:
            window.unstartable.pop(digest, None)
        else:
            window.unstartable[digest] = Said(error.code, error.message, error.where)

    def why_unstartable(self, caller: Caller, digest: str) -> Said | None:
        """Return the recent error of starting this agent for this caller; None if there is none."""
        window = self._windows.get(caller.agent.pubkey)
        return None if window is None else window.unstartable.get(digest)

    async def write(
        self,
        audit: AuditLog,
        caller: Caller,
        now_ms: Callable[[], int],
        rows: Sequence[AuditEntry],
        why: tuple[str, str],
        *,
        size: int = 0,
    ) -> None:
        """Write the rows of a refusal, or count it; ``why`` is its code and message, ``size`` as for ``note``.

        Raises:
            errors.CovenantError: it cannot be written.
        """
        if self.full(caller):
            self.suppress(caller, now_ms(), *why)
            return
        await audit.append_all(rows)
        self.record(caller, now_ms(), size=size)

    async def sum_up(self, audit: AuditLog, *, all_: bool = False) -> None:
        """Write a summary row for each peer whose time is over.

        Raises:
            errors.CovenantError: it cannot be written; the refusals are still counted.
        """
        for pubkey, window in list(self._windows.items()):
            if not (all_ or self._over(window)):
                continue
            if counted := window.unwritten:
                codes = Counter(window.codes)
                row = {
                    "peer_display": window.caller.agent.display,
                    "peer_pubkey_b58": pubkey,
                    "count": counted,
                    "codes": _named(codes),
                    "since_ms": window.since_ms,
                    "code": window.code,
                    "message": window.message,
                }
                # Shielded: after an interruption it would be unknown if the row was written, and it could be written
                # twice.
                with anyio.move_on_after(_WRITING_SECONDS, shield=True) as scope:
                    await audit.append("refusals_summed", row)
                if scope.cancelled_caught:
                    raise errors.StoreError("how often a peer was refused could not be written in time")
                # Refusals counted meanwhile go into the next summary.
                window.unwritten -= counted
                window.codes -= codes
            if not window.unwritten:
                self._windows.pop(pubkey, None)

    async def run(self, audit: AuditLog) -> None:
        """Write summaries at intervals, and at the end: until cancelled."""
        try:
            while True:
                await anyio.sleep(_LOOK_SECONDS)
                await self._sum_up(audit)
        finally:
            # Shielded: the count is written even while the daemon ends.
            with anyio.move_on_after(_WRITING_SECONDS, shield=True):
                await self._sum_up(audit, all_=True)

    async def _sum_up(self, audit: AuditLog, *, all_: bool = False) -> None:
        try:
            await self.sum_up(audit, all_=all_)
        except errors.CovenantError as e:
            _LOG.error("refusals that were counted are not in the log: %s", e)

    def _window(self, caller: Caller, now_ms: int) -> _Window:
        key = caller.agent.pubkey
        window = self._windows.get(key)
        if window is None or (window.unwritten == 0 and self._over(window)):
            window = self._windows[key] = _Window(caller, self._clock(), now_ms)
        return window

    def _over(self, window: _Window) -> bool:
        return self._clock() - window.since >= SECONDS


def _named(codes: Counter[str]) -> dict[str, int]:
    """Return the most frequent codes with their counts, and the total of the others."""
    known = ((code, count) for code, count in codes.items() if code != OTHERS)
    named = dict(sorted(known, key=lambda one: (-one[1], one[0]))[:MOST_CODES])
    others = codes.total() - sum(named.values())
    return {**named, OTHERS: others} if others else named
