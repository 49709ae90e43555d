"""Verification of the log: one at a time, for any number of callers.

A verification costs time that grows with the log, and one core. A caller that asks during one waits for the next, which
has the rows of the moment of asking. All waiting callers share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import anyio

from covenant.stores.audit.interface import AuditLog
from policy.audit_log import verify

if TYPE_CHECKING:
    from covenant.handlers.server import Server


@dataclass(frozen=True, slots=True)
class _Found:
    number: int
    at_ms: int
    report: verify.Report


@dataclass(slots=True)
class _Looks:
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    begun: int = 0
    last: _Found | None = None


_LOOKS: Final[WeakKeyDictionary[AuditLog, _Looks]] = WeakKeyDictionary()


async def verified(server: Server, *, within_ms: int = 0) -> verify.Report:
    """Return the result of a verification that began after this call, or within the last ``within_ms``."""
    looks = _LOOKS.setdefault(server.audit, _Looks())
    asked = looks.begun
    # An older result that is new enough needs no wait for the running verification.
    # A clock that was put back says nothing of an age.
    if (last := looks.last) is not None and 0 <= server.now_ms() - last.at_ms < within_ms:
        return last.report
    async with looks.turn:
        last, now_ms = looks.last, server.now_ms()
        if last is None or (last.number <= asked and not 0 <= now_ms - last.at_ms < within_ms):
            looks.begun += 1
            last = looks.last = _Found(looks.begun, now_ms, await server.audit.verify())
        return last.report
