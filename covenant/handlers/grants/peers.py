"""Peers over the wire: who may connect, let in, listed and shown out.

Refusals are written as the daemon's own rows: who probes does not see in its feed that it was seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.handlers import billing
from covenant.handlers.access import authorization
from covenant.handlers.access.authorization import RequestFacts
from covenant.handlers.caller import Caller
from covenant.handlers.grants import capabilities
from covenant.handlers.server import Handler, Server
from covenant.stores.peers.interface import PeerToken
from covenant.wire import parts, requests, responses
from covenant.wire.types import AgentId, SignedCapability
from policy import base58, errors
from policy.capabilities.token import MalformedTokenError, key_bytes

MOST_SHOWN: Final = 1000
MATCHES_SHOWN: Final = 20
MAX_ACTIONS: Final = 256
# `<agent id>@agent` is the account of an agent of this daemon. No peer may have such a name.
_AGENT_HOST: Final = "agent"
_VIA: Final = ".via."
_SUPERVISOR: Final = "operator@local"


async def list_peers(server: Server, caller: Caller, asked: requests.ListPeers) -> responses.PeerList:
    """The newest peers, for the operator or under a grant of ``peers.list``.

    Raises:
        errors.CapabilityMissingError: the caller may not.
    """
    if not caller.operator:
        facts = RequestFacts(peer_pubkey_b58=asked.pubkey_prefix)
        await _delegated(server, caller, "peers.list", facts, "operator_peers_list_rejected")
    await note_expired(server)
    found = server.peers.listing(min(asked.limit, MOST_SHOWN), asked.pubkey_prefix, asked.status_filter)
    return responses.PeerList(
        peers=tuple(entry.summary() for entry in found.entries),
        operator_pubkey_b58=server.identity.agent.pubkey,
        truncated=found.truncated,
    )


async def rotate_operator_token(
    server: Server, caller: Caller, asked: requests.RotateOperatorToken
) -> responses.OperatorTokenRotated:
    """Rotate the token of the operator. Open connections go on; the old token opens no other.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
    """
    await authorization.require_operator(
        server, caller, "operator_token_rotation_rejected", "rotate the operator's token"
    )
    made = await server.peers.rotate_operator()
    row = {
        "peer_display": caller.agent.display,
        "old_token_prefix": made.old_prefix,
        "new_token_prefix": made.new_prefix,
    }
    await server.audit.append("operator_token_rotated", row, issuer=caller.agent)
    return responses.OperatorTokenRotated(token_b58=made.token)


async def revoke_peer(server: Server, caller: Caller, asked: requests.RevokePeer) -> responses.PeerRevoked:
    """Revoke the token of a prefix, for the operator or under a grant of ``peers.revoke``.

    Raises:
        errors.PeerRefusedError: the prefix is empty, or ``match_limit`` is 0.
        errors.OperatorOnlyError: it is the operator's token, and the caller is not the operator.
        errors.CapabilityMissingError: the caller may not.
    """
    if not asked.token_prefix or asked.match_limit == 0:
        raise errors.PeerRefusedError("a token is named by at least one character, and matches are at least one")
    found = server.peers.matching(asked.token_prefix[:64])
    live = [entry for entry in found if entry.revoked_at_ms is None]
    target = live[0] if len(live) == 1 else None
    own = target is not None and target.agent_id.pubkey == caller.agent.pubkey
    if not caller.operator:
        await _may_revoke(server, caller, asked, target, own=own)
    if target is None:
        return responses.PeerRevoked(outcome=_unmoved(found, live, asked.match_limit or MATCHES_SHOWN))
    row = _peer(target.agent_id) | {"token_prefix": target.token_prefix}
    if own and not asked.force:
        await server.audit.append("peer_self_revoke_blocked", row, issuer=caller.agent)
        return responses.PeerRevoked(outcome=_about(target, "self_revoke_forbidden"))
    await server.peers.revoke(target)
    await server.audit.append("peer_revoked", row, issuer=caller.agent)
    return responses.PeerRevoked(outcome=_about(target, "revoked"))


async def enroll_peer(server: Server, caller: Caller, asked: requests.EnrollPeer) -> responses.PeerEnrolled:
    """Admit a peer with a token that is shown once, and grant it the actions, both until ``expires_at``.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
        errors.PeerRefusedError: the name or key is another's, or the end is past.
        errors.GrantRefusedError: an action cannot be granted so; no peer was admitted.
    """
    if not caller.operator:
        refused = {"subject_display": asked.display, "action": "peers.enroll", "reason": "not the operator"}
        await server.audit.append("capability_grant_rejected", refused, issuer=server.identity.agent)
        raise errors.OperatorOnlyError("only the operator may let somebody in")
    agent = AgentId(display=asked.display, pubkey=asked.pubkey or _nobodys_key())
    _check_enrolment(server, agent, asked)
    signed = _grants(server, agent, asked)
    made = await server.peers.enroll(agent, asked.expires_at)
    row = _peer(agent) | {
        "token_prefix": made.entry.token_prefix,
        "actions": [one.capability.action for one in signed],
        "expires_at_ms": asked.expires_at,
    }
    try:
        await server.audit.append("peer_enrolled", row, issuer=caller.agent)
        for one in signed:
            await capabilities.give(server, caller.agent, one)
    except errors.CovenantError:
        # The token was never shown, and it is revoked.
        await server.peers.revoke(made.entry)
        raise
    grants = tuple(parts.GrantedAction(action=one.capability.action, signature_b58=one.signature) for one in signed)
    return responses.PeerEnrolled(
        token_b58=made.token,
        pubkey_b58=agent.pubkey,
        display=agent.display,
        granted=tuple(one.action for one in grants),
        agent_id=agent,
        grants=grants,
        expires_at=asked.expires_at,
    )


async def purge_peers(server: Server, caller: Caller, asked: requests.PurgePeers) -> responses.PeersPurged:
    """Forget the peers that were revoked or ended before, under a grant of ``peers.purge``."""
    facts = RequestFacts(before_ms=asked.before_ms)
    await authorization.require(server, caller, "peers.purge", agent_id="peers:purge", facts=facts, hidden=True)
    await note_expired(server)
    purged = await server.peers.purge(asked.before_ms)
    row = {"before_ms": asked.before_ms, "purged": purged}
    await server.audit.append("peers_purged", row, issuer=caller.agent)
    return responses.PeersPurged(purged=purged)


async def note_expired(server: Server) -> None:
    """Write down whose token has ended since the last time."""
    for entry in server.peers.newly_expired():
        row = _peer(entry.agent_id) | {"token_prefix": entry.token_prefix}
        await server.audit.append("peer_expired", row)


# --- listing and revoking -------------------------------------------------------------------------------------


async def _delegated(server: Server, caller: Caller, action: str, facts: RequestFacts, rejected: str) -> None:
    try:
        await authorization.require(server, caller, action, agent_id=action.replace(".", ":"), facts=facts, hidden=True)
    except (errors.CapabilityMissingError, errors.CapabilityScopeError):
        await server.audit.append(rejected, _peer(caller.agent), issuer=server.identity.agent)
        raise


async def _may_revoke(
    server: Server, caller: Caller, asked: requests.RevokePeer, target: PeerToken | None, *, own: bool
) -> None:
    facts = RequestFacts(
        token_prefix=asked.token_prefix,
        peer_pubkey_b58=None if target is None else target.agent_id.pubkey,
        self_revoke=own,
        force=asked.force,
    )
    await _delegated(server, caller, "peers.revoke", facts, "operator_peer_revoke_rejected")
    if target is not None and target.agent_id.pubkey == server.identity.agent.pubkey:
        # Who may show peers out may not lock the operator out.
        row = _peer(caller.agent)
        await server.audit.append("operator_peer_revoke_rejected", row, issuer=server.identity.agent)
        raise errors.OperatorOnlyError("only the operator may revoke the operator's token")


def _unmoved(found: Sequence[PeerToken], live: Sequence[PeerToken], limit: int) -> parts.PeerRevokeOutcome:
    if live:
        shown = tuple(entry.summary() for entry in live[: min(limit, MOST_SHOWN)])
        return parts.PeerRevokeOutcome(type="ambiguous", matches=shown, truncated=len(live) > len(shown))
    if found:
        return _about(found[0], "already_revoked")
    return parts.PeerRevokeOutcome(type="not_found")


def _about(
    entry: PeerToken, outcome: Literal["revoked", "already_revoked", "self_revoke_forbidden"]
) -> parts.PeerRevokeOutcome:
    one = entry.summary()
    return parts.PeerRevokeOutcome(
        type=outcome,
        agent_id=one.agent_id,
        token_prefix=one.token_prefix,
        registered_at=one.registered_at,
        revoked_at=one.revoked_at,
    )


def _peer(agent: AgentId) -> dict[str, Any]:
    return {"peer_display": agent.display, "peer_pubkey_b58": agent.pubkey}


# --- letting in -----------------------------------------------------------------------------------------------


def _check_enrolment(server: Server, agent: AgentId, asked: requests.EnrollPeer) -> None:
    try:
        key_bytes(agent.pubkey)
    except MalformedTokenError as e:
        raise errors.PeerRefusedError(str(e)) from None
    operator = server.identity.agent
    if operator.pubkey == agent.pubkey or operator.display == agent.display:
        raise errors.PeerRefusedError("that is the operator", hint="covenant peers rotate")
    local, _, host = agent.display.partition("@")
    # The logs name the operator of the supervisor `operator@local`, and its callers `operator@local.via.uid0`.
    alike = (operator.display, _SUPERVISOR)
    if _VIA in agent.display or agent.display in alike or agent.display.startswith(tuple(f"{one}." for one in alike)):
        raise errors.PeerRefusedError(
            f"`{agent.display}` reads as the operator, or as one of the supervisor's callers",
            hint="choose another name",
        )
    if host == _AGENT_HOST and any(card.id == local for card in server.agents.cards()):
        raise errors.PeerRefusedError(f"`{agent.display}` is an agent of this daemon")
    if agent.pubkey in {billing.budget_of(each).pubkey for each in (local, *_ids(server))}:
        # These keys have no private half. A peer with one would be given the tasks of the agent.
        raise errors.PeerRefusedError("the key is that of an agent of this daemon")
    # A grant may name a peer by its display name (`a2a.send.<display>`), so that it names one.
    if any(entry.agent_id.pubkey != agent.pubkey for entry in server.peers.named(agent.display)):
        raise errors.PeerRefusedError(f"another peer is called `{agent.display}`", hint="revoke it, or choose a name")
    if any(entry.agent_id.display != agent.display for entry in server.peers.of(agent.pubkey)):
        raise errors.PeerRefusedError("the key is another peer's")
    if asked.expires_at is not None and asked.expires_at <= server.now_ms():
        raise errors.PeerRefusedError("the enrolment would end in the past")
    if len(asked.actions) > MAX_ACTIONS:
        raise errors.PeerRefusedError(f"more than {MAX_ACTIONS} actions")


def _ids(server: Server) -> Iterator[str]:
    """Those of all packages, also of such as cannot be routed to now."""
    return (one.id for one in server.agents.listing() if one.id is not None)


def _grants(server: Server, agent: AgentId, asked: requests.EnrollPeer) -> list[SignedCapability]:
    """The grants to be, each checked before any is made."""
    signed = [
        capabilities.from_daemon(server, agent, action, {}, asked.expires_at) for action in dict.fromkeys(asked.actions)
    ]
    for one in signed:
        server.capabilities.check(one, server.now_ms())
    return signed


def _nobodys_key() -> str:
    """A public key for who brings none: its private half is forgotten, so that the token is all that acts for it."""
    made = Ed25519PrivateKey.from_private_bytes(os.urandom(32))
    return base58.encode(made.public_key().public_bytes_raw())


HANDLERS: Final[Mapping[str, Handler]] = {
    "list_peers": list_peers,
    "rotate_operator_token": rotate_operator_token,
    "revoke_peer": revoke_peer,
    "enroll_peer": enroll_peer,
    "purge_peers": purge_peers,
}
