"""Identities, peers and grants for tests."""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.keys.identity import Identity
from covenant.stores.capabilities.interface import to_wire
from covenant.wire.types import AgentId, SignedCapability
from policy import base58
from policy.capabilities.token import Token

DAEMON = Identity(b"d" * 32)
_KEYS = {name: Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b".")) for name in ("ada", "bob", "eve")}


def agent(name: str) -> AgentId:
    return AgentId(display=f"{name}@local", pubkey=base58.encode(_KEYS[name].public_key().public_bytes_raw()))


ADA, BOB, EVE = agent("ada"), agent("bob"), agent("eve")


def granted(to: AgentId, action: str, scope: Any = None, *, ends: int | None = None) -> SignedCapability:
    """A grant by the daemon."""
    token = Token(to.pubkey, action, {} if scope is None else scope, DAEMON.agent.pubkey, ends)
    return to_wire(token, DAEMON.grant(token), to.display, DAEMON.agent.display)


def narrowed(
    parent: SignedCapability, to: AgentId, *, by: str | None = None, ends: int | None = None, **scope: Any
) -> SignedCapability:
    """A grant below another, signed by the daemon or by the holder of that name."""
    scope = {"version": 1, "parent_b58": parent.signature} | scope
    giver = agent(by) if by is not None else DAEMON.agent
    token = Token(to.pubkey, parent.capability.action, scope, giver.pubkey, ends)
    signature = DAEMON.grant(token) if by is None else signed(by, token)
    return to_wire(token, signature, to.display, giver.display)


def signed(by: str, token: Token) -> str:
    """Sign a token with the key of `by`."""
    return base58.encode(_KEYS[by].sign(token.message()))
