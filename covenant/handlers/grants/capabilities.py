"""Grants over the wire: made, shown, taken back.

The operator grants anything. Everybody else grants less of what it holds: the daemon signs for the caller that it
knows, or the caller has signed itself (``signature_b58``). A change of authority is in the log before it holds, one
that takes authority away is made first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from covenant.handlers import paging
from covenant.handlers.access import authorization
from covenant.handlers.access.authorization import RequestFacts
from covenant.handlers.caller import Caller
from covenant.handlers.grants import grant_revocation
from covenant.handlers.intents import agent_selection
from covenant.handlers.server import Handler, Server
from covenant.stores.audit.interface import AuditEntry
from covenant.stores.capabilities.book import used_up
from covenant.stores.capabilities.interface import Grant, to_wire
from covenant.wire import parts, requests, responses
from covenant.wire.types import AgentId, SignedCapability
from policy import errors
from policy.capabilities import actions, chain, scopes
from policy.capabilities.token import MalformedTokenError, Token, key_bytes, normal_scope

MOST_SHOWN: Final = 1000


class _Asked(NamedTuple):
    """A grant that is asked for: to whom, what, and within which that is held."""

    subject: AgentId
    token: Token
    parent: Grant | None


async def recent_capabilities(
    server: Server, caller: Caller, asked: requests.RecentCapabilities
) -> responses.CapabilityListing:
    """The newest grants to or by the caller, and those that narrow one of its own."""
    found = server.capabilities.recent(min(asked.limit, MOST_SHOWN), caller.agent.pubkey)
    return responses.CapabilityListing(capabilities=paging.that_fit(grant.signed for grant in found))


async def capability_usage(
    server: Server, caller: Caller, asked: requests.CapabilityUsage
) -> responses.CapabilityUsageListing:
    """The caller's grants, those that were taken back too, and what is left of each."""
    now_ms = server.now_ms()
    found = server.capabilities.usage(min(asked.limit, MOST_SHOWN), caller.agent.pubkey)
    return responses.CapabilityUsageListing(grants=paging.that_fit(_usage(server, grant, now_ms) for grant in found))


async def grant_capability(
    server: Server, caller: Caller, asked: requests.GrantCapability
) -> responses.CapabilityGranted:
    """Grant an action, to the caller where no subject is named.

    Raises:
        errors.GrantRefusedError: it is malformed, would end in the past, or is more than the caller may give.
    """
    subject = caller.agent.display if asked.subject is None else asked.subject[:128]
    try:
        wanted = _wanted(server, caller, asked)
        subject = wanted.subject.display
        signed = _signed(server, caller, wanted, asked.signature_b58)
        server.capabilities.check(signed, server.now_ms())
    except errors.CovenantError as e:
        row = {"subject_display": subject, "action": asked.action[: actions.MAX_LENGTH], "reason": e.message}
        await server.audit.append("capability_grant_rejected", row, issuer=caller.agent)
        if isinstance(e, errors.GrantRefusedError):
            raise
        raise errors.GrantRefusedError(e.message, hint=e.hint) from None
    await give(server, caller.agent, signed, wanted.parent)
    return responses.CapabilityGranted(
        signature_b58=signed.signature, subject_display=subject, action=signed.capability.action
    )


async def give(server: Server, giver: AgentId, signed: SignedCapability, parent: Grant | None = None) -> Grant:
    """Write down and keep a grant that was checked."""
    capability = signed.capability
    row = {
        "subject_display": capability.subject.display,
        "action": capability.action,
        "granted_by_display": giver.display,
        "signature_b58": signed.signature,
    }
    rows = [AuditEntry("capability_granted", row, giver)]
    if parent is not None:
        rows.append(AuditEntry("capability_attenuated", row | {"parent_signature_b58": parent.signature}, giver))
    await server.audit.append_all(rows)
    try:
        grant: Grant = await server.capabilities.grant(signed, server.now_ms())
    except errors.CovenantError as e:
        # It ended or was revoked meanwhile, or the disk failed: the row above is not the last word.
        rejected = {"subject_display": row["subject_display"], "action": row["action"], "reason": e.message}
        await server.audit.append("capability_grant_rejected", rejected, issuer=giver)
        raise
    return grant


def from_daemon(server: Server, subject: AgentId, action: str, scope: Any, expires_at: int | None) -> SignedCapability:
    """A grant by the daemon itself, signed and not kept yet.

    Raises:
        errors.GrantRefusedError: it is malformed, or would end in the past.
    """
    return _by_daemon(server, subject, _token(server, subject, action, scope, expires_at))


