"""Authorization: the capability check before every act, and its row in the log either way.

The decision is made in memory (``policy.capabilities``, ``covenant.stores.capabilities``); what takes time is the row.
A row that cannot be written is a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from covenant.stores.audit.interface import AuditEntry
from covenant.wire.types import SignedCapability
from policy import errors
from policy.capabilities import actions, scopes
from policy.capabilities.facts import NONE, RequestFacts

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.server import Server
    from covenant.stores.capabilities.interface import Capabilities, Grant

__all__ = [
    "NONE",
    "Decision",
    "RequestFacts",
    "admits_record",
    "consume",
    "decide",
    "holds",
    "holds_some",
    "require",
    "require_all",
    "require_left",
    "require_operator",
    "still_holds",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """The result for one action: the grant that allows it, or why no held grant does (None: none is held)."""

    action: str
    grant: Grant | None
    reason: str | None = None


def decide(capabilities: Capabilities, pubkey: str, action: str, facts: RequestFacts, now_ms: int) -> Decision:
    """Find a live grant of the action, or of one that implies it, that admits the request. No I/O.

    The first that admits the request is taken. A used-up grant is taken only where there is no other.
    """
    reason: str | None = None
    spent: Grant | None = None
    for name in actions.standing_for(action, facts.tier):
        for grant in capabilities.candidates(pubkey, name, now_ms):
            refused = _refused(capabilities, grant, action, facts)
            if refused is not None:
                reason = reason or refused
            elif (grant.parent is None and grant.max_uses is None) or capabilities.effective(grant, now_ms):
                return Decision(action, grant)
            else:
                spent = spent or grant
    return Decision(action, spent, None if spent is not None else reason)


def holds(server: Server, caller: Caller, action: str, facts: RequestFacts = NONE) -> bool:
    """Whether the caller has a live grant now that admits the request, without a row and without a wait.

    The grant may have been revoked while a row was written, and the revoking caller have its answer.
    """
    return decide(server.capabilities, caller.agent.pubkey, action, facts, server.now_ms()).grant is not None


def holds_some(server: Server, caller: Caller, action: str) -> bool:
    """Whether the caller has a live grant of the action now, of any scope."""
    now_ms = server.now_ms()
    names = {name for tier in (None, *actions.TIERS) for name in actions.standing_for(action, tier)}
    return any(True for name in names for _ in server.capabilities.candidates(caller.agent.pubkey, name, now_ms))


async def require(
    server: Server, caller: Caller, action: str, *, agent_id: str, facts: RequestFacts = NONE, hidden: bool = False
) -> SignedCapability:
    """The caller's grant for one action that admits the request; written down either way.

    ``agent_id`` names whose requirement it is (``memory:write``, an agent's id). ``hidden``: a refusal's rows are
    issued by the daemon, so that who probes does not find them in its feed.

    Raises:
        errors.CapabilityMissingError: no live grant of it is held.
        errors.CapabilityScopeError: none of those held admits the request.
    """
    (signed,) = await require_all(server, caller, [action], agent_id=agent_id, facts=facts, hidden=hidden)
    return signed


async def still_holds(
    server: Server, caller: Caller, action: str, *, agent_id: str, facts: RequestFacts = NONE
) -> None:
    """As ``require``, once more, where the grant may have been taken back while rows or its use were written: when this
    returns it is held, and nothing was waited for since.

    Raises:
        As ``require``.
    """
    while not holds(server, caller, action, facts):
        await require(server, caller, action, agent_id=agent_id, facts=facts)


async def require_all(
    server: Server,
    caller: Caller,
    required: Sequence[str],
    *,
    agent_id: str,
    facts: RequestFacts = NONE,
    hidden: bool = False,
    concealed: bool = False,
) -> list[SignedCapability]:
    """As ``require`` for several actions and one row; the grants stand in the order of the actions.

    ``concealed``: the daemon issues the rows in any case, for a request that is then refused for another reason.

    Raises:
        errors.CapabilityMissingError: as ``require``, for all that are missing.
        errors.CapabilityScopeError: as ``require``.
    """
    now_ms = server.now_ms()
    found = [decide(server.capabilities, caller.agent.pubkey, action, facts, now_ms) for action in required]
    missing = [one.action for one in found if one.grant is None and one.reason is None]
    bounded = [one for one in found if one.reason is not None]
    grants = [one.grant for one in found if one.grant is not None]
    passed = len(grants) == len(found)
    check = {
        "agent_id": agent_id,
        "required_actions": list(required),
        "missing_actions": [one.action for one in found if one.grant is None],
        "passed": passed,
        "authorized_by": [_authorised(grant) for grant in grants],
    }
    issuer = server.identity.agent if concealed or (hidden and not passed) else caller.agent
    rows = [AuditEntry("capability_check", check, issuer)]
    for one in bounded:
        rejected = {"agent_id": agent_id, "action": one.action, "reason": one.reason}
        rows.append(AuditEntry("capability_scope_rejected", rejected, issuer))
    if passed:
        await server.audit.append_all(rows)
        return [grant.signed for grant in grants]
    error: errors.CovenantError
    if missing:
        error = errors.CapabilityMissingError(
            f"no grant of {', '.join(f'`{action}`' for action in missing)} is held",
            hint=f"covenant capabilities grant {missing[0]}",
            missing=missing,
        )
    else:
        error = errors.CapabilityScopeError(f"`{bounded[0].action}`: {bounded[0].reason}")
    # A name in an action may be as long as a frame, and stands in the rows.
    size = sum(map(len, required))
    await server.refusals.write(server.audit, caller, server.now_ms, rows, (error.code, error.message), size=size)
    raise error


async def consume(server: Server, grants: Sequence[SignedCapability]) -> None:
    """Count one use of each grant of a caller that is metered, durably and before the act: of all, or of none.

    Raises:
        errors.CapabilityExhaustedError: one, or a grant above it, was used as often as it may be.
    """
    try:
        uses = await server.capabilities.use([one.signature for one in grants])
    except errors.CapabilityExhaustedError as e:
        await _used_up(server, grants, e)
        raise
    if uses:
        holder = grants[0].capability.subject
        await server.audit.append_all([AuditEntry("capability_used", _counted(use), holder) for use in uses])


async def require_left(server: Server, grants: Sequence[SignedCapability]) -> None:
    """Refuse now what ``consume`` would refuse, before something is done for it that would have to be undone.

    Raises:
        errors.CapabilityExhaustedError: as ``consume``.
    """
    try:
        server.capabilities.left([one.signature for one in grants])
    except errors.CapabilityExhaustedError as e:
        await _used_up(server, grants, e)
        raise


async def _used_up(server: Server, grants: Sequence[SignedCapability], error: errors.CapabilityExhaustedError) -> None:
    row = _counted(error.details["use"])
    await server.audit.append("capability_budget_exhausted", row, issuer=grants[0].capability.subject)


async def require_operator(server: Server, caller: Caller, rejected: str | None, what: str) -> None:
    """Refuse a caller other than the operator. ``rejected`` is the kind of the row that the daemon issues.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
    """
    if caller.operator:
        return
    if rejected is not None:
        row = {"peer_display": caller.agent.display, "peer_pubkey_b58": caller.agent.pubkey}
        await server.audit.append(rejected, row, issuer=server.identity.agent)
    raise errors.OperatorOnlyError(f"only the operator may {what}")


def admits_record(signed: SignedCapability, *, tier: str, record_id: str, created_at: int) -> bool:
    """Whether a record may be shown to whom ``require(..., Facts(filtered=True))`` let read."""
    scope = signed.capability.scope
    return scopes.admits_record(scope, tier=tier, record_id=record_id, created_at=created_at)


def _refused(capabilities: Capabilities, grant: Grant, action: str, facts: RequestFacts) -> str | None:
    """Why the grant does not admit the request. Those above it are asked too: they are wider, and cost little."""
    refused = scopes.admits(action, grant.token.scope, facts)
    if refused is None and grant.parent is not None:
        above = (scopes.admits(action, one.token.scope, facts) for one in capabilities.lineage(grant.signature))
        refused = next((reason for reason in above if reason is not None), None)
    return refused


def _authorised(grant: Grant) -> dict[str, str]:
    return {
        "action": grant.token.action,
        "granted_by_display": grant.granted_by_display,
        "signature_b58": grant.signature,
    }


def _counted(use: Any) -> dict[str, Any]:
    return {
        "signature_b58": use.signature,
        "action": use.action,
        "max_uses": use.max_uses,
        "used": use.used,
    }
