"""Check the store of grants: one suite for the one in memory and the one on disk."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.stores.capabilities.book import MAX_PER_ACTION
from covenant.stores.capabilities.durable import DurableCapabilities
from covenant.stores.capabilities.in_memory import InMemoryCapabilities
from covenant.stores.capabilities.interface import Capabilities
from covenant.wire.types import SignedCapability
from policy import errors
from tests.capability_kit import ADA, BOB, DAEMON, EVE, granted, narrowed

pytestmark = pytest.mark.anyio

METERED = {"version": 1, "max_uses": 3}
ECHO = "tool.call.echo"


@pytest.fixture(params=["in memory", "durable"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Capabilities]:
    tmp_path.chmod(0o700)
    kept: Capabilities = (
        InMemoryCapabilities(DAEMON.agent.pubkey)
        if request.param == "in memory"
        else await DurableCapabilities.open(tmp_path / "capabilities", DAEMON)
    )
    yield kept
    await kept.close()


async def refused(store: Capabilities, signed: SignedCapability, error: type[errors.CovenantError]) -> str:
    with pytest.raises(error) as told:
        await store.grant(signed, 10)
    assert store.find(signed.capability.subject.pubkey, signed.capability.action, 10) is None
    return told.value.message


async def test_grant_is_found_by_its_subject_and_action_alone(store: Capabilities) -> None:
    signed = granted(ADA, "memory.read", ends=50)
    await store.grant(signed, 10)
    assert store.find(ADA.pubkey, "memory.read", 50) == signed
    assert store.find(ADA.pubkey, "memory.read", 51) is None
    assert store.find(BOB.pubkey, "memory.read", 50) is None
    assert store.find(ADA.pubkey, "memory.write", 50) is None


def steps(act: Callable[[], object]) -> int:
    """Return the number of Python instructions of a call, which does not depend on the machine's speed."""
    count, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    # A collection in the middle would count the finalizers of other tests.
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


async def test_check_takes_as_many_steps_however_many_grants_there_are(store: Capabilities) -> None:
    """A check looks only at grants of its subject and action, not at others of the same holder or of others."""
    await store.grant(granted(ADA, "memory.read"), 10)
    assert store.find(ADA.pubkey, "memory.read", 10) is not None  # warm up the caches
    taken = [steps(lambda: store.find(ADA.pubkey, "memory.read", 10))]
    for number in range(100):
        async with anyio.create_task_group() as group:
            for agent in (ADA, BOB):
                group.start_soon(store.grant, granted(agent, f"calendar.read{number}"), 10)
        if number in (0, 99):
            taken.append(steps(lambda: store.find(ADA.pubkey, "memory.read", 10)))
    assert taken[0] > 20
    assert len(set(taken)) == 1


async def test_ended_grant_stays_to_be_seen(store: Capabilities) -> None:
    await store.grant(granted(ADA, "memory.read", ends=50), 10)
    assert store.find(ADA.pubkey, "memory.read", 51) is None
    (grant,) = store.usage(10, ADA.pubkey)
    assert not store.effective(grant, 51)


async def test_forged_grants_are_not_kept(store: Capabilities) -> None:
    good = granted(ADA, "memory.read")
    wider = good.model_copy(update={"capability": good.capability.model_copy(update={"action": "memory.write"})})
    await refused(store, wider, errors.CapabilityInvalidError)
    await refused(store, narrowed(good, BOB, by="ada"), errors.CapabilityInvalidError)
    await store.grant(good, 10)
    await refused(store, narrowed(good, BOB, by="eve"), errors.CapabilityInvalidError)
    await refused(store, granted(BOB, "memory.read", {"tiers": ["working"]}), errors.CapabilityInvalidError)
    await refused(store, granted(BOB, "memory.read", ends=9), errors.CapabilityInvalidError)


async def test_revoking_is_for_good_until_operator_grants_anew(store: Capabilities) -> None:
    signed = granted(ADA, "memory.read")
    await store.grant(signed, 10)
    assert [one.signature for one in await store.revoke(signed.signature, 20)] == [signed.signature]
    assert store.find(ADA.pubkey, "memory.read", 21) is None
    assert await store.revoke(signed.signature, 22) == []
    # The same token has the same signature; granted again it is valid, and is revoked again.
    await store.grant(signed, 30)
    assert store.find(ADA.pubkey, "memory.read", 31) == signed
    assert len(await store.revoke(signed.signature, 32)) == 1
    assert store.find(ADA.pubkey, "memory.read", 33) is None


async def test_revoking_ends_what_stands_below(store: Capabilities) -> None:
    top = granted(ADA, "memory.read")
    middle = narrowed(top, BOB, by="ada", tiers=["working"])
    low = narrowed(middle, EVE, tiers=["working"])
    for signed in (top, middle, low):
        await store.grant(signed, 10)
    assert store.find(EVE.pubkey, "memory.read", 10) == low
    assert [one.signature for one in store.lineage(low.signature)] == [
        low.signature,
        middle.signature,
        top.signature,
    ]
    ended = await store.revoke(top.signature, 20)
    assert {one.signature for one in ended} == {top.signature, middle.signature, low.signature}
    # Granting the parent again does not restore the grants below it.
    await store.grant(top, 30)
    assert store.find(BOB.pubkey, "memory.read", 30) is None
    assert store.find(EVE.pubkey, "memory.read", 30) is None


async def test_chain_ends_with_its_first_end(store: Capabilities) -> None:
    top = granted(ADA, "memory.read", ends=50)
    child = narrowed(top, BOB, ends=40)
    await store.grant(top, 10)
    await store.grant(child, 10)
    assert store.find(BOB.pubkey, "memory.read", 40) == child
    assert store.find(BOB.pubkey, "memory.read", 41) is None


