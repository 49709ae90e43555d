"""Chains of grants: what leads to the daemon's key and what only looks so."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from policy import base58
from policy.capabilities import chain
from policy.capabilities.chain import Signed
from policy.capabilities.token import Token

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([n + 1]) * 32) for n in range(12)]
NAMES = [base58.encode(key.public_key().public_bytes_raw()) for key in KEYS]
ROOT = NAMES[0]


def signed(signer: int, subject: int, scope: Any, **more: Any) -> Signed:
    token = Token(NAMES[subject], more.pop("action", "memory.read"), scope, NAMES[signer], more.pop("ends", None))
    token = structs.replace(token, **more)
    return Signed(token, base58.encode(KEYS[signer].sign(token.message())))


def below(parent: Signed, signer: int, subject: int, ends: int | None = None, **scope: Any) -> Signed:
    scope = {"version": 1, "parent_b58": parent.signature} | scope
    return signed(signer, subject, scope, ends=ends)


def verify(*links: Signed, now_ms: int = 0) -> str | None:
    return chain.verify(links, root=ROOT, now_ms=now_ms)


TOP = signed(0, 1, {"version": 1, "tiers": ["working", "episodic"]}, ends=100)


def test_of_holders_and_of_daemon() -> None:
    by_holder = below(TOP, 1, 2, 100, tiers=["working"])
    by_daemon = below(by_holder, 0, 3, 50, tiers=["working"], record_id="r")
    assert verify(TOP) is None
    assert verify(by_holder, TOP) is None
    assert verify(by_daemon, by_holder, TOP) is None


def test_ends() -> None:
    child = below(TOP, 1, 2, 50, tiers=["working"])
    assert verify(child, TOP, now_ms=50) is None
    assert verify(child, TOP, now_ms=51) is not None
    assert verify(below(TOP, 1, 2, 101, tiers=["working"]), TOP) is not None
    assert verify(below(TOP, 1, 2, None, tiers=["working"]), TOP) is not None
    # The greatest end is no way round: neither it nor one that would be 0 in 64 bits outlasts the parent's.
    assert verify(below(TOP, 1, 2, 2**64 - 1, tiers=["working"]), TOP) is not None


def test_forged() -> None:
    good = below(TOP, 1, 2, 100, tiers=["working"])
    other = signed(0, 1, {"version": 1, "tiers": ["working"]}, ends=100)
    by_another = below(TOP, 5, 2, 100, tiers=["working"])
    assert verify() is not None
    assert verify(good) is not None, "without what it stands on"
    assert verify(good, other) is not None, "below another grant of the same holder"
    assert verify(by_another, TOP) is not None, "signed by who does not hold the grant above"
    assert verify(signed(5, 2, {})) is not None, "granted by nobody's leave"
    assert verify(TOP, TOP) is not None
    assert verify(good, good, TOP) is not None
    widened = Signed(structs.replace(good.token, scope={"version": 1, "parent_b58": TOP.signature}), good.signature)
    assert verify(widened, TOP) is not None
    assert verify(Signed(good.token, TOP.signature), TOP) is not None
    renamed = Signed(structs.replace(good.token, granted_by=ROOT), good.signature)
    assert verify(renamed, TOP) is not None
    # The daemon's key over a root that claims to stand on another is no root.
    assert verify(signed(0, 2, {"version": 1, "parent_b58": TOP.signature})) is not None


@pytest.mark.parametrize(
    "scope",
    [
        {"tiers": ["working", "longterm"]},
        {"tiers": ["working", "episodic", "longterm"]},
        {},
        {"tiers": []},
        {"tiers": "working"},
        {"version": True, "tiers": ["working"]},
    ],
)
def test_wider_or_malformed(scope: Any) -> None:
    assert verify(below(TOP, 1, 2, 100, **scope), TOP) is not None


def test_another_action_is_not_within() -> None:
    scope = {"version": 1, "parent_b58": TOP.signature, "tiers": ["working"]}
    assert verify(signed(1, 2, scope, ends=1, action="memory.read.working"), TOP) is None
    assert verify(signed(1, 2, scope, ends=1, action="memory.write"), TOP) is not None
    assert verify(signed(1, 2, scope, ends=1, action="memory.purge"), TOP) is not None


def test_depth_is_bounded() -> None:
    links = [signed(0, 1, {})]
    for n in range(1, chain.MAX_DEPTH):
        links.insert(0, below(links[0], n, n + 1))
    assert len(links) == chain.MAX_DEPTH
    assert verify(*links) is None
    assert verify(below(links[0], chain.MAX_DEPTH, 11), *links) is not None
