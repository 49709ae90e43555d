"""Whether the log holds: one look at a time, however many ask.

A look costs time that grows with the log, and a core meanwhile. Whoever asks while one goes on waits for the next,
which has the rows that were there when they asked, and shares it with everybody else who waits.
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
    """What verifying the log finds: of a look that began after this was asked, or within the last ``within_ms``."""
    looks = _LOOKS.setdefault(server.audit, _Looks())
    asked = looks.begun
    # Whoever takes an older one need not wait for the one that goes on.
    # A clock that was put back says nothing of an age.
    if (last := looks.last) is not None and 0 <= server.now_ms() - last.at_ms < within_ms:
        return last.report
    async with looks.turn:
        last, now_ms = looks.last, server.now_ms()
        if last is None or (last.number <= asked and not 0 <= now_ms - last.at_ms < within_ms):
            looks.begun += 1
            last = looks.last = _Found(looks.begun, now_ms, await server.audit.verify())
        return last.report
