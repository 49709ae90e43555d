"""Check peers over the wire: the operator's verbs, delegable grants, and rows that a prober does not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant.stores.capabilities.book import MAX_PER_ACTION
from covenant.wire import requests
from policy import errors
from tests.authority_kit import World
from tests.capability_kit import ADA, BOB, DAEMON, EVE

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def enroll(display: str = "ada@local", **more: Any) -> requests.EnrollPeer:
    return requests.EnrollPeer(display=display, **more)


def revoke(prefix: str, **more: Any) -> requests.RevokePeer:
    return requests.RevokePeer(token_prefix=prefix, **more)


async def test_peer_is_let_in_with_its_actions(world: World) -> None:
    asked = enroll(actions=("memory.read", "intent.delegate", "memory.read"), expires_at=2000)
    answer = await world.ask(world.operator, asked)
    assert [one.action for one in answer.grants] == list(answer.granted) == ["memory.read", "intent.delegate"]
    assert world.kinds() == ["peer_enrolled", "capability_granted", "capability_granted"]
    found = await world.peers.authenticate(answer.token_b58)
    assert found is not None
    assert (found.agent_id, found.expires_at) == (answer.agent_id, 2000)
    assert world.capabilities.find(answer.agent_id.pubkey, "memory.read", 2000) is not None
    assert world.capabilities.find(answer.agent_id.pubkey, "memory.read", 2001) is None
    # A peer without a key of its own gets a fresh one: not even a second peer has the same key.
    other = await world.ask(world.operator, enroll("bob@agent"))
    assert other.agent_id.pubkey != answer.agent_id.pubkey


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (enroll("operator@local"), errors.PeerRefusedError),
        (enroll("operator@local.via.uid0"), errors.PeerRefusedError),
        (enroll("ada@laptop.via.uid0"), errors.PeerRefusedError),
        (enroll("me@local", pubkey=DAEMON.agent.pubkey), errors.PeerRefusedError),
        (enroll("me@local", pubkey="1" * 32), errors.PeerRefusedError),
        (enroll("me@local", pubkey="5"), errors.PeerRefusedError),
        (enroll("hello@agent"), errors.PeerRefusedError),
        (enroll("bob@local", pubkey=ADA.pubkey), errors.PeerRefusedError),
        (enroll("me@local", pubkey=BOB.pubkey), errors.PeerRefusedError),
        (enroll(expires_at=1000), errors.PeerRefusedError),
        (enroll(actions=("memory.read", "memory")), errors.GrantRefusedError),
        (enroll(actions=("secret.access",)), errors.GrantRefusedError),
        (enroll(actions=tuple(f"a.b{n}" for n in range(257))), errors.PeerRefusedError),
    ],
)
async def test_who_is_not_let_in(world: World, asked: requests.EnrollPeer, error: type[errors.CovenantError]) -> None:
    await world.enroll(BOB)
    assert isinstance(await world.refused(world.operator, asked), error)
    assert len(world.peers.listing(10, None, None).entries) == 2
    assert world.capabilities.find(ADA.pubkey, "memory.read", 0) is None


async def test_whose_grants_have_no_room_is_not_let_in_even_for_moment(world: World) -> None:
    for ends in range(2000, 2000 + MAX_PER_ACTION):
        asked = requests.GrantCapability(action="memory.read", subject=ADA.pubkey, expires_at=ends)
        await world.ask(world.operator, asked)
    world.kinds()
    one_more = enroll(ADA.display, pubkey=ADA.pubkey, actions=("memory.read",), expires_at=9000)
    assert isinstance(await world.refused(world.operator, one_more), errors.GrantRefusedError)
    assert len(world.peers.listing(10, None, None).entries) == 1
    assert "peer_enrolled" not in world.kinds()


async def test_only_operator_lets_in_and_rotates(world: World) -> None:
    ada = await world.enroll(ADA, "peers.list", "peers.revoke", "peers.purge")
    assert isinstance(await world.refused(ada, enroll("eve@local")), errors.OperatorOnlyError)
    assert isinstance(await world.refused(ada, requests.RotateOperatorToken()), errors.OperatorOnlyError)
    assert [(kind, issuer) for kind, issuer, _ in world.rows] == [
        ("capability_grant_rejected", "operator@local"),
        ("operator_token_rotation_rejected", "operator@local"),
    ]


async def test_rotation(world: World) -> None:
    old = world.peers.operator_token
    answer = await world.ask(world.operator, requests.RotateOperatorToken())
    assert await world.peers.authenticate(answer.token_b58) is not None
    assert await world.peers.authenticate(old) is None
    ((kind, _, row),) = world.rows
    assert (kind, row["old_token_prefix"], row["new_token_prefix"]) == (
        "operator_token_rotated",
        old[:6],
        answer.token_b58[:6],
    )


async def test_listing(world: World) -> None:
    ada, bob = await world.enroll(ADA), await world.enroll(BOB)
    answer = await world.ask(world.operator, requests.ListPeers(limit=2))
    assert [one.agent_id for one in answer.peers] == [BOB, ADA]
    assert (answer.truncated, answer.operator_pubkey_b58) == (True, DAEMON.agent.pubkey)
    assert world.kinds() == []
    for asked in (requests.ListPeers(), requests.ListPeers(pubkey_prefix=BOB.pubkey)):
        assert isinstance(await world.refused(ada, asked), errors.CapabilityMissingError)
    assert [(kind, issuer) for kind, issuer, _ in world.rows] == [
        ("capability_check", "operator@local"),
        ("operator_peers_list_rejected", "operator@local"),
    ] * 2
    scope = {"version": 1, "peer_pubkey_b58": BOB.pubkey}
    await world.ask(world.operator, requests.GrantCapability(action="peers.list", scope=scope, subject=ADA.pubkey))
    found = await world.ask(ada, requests.ListPeers(pubkey_prefix=BOB.pubkey))
    assert [one.token_prefix for one in found.peers] == [bob.token_prefix]
    for prefix in (None, BOB.pubkey[:-1], ADA.pubkey):
        asked = requests.ListPeers(pubkey_prefix=prefix)
        assert isinstance(await world.refused(ada, asked), errors.CapabilityScopeError)


async def test_every_outcome_of_revoking(world: World) -> None:
    ada = await world.enroll(ADA)
    operator_prefix = world.peers.operator_token[:6]

    async def outcome(prefix: str, **more: Any) -> Any:
        return (await world.ask(world.operator, revoke(prefix, **more))).outcome

    assert (await outcome("zzzzzz")).type == "not_found"
    assert (await outcome(ada.token_prefix + "1")).type == "not_found"
    first = await outcome(ada.token_prefix)
    assert (first.type, first.agent_id, first.revoked_at) == ("revoked", ADA, 1000)
    assert world.kinds() == ["peer_revoked"]
    assert (await outcome(ada.token_prefix)).type == "already_revoked"
    assert world.kinds() == []
    assert (await outcome(operator_prefix)).type == "self_revoke_forbidden"
    assert world.kinds() == ["peer_self_revoke_blocked"]
    assert await world.peers.authenticate(world.peers.operator_token) is not None
    assert (await outcome(operator_prefix, force=True)).type == "revoked"
    assert await world.peers.authenticate(world.peers.operator_token) is None
    for asked in (revoke(""), revoke("x", match_limit=0)):
        assert isinstance(await world.refused(world.operator, asked), errors.PeerRefusedError)


async def test_whole_token_is_prefix_too(world: World) -> None:
    answer = await world.ask(world.operator, enroll())
    assert (await world.ask(world.operator, revoke(answer.token_b58))).outcome.type == "revoked"


async def test_ambiguous(world: World) -> None:
    made = [await world.ask(world.operator, enroll(pubkey=ADA.pubkey)) for _ in range(60)]
    heads = [one.token_b58[0] for one in made]
    head = max(set(heads), key=heads.count)
    assert heads.count(head) > 1
    found = (await world.ask(world.operator, revoke(head, match_limit=1))).outcome
    assert (found.type, len(found.matches), found.truncated) == ("ambiguous", 1, True)
    found = (await world.ask(world.operator, revoke(head, match_limit=100))).outcome
    assert (len(found.matches) >= heads.count(head), found.truncated) == (True, False)
    assert None not in [await world.peers.authenticate(one.token_b58) for one in made]


async def test_delegated_revoking(world: World) -> None:
    ada, bob, eve = await world.enroll(ADA), await world.enroll(BOB), await world.enroll(EVE)
    refused = await world.refused(ada, revoke(bob.token_prefix))
    unknown = await world.refused(ada, revoke("zzzzzz"))
    assert refused.message == unknown.message, "who may not does not learn which tokens there are"
    assert {issuer for _, issuer, _ in world.rows} == {"operator@local"}
    assert world.kinds() == ["capability_check", "operator_peer_revoke_rejected"] * 2
    scope = {"version": 1, "token_prefix": bob.token_prefix[:3], "self": False, "force": False}
    await world.ask(world.operator, requests.GrantCapability(action="peers.revoke", scope=scope, subject=ADA.pubkey))
    assert isinstance(await world.refused(ada, revoke(eve.token_prefix)), errors.CapabilityScopeError)
    forced = revoke(bob.token_prefix, force=True)
    assert isinstance(await world.refused(ada, forced), errors.CapabilityScopeError)
    assert (await world.ask(ada, revoke(bob.token_prefix))).outcome.type == "revoked"


async def test_nobody_locks_operator_out(world: World) -> None:
    ada = await world.enroll(ADA, "peers.revoke")
    prefix = world.peers.operator_token[:6]
    for asked in (revoke(prefix), revoke(prefix, force=True), revoke(world.peers.operator_token)):
        assert isinstance(await world.refused(ada, asked), errors.OperatorOnlyError)
    assert await world.peers.authenticate(world.peers.operator_token) is not None
    assert (await world.ask(ada, revoke(ada.token_prefix))).outcome.type == "self_revoke_forbidden"


async def test_purging(world: World) -> None:
    ada = await world.enroll(ADA)
    await world.ask(world.operator, revoke(ada.token_prefix))
    asked = requests.PurgePeers(before_ms=1001)
    assert isinstance(await world.refused(world.operator, asked), errors.CapabilityMissingError)
    await world.ask(world.operator, requests.GrantCapability(action="peers.purge"))
    world.kinds()
    assert (await world.ask(world.operator, asked)).purged == 1
    assert world.kinds() == ["capability_check", "peers_purged"]


async def test_who_ended_is_written_once(world: World) -> None:
    await world.ask(world.operator, enroll(expires_at=1500))
    await world.ask(world.operator, requests.ListPeers())
    world.clock.at_ms = 1501
    world.kinds()
    await world.ask(world.operator, requests.ListPeers())
    await world.ask(world.operator, requests.ListPeers())
    assert world.kinds() == ["peer_expired"]


async def test_who_was_let_in_without_row_is_not_let_in(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise errors.StoreFullError("no room")

    monkeypatch.setattr(world.audit, "append", full)
    with pytest.raises(errors.StoreFullError):
        await world.ask(world.operator, enroll())
    assert [entry.agent_id for entry in world.peers.listing(9, None, "live").entries] == [DAEMON.agent]