async def revoke_capability(
    server: Server, caller: Caller, asked: requests.RevokeCapability
) -> responses.CapabilityRevoked:
    """Revoke a grant and those that narrow it, and end each run whose intent no other grant allows.

    A run ends with all that it started, before the caller is answered.

    Raises:
        errors.NotYoursError: the caller neither holds it nor gave it, and is not the operator. Of one that is not there
            it is told the same.
    """
    signature = asked.signature_b58[:128]
    grant = server.capabilities.get(signature)
    if grant is None or not (caller.operator or caller.agent.pubkey in grant.concerns):
        row = {"signature_b58": signature, "reason": "there is no such grant" if grant is None else "it is another's"}
        # The daemon's row: what is said here of others' grants is not for the caller's feed.
        await server.audit.append("capability_revoke_rejected", row, issuer=server.identity.agent)
        if not caller.operator:
            raise errors.NotYoursError(
                "the caller holds and gave no such grant", hint="who holds or gave it, or the operator, may revoke it"
            )
        return responses.CapabilityRevoked(signature_b58=signature, removed=False)
    lacked = agent_selection.lacking(server)
    ended = await server.capabilities.revoke(signature, server.now_ms())
    # INVARIANT: nothing waits here. After the revocation both are done, also when the caller leaves.
    told = [(one, True) for one in ended] or [(grant, False)]
    rows = [AuditEntry("capability_revoked", _revoked(one, removed=removed), caller.agent) for one, removed in told]
    await grant_revocation.enforce(server, lacked, functools.partial(server.audit.append_all, rows))
    return responses.CapabilityRevoked(signature_b58=signature, removed=bool(ended))


async def purge_capabilities(
    server: Server, caller: Caller, asked: requests.PurgeCapabilities
) -> responses.CapabilitiesPurged:
    """Forget what was revoked or ended before, under a grant of ``capabilities.purge``."""
    if (asked.before_ms is None) == (asked.older_than_ms is None):
        raise errors.MalformedRequestError("one of `before_ms` and `older_than_ms` is needed", where=asked.kind)
    before_ms = asked.before_ms
    if before_ms is None:
        assert asked.older_than_ms is not None
        before_ms = max(0, server.now_ms() - asked.older_than_ms)
    facts = RequestFacts(before_ms=before_ms)
    await authorization.require(server, caller, "capabilities.purge", agent_id="capabilities:purge", facts=facts)
    purged = await server.capabilities.purge(before_ms, server.now_ms())
    row = {"before_ms": before_ms, "purged": purged}
    await server.audit.append("capabilities_purged", row, issuer=caller.agent)
    return responses.CapabilitiesPurged(purged=purged)


# --- what is asked for ----------------------------------------------------------------------------------------


def _wanted(server: Server, caller: Caller, asked: requests.GrantCapability) -> _Asked:
    subject = caller.agent if asked.subject is None else _somebody(server, caller, asked.subject)
    scope = {} if asked.scope is None else asked.scope
    if caller.operator and asked.parent_b58 is None and asked.signature_b58 is None:
        token = _token(server, subject, asked.action, scope, asked.expires_at)
        if isinstance(token.scope, dict) and scopes.PARENT in token.scope:
            raise errors.GrantRefusedError(f"`{scopes.PARENT}` is given beside the scope, not within")
        return _Asked(subject, token, None)
    if scope:
        # Looked at before it is compared with what is held.
        scope = _token(server, subject, asked.action, scope, asked.expires_at).scope
    parent = _held(server, caller, asked, scope)
    scope = scope or (parent.token.scope if asked.signature_b58 is None else {}) or {"version": 1}
    if not isinstance(scope, Mapping):
        raise errors.GrantRefusedError("a scope is an object")
    ends = asked.expires_at
    if ends is None and asked.signature_b58 is None:
        ends = parent.token.expires_at
    token = _token(server, subject, asked.action, {**scope, scopes.PARENT: parent.signature}, ends)
    reason = chain.narrower(token, parent.token)
    if reason is not None:
        raise errors.GrantRefusedError(reason)
    return _Asked(subject, token, parent)


def _token(server: Server, subject: AgentId, action: str, scope: Any, expires_at: int | None) -> Token:
    if not actions.well_formed(action):
        raise errors.GrantRefusedError(
            "the action is not dot-separated names after a namespace", hint="as in memory.read, or tool.call.echo"
        )
    try:
        key_bytes(subject.pubkey)
        normal = normal_scope(scope)
    except MalformedTokenError as e:
        raise errors.GrantRefusedError(str(e)) from None
    reason = scopes.check(action, normal)
    if reason is not None:
        raise errors.GrantRefusedError(
            reason, hint='docs/capabilities.md has the fields of a scope, such as {"version": 1, "before_ms": 0}'
        )
    token = Token(subject.pubkey, action, normal, server.identity.agent.pubkey, expires_at)
    if token.expired(server.now_ms()):
        raise errors.GrantRefusedError("the grant would end in the past")
    return token


