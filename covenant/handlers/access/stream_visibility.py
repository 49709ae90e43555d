"""Visibility of streams: each row and record passes the rules of its own request's handler.

This module writes nothing. The request that begins a stream is checked and written like any other. Afterwards the
stream shows what the same request would show at that moment.
"""

from __future__ import annotations

from covenant.handlers.access import authorization
from covenant.handlers.access.authorization import RequestFacts
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.handlers.state.intent_progress import IntentEvent
from covenant.wire import parts, requests
from covenant.wire.types import MemoryRecord, SignedCapability

Watched = requests.RecentAudit | requests.RecentMemory


def may_go_on(server: Server, caller: Caller, asked: Watched) -> bool:
    """Whether the caller still holds what the request needs."""
    return isinstance(asked, requests.RecentAudit) or _grant(server, caller, asked) is not None


def may_see(server: Server, caller: Caller, asked: Watched, value: parts.AuditEvent | MemoryRecord) -> bool:
    """Whether the request would show this."""
    if isinstance(asked, requests.RecentAudit):
        if not isinstance(value, parts.AuditEvent) or value.issuer.pubkey != caller.agent.pubkey:
            return False
        return asked.shows(value.kind)
    if not isinstance(value, MemoryRecord) or asked.tier not in (None, value.tier):
        return False
    signed = _grant(server, caller, asked)
    if signed is None or not (caller.operator or value.owner.pubkey == caller.agent.pubkey):
        return False
    return authorization.admits_record(signed, tier=value.tier, record_id=value.id, created_at=value.created_at)


def may_follow(caller: Caller, event: IntentEvent) -> bool:
    """Whether an intent is the caller's; the operator may follow everybody's."""
    return caller.operator or event.owner == caller.agent.pubkey


def _grant(server: Server, caller: Caller, asked: requests.RecentMemory) -> SignedCapability | None:
    facts = RequestFacts(tier=asked.tier, apply=False, filtered=True)
    found = authorization.decide(server.capabilities, caller.agent.pubkey, "memory.read", facts, server.now_ms())
    return found.grant.signed if found.grant is not None and found.reason is None else None
