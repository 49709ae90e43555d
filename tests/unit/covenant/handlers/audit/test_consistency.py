"""``verify`` over real stores: what it reads, what it counts, and whose things it looks at."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import anyio
import pytest

from covenant.handlers.audit import consistency, drift_kinds
from covenant.handlers.audit.drift import Window
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.wire import parts, requests, responses
from covenant.wire.types import Tier
from tests.memory_kit import name, opened, receipt, record
from tests.unit.covenant.handlers.memory.test_records import ALICE, ALL, BOB, World, repair

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(covenant_home: Path) -> World:
    return World(covenant_home)


async def report(world: World, *, caller: object = None, window: int = 100) -> responses.VerifyReport:
    ask = consistency.HANDLERS["verify"]
    answer = await ask(world.server, caller or world.operator, requests.Verify(window=window))  # type: ignore[arg-type]
    assert isinstance(answer, responses.VerifyReport)
    return answer


async def test_what_daemon_itself_does_leaves_no_drift(world: World) -> None:
    alice = await world.granted(ALICE, *ALL)
    stored = await world.ask(alice, requests.PutMemory(tier=Tier.WORKING, text="zero"))
    for text in ("one", "two", "three"):
        stored = await world.ask(alice, requests.PutMemory(tier=Tier.WORKING, text=text))
        world.clock.at_ms += 1000
    await world.ask(alice, requests.PutMemory(tier=Tier.LONGTERM, text="child", parent=stored.record.id))
    await world.ask(alice, repair(parts.DeleteRecord(id=(await world.server.memory.recent(None, 9))[-1].id)))
    # Grants of this test were given to the store without the row that the verb writes.
    for grant in world.server.capabilities.recent(99, world.identity.agent.pubkey):
        row = {"subject_display": "a@b", "action": "x.y", "granted_by_display": "a@b"}
        await world.server.audit.append("capability_granted", {**row, "signature_b58": grant.signature})
    found = await report(world)
    assert found.drift == ()
    assert [check.name for check in found.checks] == list(drift_kinds.CHECKS)
    assert all(check.passed and check.message == "no drift" for check in found.checks)
    assert (found.window, found.orphans_total) == (100, 0)
    await world.ask(alice, requests.PurgeMemory(before_ms=world.clock.at_ms + 10**6))
    assert (await report(world)).drift == ()


async def test_drift_fails_its_check_and_counts_its_orphans(world: World) -> None:
    await world.server.memory.put(record(1, parent=name(1), owner=ALICE))
    await world.server.receipts.append(receipt(1, memory=7, payer=ALICE, settled_at=500))
    before = await world.server.audit.recent(99)
    found = await report(world)
    assert [one.kind for one in found.drift] == [
        "memory_self_parent",
        "memory_without_audit",
        "memory_without_receipt",
        "receipt_without_memory_record",
    ]
    assert [check.name for check in found.checks if not check.passed] == [
        "memory_parents",
        "memory_audit",
        "memory_receipts",
    ]
    assert found.orphans_total == 3
    assert name(1) in found.drift[0].repair
    # It looks, and nothing else.
    assert await world.server.audit.recent(99) == before
    assert (await report(world, window=0)).drift == ()


async def test_everybody_but_operator_sees_drift_in_its_own(world: World) -> None:
    await world.server.memory.put(record(1, "", owner=ALICE))
    await world.server.memory.put(record(2, "", owner=BOB))
    await world.server.receipts.append(receipt(3, memory=7, payer=BOB, settled_at=500))
    alice = await world.granted(ALICE)
    found = await report(world, caller=alice)
    assert {one.id for one in found.drift} == {name(1)}
    assert {one.id for one in (await report(world)).drift} >= {name(1), name(2)}


async def test_what_others_do_neither_hides_nor_crowds_out_what_is_wrong_with_one_s_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consistency, "MAX_LOG", 3)
    alice = await world.granted(ALICE)
    await world.server.memory.put(record(1, owner=ALICE))
    written = {"memory_id": name(7), "tier": "working", "reason": "client", "text_hash_hex": "ab" * 32}
    await world.server.audit.append("memory_written", written, ALICE)
    # Bob may purge his own, and says so in the log as often as he likes.
    purged = {"tier": None, "before_ms": world.clock.at_ms + 10**9, "purged": 0}
    for _ in range(5):
        await world.server.audit.append("memory_purged", purged, BOB)
    for caller in (alice, world.operator):
        kinds = {one.kind for one in (await report(world, caller=caller)).drift}
        # The operator looks at everybody's rows, of which there are too many here to judge what is older.
        assert ("memory_without_audit" in kinds) == (caller is alice)
    monkeypatch.setattr(consistency, "MAX_LOG", 1000)
    for caller in (alice, world.operator):
        kinds = {one.kind for one in (await report(world, caller=caller)).drift}
        assert kinds >= {"memory_without_audit", "audit_without_memory"}
    # The operator's purge is of everybody's.
    await world.server.audit.append("memory_purged", purged, world.operator.agent)
    for caller in (alice, world.operator):
        assert "audit_without_memory" not in {one.kind for one in (await report(world, caller=caller)).drift}


async def test_peers_look_one_after_other_and_operator_waits_for_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, most, go_on = 0, 0, anyio.Event()
    whole = consistency.gather

    async def gather(server: Server, caller: Caller, size: int) -> Window:
        nonlocal looks, most
        if caller.operator:
            return await whole(server, caller, size)
        looks += 1
        most = max(most, looks)
        await go_on.wait()
        looks -= 1
        return await whole(server, caller, size)

    async def look(caller: Caller) -> None:
        await report(world, caller=caller)

    monkeypatch.setattr(consistency, "gather", gather)
    peers = [await world.granted(one) for one in (ALICE, BOB)]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for caller in peers * 3:
                group.start_soon(look, caller)
            await anyio.wait_all_tasks_blocked()
            assert (await report(world)).window == 100
            assert looks == 1
            go_on.set()
    assert (looks, most) == (0, 1)


async def test_cycle_that_leaves_window_is_followed(world: World) -> None:
    for number, parent in ((1, 3), (2, 1), (3, 2)):
        await world.server.memory.put(record(number, owner=ALICE, parent=name(parent)))
    found = await report(world, window=1)
    assert ("memory_parent_cycle", name(3)) in [(one.kind, one.id) for one in found.drift]


async def test_rows_of_database_no_records_are_told(world: World, tmp_path: Path) -> None:
    path = tmp_path / "memory.db"
    async with opened("durable", path) as store:
        await store.put(record(1, owner=ALICE, embedding=(1.0,)))
        await store.put(record(2, owner=ALICE))
        with sqlite3.connect(path) as db:
            db.execute("UPDATE memories SET metadata = '{' WHERE id = ?", (name(1),))
            db.execute("UPDATE memories SET embedding = X'0000C07F' WHERE id = ?", (name(2),))
        db.close()
        world.server.memory = store
        found = await report(world)
        assert [(one.kind, one.id) for one in found.drift] == [
            ("memory_row_invalid", name(1)),
            ("memory_nan_embedding", name(2)),
        ]
        # The mend that is named works.
        operator = world.operator
        await world.granted(operator.agent, *ALL)
        for number in (1, 2):
            outcome = (await world.ask(operator, repair(parts.DeleteRecord(id=name(number))))).outcome
            assert outcome.changed
            assert outcome.before["problems"]
        kinds = {one.kind for one in (await report(world)).drift}
        assert kinds <= {"capability_without_audit"}


async def test_oldest_rows_are_not_judged_when_there_are_too_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consistency, "MAX_LOG", 2)
    await world.server.memory.put(record(1, owner=ALICE))
    await world.server.receipts.append(receipt(1, memory=1, payer=ALICE, settled_at=500))
    for _ in range(3):
        await world.server.audit.append("memory_purged", {"tier": None, "before_ms": 0, "purged": 0})
    assert (await report(world)).drift == ()