def _held(server: Server, caller: Caller, asked: requests.GrantCapability, scope: Any) -> Grant:
    """The grant of the caller's that is narrowed: the one it names, or the first that is wide enough."""
    now_ms = server.now_ms()
    if asked.parent_b58 is not None:
        named = server.capabilities.get(asked.parent_b58)
        if named is not None and named.token.subject == caller.agent.pubkey:
            if server.capabilities.effective(named, now_ms):
                held: Grant = named
                return held
            raise errors.GrantRefusedError("the grant that should be narrowed holds no more")
        raise errors.GrantRefusedError("the grant that should be narrowed is not the caller's")
    if asked.signature_b58 is not None:
        raise errors.GrantRefusedError("a grant that its giver signed names the one above it in `parent_b58`")
    for action in actions.standing_for(asked.action):
        for grant in server.capabilities.candidates(caller.agent.pubkey, action, now_ms):
            fits = not scope or scopes.within(action, scope, grant.token.scope) is None
            if fits and actions.within(asked.action, action) and not used_up(grant):
                found: Grant = grant
                return found
    raise errors.GrantRefusedError(
        "only the operator grants what the caller does not hold", hint="ask the operator, or narrow a grant you hold"
    )


def _somebody(server: Server, caller: Caller, subject: str) -> AgentId:
    """Find the agent of a key, or of the display name of exactly one peer."""
    if "@" not in subject:
        try:
            key_bytes(subject)
        except MalformedTokenError as e:
            raise errors.GrantRefusedError(f"the subject: {e}") from None
        known = [entry.agent_id for entry in server.peers.of(subject)]
        return known[0] if known else AgentId(display=f"key-{subject[:8]}@peer", pubkey=subject)
    if subject == caller.agent.display:
        return caller.agent
    keys = {entry.agent_id.pubkey: entry.agent_id for entry in server.peers.named(subject)}
    if len(keys) != 1:
        raise errors.GrantRefusedError(
            "the subject is no peer's name, or more than one's",
            hint="name it by its public key, as covenant peers list shows it; covenant peers enroll makes a peer",
        )
    found: AgentId = next(iter(keys.values()))
    return found


def _signed(server: Server, caller: Caller, wanted: _Asked, signature: str | None) -> SignedCapability:
    if signature is None:
        return _by_daemon(server, wanted.subject, wanted.token)
    token = wanted.token
    own = Token(token.subject, token.action, token.scope, caller.agent.pubkey, token.expires_at)
    if not own.verifies(signature):
        raise errors.GrantRefusedError("the signature is not the caller's over this grant")
    return to_wire(own, signature, wanted.subject.display, caller.agent.display)


def _by_daemon(server: Server, subject: AgentId, token: Token) -> SignedCapability:
    return to_wire(token, server.identity.grant(token), subject.display, server.identity.agent.display)


# --- what is answered -----------------------------------------------------------------------------------------


def _revoked(grant: Grant, *, removed: bool) -> dict[str, Any]:
    return {
        "subject_display": grant.subject_display,
        "action": grant.token.action,
        "signature_b58": grant.signature,
        "removed": removed,
    }


def _usage(server: Server, grant: Grant, now_ms: int) -> parts.CapabilityUse:
    budget = None
    if grant.max_uses is not None:
        left = max(0, grant.max_uses - grant.used)
        budget = parts.UseBudget(max_uses=grant.max_uses, used=grant.used, remaining=left)
    return parts.CapabilityUse(
        signature_b58=grant.signature,
        action=grant.token.action,
        expires_at=grant.token.expires_at,
        revoked=grant.revoked_at_ms is not None,
        effective=_effect(server, grant, now_ms),
        budget=budget,
    )


def _effect(server: Server, grant: Grant, now_ms: int) -> Literal["live", "revoked", "expired", "exhausted"]:
    """Return in version 1's words whether a grant holds; one below a grant that ended has ended as that did."""
    if server.capabilities.effective(grant, now_ms):
        return "live"
    above = server.capabilities.lineage(grant.signature)
    if not above or any(one.revoked_at_ms is not None for one in above):
        return "revoked"
    return "expired" if any(one.token.expired(now_ms) for one in above) else "exhausted"


HANDLERS: Final[Mapping[str, Handler]] = {
    "recent_capabilities": recent_capabilities,
    "grant_capability": grant_capability,
    "revoke_capability": revoke_capability,
    "purge_capabilities": purge_capabilities,
    "capability_usage": capability_usage,
}