async def test_uses_are_counted_to_last_one_and_no_further(store: Capabilities) -> None:
    signed = granted(ADA, ECHO, METERED)
    await store.grant(signed, 10)
    counted: list[int] = []
    spent: list[int] = []

    async def use() -> None:
        try:
            (made,) = await store.use([signed.signature])
            counted.append(made.used)
        except errors.CapabilityExhaustedError as e:
            spent.append(e.details["use"].used)

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(use)
    assert (sorted(counted), spent) == ([1, 2, 3], [3] * 17)
    (grant,) = store.usage(1, ADA.pubkey)
    assert not store.effective(grant, 10)
    # Granted again, it has all its uses again.
    await store.grant(signed, 10)
    assert [one.used for one in await store.use([signed.signature])] == [1]


async def test_granting_again_what_holds_changes_nothing(store: Capabilities) -> None:
    signed = granted(ADA, ECHO, METERED)
    await store.grant(signed, 10)
    await store.use([signed.signature])
    await store.grant(signed, 20)
    (grant,) = store.usage(10, ADA.pubkey)
    assert (grant.used, grant.granted_at_ms) == (1, 10)


async def test_use_below_is_use_above(store: Capabilities) -> None:
    top = granted(ADA, ECHO, METERED)
    bobs, eves = narrowed(top, BOB, max_uses=2), narrowed(top, EVE, by="ada", max_uses=2)
    for signed in (top, bobs, eves):
        await store.grant(signed, 10)
    await store.use([bobs.signature])
    await store.use([bobs.signature])
    with pytest.raises(errors.CapabilityExhaustedError):
        await store.use([bobs.signature])
    await store.use([eves.signature])
    # The third use was the last of the parent, though the child has one left.
    with pytest.raises(errors.CapabilityExhaustedError) as told:
        await store.use([eves.signature])
    assert told.value.details["use"].signature == top.signature
    (grant,) = store.usage(1, EVE.pubkey)
    assert (grant.used, store.effective(grant, 10)) == (1, False)


async def test_what_is_not_metered_is_not_counted(store: Capabilities) -> None:
    signed = granted(ADA, ECHO)
    await store.grant(signed, 10)
    assert await store.use([signed.signature]) == []


async def test_several_grants_are_used_together_or_not_at_all(store: Capabilities) -> None:
    once, often = granted(ADA, ECHO, {"version": 1, "max_uses": 1}), granted(ADA, "tool.call.other", METERED)
    for signed in (once, often):
        await store.grant(signed, 10)
    both = [once.signature, often.signature]
    store.left(both)
    assert [(one.signature, one.used) for one in await store.use(both)] == [(both[0], 1), (both[1], 1)]
    for asked in (both, both[::-1], [often.signature] * 3):
        for refused in (store.use(asked), None):
            with pytest.raises(errors.CapabilityExhaustedError):
                store.left(asked) if refused is None else await refused
    assert [one.used for one in await store.use([often.signature] * 2)] == [3, 3]


async def test_purging_forgets_what_is_over_and_nothing_else(store: Capabilities) -> None:
    revoked, ended, held = granted(ADA, "memory.read"), granted(ADA, "memory.write", ends=15), granted(ADA, ECHO)
    child = narrowed(revoked, BOB)
    for signed in (revoked, ended, held, child):
        await store.grant(signed, 10)
    await store.revoke(revoked.signature, 20)
    assert await store.purge(15, 30) == 0
    assert await store.purge(21, 15) == 2
    assert await store.purge(21, 16) == 1
    assert await store.purge(21, 16) == 0
    assert [one.signature for one in store.usage(10, ADA.pubkey)] == [held.signature]
    assert store.find(ADA.pubkey, ECHO, 30) == held
    # A kept copy of the child is invalid, with or without its parent.
    await refused(store, child, errors.CapabilityInvalidError)


async def test_who_sees_grant(store: Capabilities) -> None:
    top = granted(ADA, "memory.read")
    child = narrowed(top, BOB)
    await store.grant(top, 10)
    await store.grant(child, 11)

    def seen(pubkey: str, limit: int = 10) -> list[str]:
        return [one.signature for one in store.recent(limit, pubkey)]

    assert seen(ADA.pubkey) == [child.signature, top.signature], "as holder of what is narrowed"
    assert seen(BOB.pubkey) == [child.signature]
    assert seen(DAEMON.agent.pubkey) == [child.signature, top.signature]
    assert seen(DAEMON.agent.pubkey, 1) == [child.signature]
    assert seen(EVE.pubkey) == []
    await store.revoke(child.signature, 12)
    assert seen(BOB.pubkey) == []
    assert len(store.usage(10, BOB.pubkey)) == 1


async def test_nobody_fills_place_of_operators_grants(store: Capabilities) -> None:
    top = granted(ADA, "memory.read")
    await store.grant(top, 10)
    for n in range(MAX_PER_ACTION):
        await store.grant(narrowed(top, BOB, record_id=str(n)), 10)
    with pytest.raises(errors.GrantRefusedError):
        await store.grant(narrowed(top, BOB, record_id="one more"), 10)
    own = granted(BOB, "memory.read")
    await store.grant(own, 10)
    assert store.find(BOB.pubkey, "memory.read", 10) == own, "the operator's stands first"


async def test_nobody_fills_disk_with_gifts(store: Capabilities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.stores.capabilities.book.MAX_BELOW", 3)
    top = granted(ADA, "memory.read")
    await store.grant(top, 10)
    for n in range(3):
        await store.grant(narrowed(top, BOB, record_id=str(n)), 10)
    with pytest.raises(errors.GrantRefusedError):
        await store.grant(narrowed(top, EVE), 10)
    await store.revoke(top.signature, 20)
    assert await store.purge(21, 30) == 4
