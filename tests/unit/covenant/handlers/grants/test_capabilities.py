"""Check grants over the wire: which grants a caller may give, and the rows of each answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant.handlers.access import authorization
from covenant.handlers.access.authorization import RequestFacts
from covenant.handlers.caller import Caller
from covenant.wire import requests
from policy import errors
from policy.capabilities import chain
from policy.capabilities.token import Token
from tests.authority_kit import World
from tests.capability_kit import ADA, BOB, DAEMON, EVE, signed

pytestmark = pytest.mark.anyio

ECHO = "tool.call.echo"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def grant(action: str, scope: Any = None, **more: Any) -> requests.GrantCapability:
    return requests.GrantCapability(action=action, scope=scope, **more)


async def holds(world: World, caller: Caller, action: str, **facts: Any) -> bool:
    try:
        await authorization.require(world.server, caller, action, agent_id="test", facts=RequestFacts(**facts))
    except (errors.CapabilityMissingError, errors.CapabilityScopeError):
        return False
    return True


async def test_operator_grants_itself(world: World) -> None:
    answer = await world.ask(world.operator, grant("memory.write"))
    assert (answer.subject_display, answer.action) == ("operator@local", "memory.write")
    (kept,) = (await world.ask(world.operator, requests.RecentCapabilities())).capabilities
    assert (kept.signature, kept.capability.scope, kept.capability.expires_at) == (answer.signature_b58, {}, None)
    assert world.kinds() == ["capability_granted"]
    assert await holds(world, world.operator, "memory.write")
    assert not await holds(world, world.operator, "memory.purge")
    again = await world.ask(world.operator, grant("memory.write"))
    assert again.signature_b58 == answer.signature_b58


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (grant("memory"), "dot-separated"),
        (grant("memory.wríte"), "dot-separated"),
        (grant("memory.write", {"tiers": ["working"]}), "version"),
        (grant("memory.write", {"version": True}), "version"),
        (grant("memory.write", {"version": 1, "before_ms": 2**53}), "canonical"),
        (grant("memory.write", {"version": 1, "parent_b58": "5" * 87}), "parent_b58"),
        (grant("memory.write", expires_at=999), "past"),
        (grant("memory.write", expires_at=0), "past"),
        (grant("memory.write", subject="nobody@local"), "no peer"),
        (grant("memory.write", subject="short"), "base58"),
        (grant("memory.write", subject="1" * 32), "small order"),
        (grant("memory.write", parent_b58="5" * 87), "not the caller's"),
        (grant("memory.write", signature_b58="5" * 87), "parent_b58"),
        (grant("secret.access"), "names"),
        (grant("tool.list", {"version": 1, "max_uses": 3}), "max_uses"),
    ],
)
async def test_what_nobody_is_granted(world: World, asked: requests.GrantCapability, why: str) -> None:
    refused = await world.refused(world.operator, asked)
    assert isinstance(refused, errors.GrantRefusedError)
    assert why in refused.message
    assert [(kind, row["reason"]) for kind, _, row in world.rows] == [("capability_grant_rejected", refused.message)]


async def test_no_other_grants_what_it_does_not_hold(world: World) -> None:
    ada = await world.enroll(ADA, "memory.read")
    for asked in (
        grant("memory.write"),
        grant("memory.write", subject=ADA.display),
        grant("memory.purge", subject=DAEMON.agent.display),
        grant("capabilities.purge"),
    ):
        assert isinstance(await world.refused(ada, asked), errors.GrantRefusedError)
    assert set(world.kinds()) == {"capability_grant_rejected"}
    assert not await holds(world, ada, "memory.write")


async def test_holder_gives_less(world: World) -> None:
    ada, bob = await world.enroll(ADA, "memory.read"), await world.enroll(BOB)
    answer = await world.ask(ada, grant("memory.read", {"version": 1, "tiers": ["working"]}, subject=BOB.display))
    assert world.kinds() == ["capability_granted", "capability_attenuated"]
    assert await holds(world, bob, "memory.read", tier="working")
    assert not await holds(world, bob, "memory.read", tier="episodic")
    # Bob can delegate his own grant, and no wider one.
    wider = grant("memory.read", {"version": 1, "tiers": ["working", "episodic"]}, subject=EVE.pubkey)
    assert isinstance(await world.refused(bob, wider), errors.GrantRefusedError)
    assert isinstance(
        await world.refused(bob, grant("memory.read", {"version": 1}, subject=EVE.pubkey)), errors.GrantRefusedError
    )
    await world.ask(bob, grant("memory.read", subject=EVE.pubkey))
    eve = await world.enroll(EVE)
    assert await holds(world, eve, "memory.read", tier="working")
    assert not await holds(world, eve, "memory.read", tier="longterm")
    await world.ask(ada, requests.RevokeCapability(signature_b58=answer.signature_b58))
    assert not await holds(world, bob, "memory.read", tier="working")
    assert not await holds(world, eve, "memory.read", tier="working")
    assert await holds(world, ada, "memory.read", tier="episodic")


async def test_holder_signs_itself(world: World) -> None:
    ada = await world.enroll(ADA, "memory.read")
    (held,) = world.capabilities.usage(1, ADA.pubkey)
    scope = {"version": 1, "parent_b58": held.signature, "tiers": ["working"]}
    token = Token(BOB.pubkey, "memory.read", scope, ADA.pubkey, 5000)
    asked = grant(
        "memory.read",
        {"version": 1, "tiers": ["working"]},
        subject=BOB.pubkey,
        expires_at=5000,
        parent_b58=held.signature,
        signature_b58=signed("ada", token),
    )
    await world.ask(ada, asked)
    (kept,) = world.capabilities.usage(1, BOB.pubkey)
    links = [one.link for one in world.capabilities.lineage(kept.signature)]
    assert chain.verify(links, root=DAEMON.agent.pubkey, now_ms=5000) is None
    assert kept.token.granted_by == ADA.pubkey
    # The request must have the caller's own signature over exactly this token.
    eve = await world.enroll(EVE, "memory.read")
    for caller, changed in (
        (eve, {}),
        (ada, {"signature_b58": signed("eve", token)}),
        (ada, {"expires_at": 5001}),
        (ada, {"scope": {"version": 1}}),
        (ada, {"action": "memory.read.working"}),
    ):
        assert isinstance(await world.refused(caller, asked.model_copy(update=changed)), errors.GrantRefusedError)


async def test_gift_ends_with_what_is_held(world: World) -> None:
    ada = await world.enroll(ADA)
    held = await world.ask(world.operator, grant("memory.read", subject=ADA.pubkey, expires_at=2000))
    given = await world.ask(ada, grant("memory.read", subject=BOB.pubkey))
    assert world.capabilities.get(given.signature_b58).token.expires_at == 2000  # type: ignore[union-attr]
    for ends in (2001, 2**64 - 1):
        late = grant("memory.read", subject=BOB.pubkey, expires_at=ends, parent_b58=held.signature_b58)
        assert "outlast" in (await world.refused(ada, late)).message
    world.clock.at_ms = 2001
    late = grant("memory.read", subject=BOB.pubkey, parent_b58=held.signature_b58)
    assert "no more" in (await world.refused(ada, late)).message


async def test_metered(world: World) -> None:
    ada, bob = await world.enroll(ADA), await world.enroll(BOB)
    scope = {"version": 1, "max_uses": 2}
    await world.ask(world.operator, grant(ECHO, scope, subject=ADA.pubkey))
    await world.ask(ada, grant(ECHO, {"version": 1, "max_uses": 1}, subject=BOB.pubkey))
    more = grant(ECHO, {"version": 1, "max_uses": 3}, subject=BOB.pubkey)
    assert isinstance(await world.refused(ada, more), errors.GrantRefusedError)
    for _ in range(2):
        bobs = await authorization.require(world.server, bob, ECHO, agent_id="test", facts=RequestFacts(tool="echo"))
        world.kinds()
        try:
            await authorization.consume(world.server, [bobs])
        except errors.CapabilityExhaustedError:
            assert world.kinds() == ["capability_budget_exhausted"]
        else:
            assert world.kinds() == ["capability_used"]
    adas = await authorization.require(world.server, ada, ECHO, agent_id="test", facts=RequestFacts(tool="echo"))
    await authorization.consume(world.server, [adas])
    with pytest.raises(errors.CapabilityExhaustedError):
        await authorization.consume(world.server, [adas])
    (use,) = (await world.ask(ada, requests.CapabilityUsage())).grants
    assert (use.budget.max_uses, use.budget.used, use.budget.remaining, use.effective) == (2, 2, 0, "exhausted")


async def test_grant_with_uses_left_is_taken_before_one_without(world: World) -> None:
    ada = await world.enroll(ADA)
    first = await world.ask(world.operator, grant(ECHO, {"version": 1, "max_uses": 1}, subject=ADA.pubkey))
    await authorization.consume(world.server, [world.capabilities.get(first.signature_b58).signed])  # type: ignore[union-attr]
    second = await world.ask(world.operator, grant(ECHO, {"version": 1, "max_uses": 7}, subject=ADA.pubkey))
    found = await authorization.require(world.server, ada, ECHO, agent_id="test")
    assert found.signature == second.signature_b58


async def test_who_may_revoke(world: World) -> None:
    ada, bob, eve = await world.enroll(ADA, "memory.read"), await world.enroll(BOB), await world.enroll(EVE)
    given = await world.ask(ada, grant("memory.read", subject=BOB.pubkey))
    revoke = requests.RevokeCapability(signature_b58=given.signature_b58)
    world.kinds()
    refused = await world.refused(eve, revoke)
    assert isinstance(refused, errors.NotYoursError)
    unknown = requests.RevokeCapability(signature_b58="nothing like it")
    # A stranger cannot learn that such a grant exists, not even from its own feed.
    of_none = await world.refused(eve, unknown)
    assert (refused.code, refused.message, refused.hint) == (of_none.code, of_none.message, of_none.hint)
    assert [(kind, issuer) for kind, issuer, _ in world.rows] == [
        ("capability_revoke_rejected", world.operator.agent.display)
    ] * 2
    world.kinds()
    assert (await world.ask(bob, revoke)).removed
    assert world.kinds() == ["capability_revoked"]
    assert not (await world.ask(ada, revoke)).removed
    assert [row["removed"] for _, _, row in world.rows] == [False]
    world.kinds()
    assert not (await world.ask(world.operator, unknown)).removed
    assert world.kinds() == ["capability_revoke_rejected"]
    held = world.capabilities.usage(1, ADA.pubkey)[0].signature
    assert (await world.ask(world.operator, requests.RevokeCapability(signature_b58=held))).removed


async def test_purging_needs_grant_of_everybody(world: World) -> None:
    asked = requests.PurgeCapabilities(before_ms=500)
    assert isinstance(await world.refused(world.operator, asked), errors.CapabilityMissingError)
    await world.ask(world.operator, grant("capabilities.purge", {"version": 1, "before_ms": 500}))
    assert (await world.ask(world.operator, asked)).purged == 0
    assert world.kinds()[-2:] == ["capability_check", "capabilities_purged"]
    later = requests.PurgeCapabilities(before_ms=501)
    assert isinstance(await world.refused(world.operator, later), errors.CapabilityScopeError)
    assert world.kinds() == ["capability_check", "capability_scope_rejected"]


async def test_one_row_for_several_actions(world: World) -> None:
    ada = await world.enroll(ADA, "memory.read")
    required = ["memory.read", "memory.write", "intent.delegate"]
    with pytest.raises(errors.CapabilityMissingError) as told:
        await authorization.require_all(world.server, ada, required, agent_id="agent")
    assert told.value.details["missing"] == ["memory.write", "intent.delegate"]
    ((kind, issuer, row),) = world.rows
    assert (kind, issuer, row["passed"], row["missing_actions"]) == (
        "capability_check",
        ADA.display,
        False,
        required[1:],
    )
    assert [one["action"] for one in row["authorized_by"]] == ["memory.read"]


async def test_one_tier_and_all_of_them(world: World) -> None:
    ada, bob = await world.enroll(ADA, "memory.read.working"), await world.enroll(BOB, "memory.read")
    assert await holds(world, ada, "memory.read", tier="working")
    assert not await holds(world, ada, "memory.read", tier="episodic")
    assert not await holds(world, ada, "memory.read")
    assert await holds(world, bob, "memory.read.episodic", tier="episodic")


async def test_row_that_cannot_be_written_is_refusal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = await world.enroll(ADA, "memory.read")

    async def full(*_: Any) -> None:
        raise errors.StoreFullError("no room")

    monkeypatch.setattr(world.audit, "append_all", full)
    with pytest.raises(errors.StoreFullError):
        await authorization.require(world.server, ada, "memory.read", agent_id="test")
    with pytest.raises(errors.StoreFullError):
        await world.ask(world.operator, grant("memory.write"))
    assert world.capabilities.find(DAEMON.agent.pubkey, "memory.write", 0) is None
