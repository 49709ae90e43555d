"""Memory over the wire: who may, who sees what, and which rows tell of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant.handlers import paging
from covenant.handlers.caller import Caller
from covenant.handlers.memory import maintenance, records
from covenant.handlers.server import Server
from covenant.handlers.state.ignore_rules import IgnoreSet
from covenant.keys.identity import Identity
from covenant.providers.embed.hashed import HashEmbedder
from covenant.stores.capabilities.in_memory import InMemoryCapabilities
from covenant.stores.capabilities.interface import to_wire
from covenant.wire import parts, requests
from covenant.wire.types import AgentId, MemoryRecord, Tier
from policy import base58, errors
from policy.capabilities.token import Token
from tests import server_kit
from tests.doubles.audit import InMemoryAudit
from tests.memory_kit import name, receipt, record

pytestmark = pytest.mark.anyio

ALICE = AgentId(display="alice@local", pubkey=base58.encode(b"a" * 32))
BOB = AgentId(display="bob@local", pubkey=base58.encode(b"b" * 32))
ALL = (  # noqa: SIM905 - as a list these are nine lines
    "memory.read memory.write memory.purge memory.repair.dry_run memory.repair.apply memory.compact.dry_run "
    "memory.compact.apply memory.backfill.dry_run memory.backfill.apply"
).split()


class World:
    """A server, and callers with what they were granted."""

    def __init__(self, home: Path) -> None:
        self.clock = server_kit.Clock(1000)
        self.identity = Identity(b"i" * 32)
        self.server: Server = server_kit.make(
            home=home,
            now_ms=self.clock,
            identity=self.identity,
            audit=InMemoryAudit(issuer=self.identity.agent, now_ms=self.clock),
            capabilities=InMemoryCapabilities(self.identity.agent.pubkey),
            embedder=HashEmbedder(),
            ignore=IgnoreSet.of("**/.env", "top secret"),
        )
        self.operator = server_kit.caller(self.identity.agent, operator=True)

    async def granted(self, agent: AgentId, *actions: str, scope: Any = None) -> Caller:
        for action in actions:
            token = Token(agent.pubkey, action, scope or {}, self.identity.agent.pubkey, None)
            signed = to_wire(token, self.identity.grant(token), agent.display, self.identity.agent.display)
            await self.server.capabilities.grant(signed, self.clock())
        return server_kit.caller(agent)

    async def ask(self, caller: Caller, request: requests.Request) -> Any:
        return await self.server.handlers[request.kind](self.server, caller, request)

    async def rows(self, *kinds: str) -> list[dict[str, Any]]:
        events = await self.server.audit.recent(1000)
        return [event.kind for event in reversed(events) if event.kind["type"] in kinds]


@pytest.fixture
def world(covenant_home: Path) -> World:
    return World(covenant_home)


def repair(command: Any, *, mode: Any = "apply", reason: str = "because") -> requests.RepairMemory:
    return requests.RepairMemory(request=parts.MemoryRepairOrder(mode=mode, command=command, reason=reason))


def compact(*, mode: Any = "apply", reason: str = "because", **policy: Any) -> requests.CompactMemory:
    order = parts.MemoryCompactionOrder(mode=mode, policy=parts.CompactionPolicy(**policy), reason=reason)
    return requests.CompactMemory(request=order)


REQUESTS: list[requests.Request] = [
    requests.RecentMemory(),
    requests.SearchMemory(query="x"),
    requests.PurgeMemory(before_ms=1),
    repair(parts.DeleteRecord(id=name(1))),
    repair(parts.DeleteRecord(id=name(1)), mode="dry_run"),
    compact(delete_working_before_ms=5),
    requests.PutMemory(tier=Tier.WORKING, text="x"),
    requests.PromoteMemory(id=name(1), tier=Tier.LONGTERM),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.kind)
async def test_without_grant_nothing_happens_and_row_says_so(world: World, request_: requests.Request) -> None:
    await world.server.memory.put(record(1, owner=ALICE))
    for caller in (server_kit.caller(ALICE), world.operator):
        with pytest.raises(errors.CapabilityMissingError):
            await world.ask(caller, request_)
    assert await world.server.memory.recent(None, 10) == [record(1, owner=ALICE)]
    checks = await world.rows("capability_check")
    assert [check["passed"] for check in checks] == [False, False]
    assert len(await world.server.audit.recent(100)) == 2


async def test_everybody_sees_its_own_records_and_operator_all(world: World) -> None:
    await world.server.memory.put(record(1, "a fox", owner=ALICE))
    await world.server.memory.put(record(2, "a fox", owner=BOB))
    alice = await world.granted(ALICE, *ALL)
    operator = await world.granted(world.identity.agent, *ALL)
    for request_ in (requests.RecentMemory(), requests.SearchMemory(query="fox")):
        assert [r.id for r in (await world.ask(alice, request_)).records] == [name(1)]
        everything = await world.ask(world.operator, request_)
        assert {r.id for r in everything.records} == {name(1), name(2)}
        # The operator's key over another transport is the operator; a caller that merely has the grants is not.
        assert {r.id for r in (await world.ask(operator, request_)).records} == set()
    for command in (parts.DeleteRecord(id=name(2)), parts.DeleteRecord(id=name(3))):
        with pytest.raises(errors.NoMemoryError, match=command.id):
            await world.ask(alice, repair(command))
    with pytest.raises(errors.NoMemoryError):
        await world.ask(alice, requests.PromoteMemory(id=name(2), tier=Tier.LONGTERM))
    with pytest.raises(errors.NoMemoryError):
        await world.ask(alice, requests.PutMemory(tier=Tier.WORKING, text="x", parent=name(2)))
    assert (await world.ask(alice, requests.PurgeMemory(before_ms=99))).purged == 1
    assert (await world.ask(alice, compact(delete_working_before_ms=99))).outcome.deleted == ()
    assert [r.id for r in await world.server.memory.recent(None, 9)] == [name(2)]


@pytest.mark.parametrize(
    ("scope", "seen"),
    [
        ({"version": 1, "tiers": ["working"]}, {1, 2}),
        ({"version": 1, "record_id": name(3)}, {3}),
        ({"version": 1, "before_ms": 2}, {1}),
        ({"version": 1, "apply": False}, {1, 2, 3}),
    ],
)
async def test_read_shows_what_its_scope_admits(world: World, scope: Any, seen: set[int]) -> None:
    for number in (1, 2, 3):
        tier = Tier.EPISODIC if number == 3 else Tier.WORKING
        await world.server.memory.put(record(number, "fox", owner=ALICE, tier=tier))
    alice = await world.granted(ALICE, "memory.read", scope=scope)
    for request_ in (requests.RecentMemory(limit=10), requests.SearchMemory(query="fox")):
        assert {r.created_at for r in (await world.ask(alice, request_)).records} == seen
    (newest,) = (await world.ask(alice, requests.RecentMemory(limit=1))).records
    assert newest.created_at == max(seen)


async def test_grant_for_one_tier_reads_that_tier(world: World) -> None:
    await world.server.memory.put(record(1, owner=ALICE, tier=Tier.EPISODIC))
    alice = await world.granted(ALICE, "memory.read.episodic")
    assert len((await world.ask(alice, requests.RecentMemory(tier=Tier.EPISODIC))).records) == 1
    for tier in (None, Tier.WORKING):
        with pytest.raises(errors.CapabilityMissingError):
            await world.ask(alice, requests.RecentMemory(tier=tier))


async def test_answer_is_cut_where_frame_would_not_take_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_ANSWER_BYTES", 3000)
    for number in (1, 2, 3):
        await world.server.memory.put(record(number, "x" * 1000, owner=ALICE))
    alice = await world.granted(ALICE, "memory.read")
    assert [r.created_at for r in (await world.ask(alice, requests.RecentMemory())).records] == [3, 2]
    monkeypatch.setattr(records, "MAX_RECORDS", 1)
    assert [r.created_at for r in (await world.ask(alice, requests.RecentMemory(limit=50))).records] == [3]


# Writing ------------------------------------------------------------------------------------------------------


async def test_client_writes_record_found_paid_for_and_told_of(world: World) -> None:
    alice = await world.granted(ALICE, *ALL)
    with world.server.feed.subscribe("memory") as live:
        stored = (
            await world.ask(alice, requests.PutMemory(tier=Tier.EPISODIC, text="The red fox", metadata={"k": 1}))
        ).record
        item = await live.receive()
    assert item is not None
    assert item.value == stored
    assert isinstance(stored, MemoryRecord)
    assert (stored.owner, stored.tier, stored.metadata, stored.created_at) == (ALICE, Tier.EPISODIC, {"k": 1}, 1000)
    assert len(stored.embedding) == 384
    (found,) = (await world.ask(alice, requests.SearchMemory(query="red foxes", min_relevance=0.2))).records
    assert found.id == stored.id
    (paid,) = await world.server.receipts.recent(10)
    assert (paid.memory_record_id, paid.payer, paid.resource) == (stored.id, ALICE, "memory")
    (written,) = await world.rows("memory_written")
    assert (written["memory_id"], written["reason"]) == (stored.id, "client")
    (told,) = await world.rows("receipt_written")
    assert (told["receipt_id"], told["credits"]) == (paid.id, paid.credits_consumed)
    assert "fox" not in str(await world.server.audit.recent(100))
    child = await world.ask(alice, requests.PutMemory(tier=Tier.WORKING, text="after", parent=stored.id))
    assert child.record.parent == stored.id


@pytest.mark.parametrize(
    ("text", "metadata", "error"),
    [
        ("read /x/.env", None, errors.TextIgnoredError),
        ("fine", {"a": ["the top secret plan"]}, errors.TextIgnoredError),
        ("  ", None, errors.MemoryInvalidError),
        ("x" * (records.MAX_TEXT_BYTES + 1), None, errors.MemoryInvalidError),
        ("half \ud800", None, errors.MemoryInvalidError),
        # On the wire each takes six bytes: no answer could carry it.
        ("\x01" * (records.MAX_RECORD_BYTES // 6), None, errors.MemoryInvalidError),
        ("x" * records.MAX_TEXT_BYTES, {"y": "y" * records.MAX_TEXT_BYTES}, errors.MemoryInvalidError),
    ],
)
async def test_what_may_not_be_kept_is_not(world: World, text: str, metadata: Any, error: type[Exception]) -> None:
    alice = await world.granted(ALICE, *ALL)
    with pytest.raises(error):
        await world.ask(alice, requests.PutMemory(tier=Tier.WORKING, text=text, metadata=metadata))
    assert await world.server.memory.recent(None, 10) == []
    assert len(await world.rows("memory_write_ignored")) == (error is errors.TextIgnoredError)


async def test_without_embedder_words_are_found(world: World) -> None:
    class Broken(HashEmbedder):
        async def embed(self, text: str) -> tuple[float, ...]:
            raise errors.EmbedderError("embedder is away")

    world.server.embedder = Broken()
    alice = await world.granted(ALICE, *ALL)
    stored = (await world.ask(alice, requests.PutMemory(tier=Tier.WORKING, text="the fox"))).record
    assert stored.embedding == ()
    assert len((await world.ask(alice, requests.SearchMemory(query="fox"))).records) == 1


async def test_promotion_needs_both_tiers(world: World) -> None:
    await world.server.memory.put(record(1, owner=ALICE))
    narrow = await world.granted(ALICE, "memory.write", scope={"version": 1, "tiers": ["longterm"]})
    with pytest.raises(errors.CapabilityScopeError, match="working"):
        await world.ask(narrow, requests.PromoteMemory(id=name(1), tier=Tier.LONGTERM))
    alice = await world.granted(ALICE, "memory.write")
    for _ in range(2):
        done = await world.ask(alice, requests.PromoteMemory(id=name(1), tier=Tier.LONGTERM))
        assert done.record.tier == Tier.LONGTERM
    (row,) = await world.rows("memory_promoted")
    assert (row["from_tier"], row["to_tier"]) == ("working", "longterm")
    with pytest.raises(errors.MemoryConflictError):
        await world.ask(alice, requests.PromoteMemory(id=name(1), tier=Tier.EPISODIC))


# Maintenance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "request_", "passes"),
    [
        ({"tiers": ["working"]}, requests.PurgeMemory(tier=Tier.WORKING, before_ms=5), True),
        ({"tiers": ["working"]}, requests.PurgeMemory(before_ms=5), False),
        ({"tiers": ["working", "episodic", "longterm"]}, requests.PurgeMemory(before_ms=5), True),
        ({"before_ms": 4}, requests.PurgeMemory(before_ms=5), False),
        ({"before_ms": 5}, requests.PurgeMemory(before_ms=5), True),
        ({"apply": False}, requests.PurgeMemory(before_ms=5), False),
        ({"tiers": ["working"]}, compact(delete_working_before_ms=5), True),
        ({"tiers": ["working"]}, compact(delete_episodic_before_ms=5), False),
        ({"tiers": ["working"]}, compact(delete_working_before_ms=5, detach_stale_parents=True), False),
        ({"before_ms": 4}, compact(delete_working_before_ms=3, delete_episodic_before_ms=5), False),
        ({"before_ms": 5}, compact(delete_working_before_ms=3, delete_episodic_before_ms=5), True),
        ({"record_id": name(1)}, repair(parts.DetachParent(id=name(1))), True),
        ({"record_id": name(2)}, repair(parts.DetachParent(id=name(1))), False),
        ({"tiers": ["episodic"]}, repair(parts.DetachParent(id=name(1))), False),
        ({"before_ms": 1}, repair(parts.DetachParent(id=name(1))), False),
    ],
)
async def test_scopes_bound_maintenance(world: World, scope: Any, request_: requests.Request, passes: bool) -> None:
    await world.server.memory.put(record(1, owner=ALICE))
    alice = await world.granted(ALICE, *ALL, scope={"version": 1, **scope})
    if passes:
        await world.ask(alice, request_)
    else:
        with pytest.raises(errors.CapabilityScopeError):
            await world.ask(alice, request_)
        assert await world.server.memory.recent(None, 9) == [record(1, owner=ALICE)]
        assert len(await world.rows("capability_scope_rejected")) == 1


async def test_repair_shows_before_and_after_and_its_row_reason(world: World) -> None:
    given = record(1, owner=ALICE, parent=name(9), metadata={"a": 1})
    await world.server.memory.put(given)
    alice = await world.granted(ALICE, *ALL)
    command = parts.BackfillProvenance(id=name(1), provenance={"by": "x"})
    for mode in ("dry_run", "apply"):
        outcome = (await world.ask(alice, repair(command, mode=mode))).outcome
        assert outcome.before == given.model_dump(mode="json")
        assert outcome.after["metadata"] == {"a": 1, "provenance": {"by": "x"}}
        assert (outcome.would_change, outcome.changed) == (True, mode == "apply")
    rows = await world.rows("memory_repair_applied")
    assert [(r["mode"], r["changed"], r["reason"]) for r in rows] == [
        ("dry_run", False, "because"),
        ("apply", True, "because"),
    ]
    outcome = (await world.ask(alice, repair(parts.DeleteRecord(id=name(1))))).outcome
    assert outcome.after is None
    await world.server.memory.put(given)
    with pytest.raises(errors.MemoryConflictError):
        await world.ask(alice, repair(parts.DetachParent(id=name(1), expected_parent="other")))


async def test_record_is_shown_once_where_no_answer_takes_it_twice_and_does_not_outgrow_one(world: World) -> None:
    given = record(1, "x" * records.MAX_TEXT_BYTES, owner=ALICE, parent=name(9))
    await world.server.memory.put(given)
    alice = await world.granted(ALICE, *ALL)
    outcome = (await world.ask(alice, repair(parts.DetachParent(id=name(1))))).outcome
    assert (outcome.before, outcome.after["parent"], outcome.changed) == (None, None, True)
    too_much = parts.BackfillProvenance(
        id=name(1), provenance="y" * (records.MAX_RECORD_BYTES - records.MAX_TEXT_BYTES)
    )
    with pytest.raises(errors.MemoryInvalidError, match="on the wire"):
        await world.ask(alice, repair(too_much))
    kept = await world.server.memory.get(name(1))
    assert kept is not None
    assert kept.metadata is None


async def test_compaction_names_as_many_records_as_fit_and_counts_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "ROOM", 3 * 2 * (len(name(1)) + 3))
    for number in (1, 2, 3):
        await world.server.memory.put(record(number, owner=ALICE, created_at=number))
    alice = await world.granted(ALICE, *ALL)
    for mode in ("dry_run", "apply"):
        outcome = (await world.ask(alice, compact(mode=mode, delete_working_before_ms=10))).outcome
        assert (outcome.deleted, outcome.not_shown) == ((name(1), name(2)), 1)
    assert await world.server.memory.recent(None, 9) == []
    assert [row["deleted"] for row in await world.rows("memory_compaction_applied")] == [
        [name(1), name(2), name(3)]
    ] * 2


@pytest.mark.parametrize("reason", ["", " \n", "x" * 5000])
async def test_reason_is_mandatory(world: World, reason: str) -> None:
    alice = await world.granted(ALICE, *ALL)
    for request_ in (repair(parts.DeleteRecord(id=name(1)), reason=reason), compact(reason=reason)):
        with pytest.raises(errors.MemoryInvalidError, match="reason"):
            await world.ask(alice, request_)


async def test_empty_policy_is_refused(world: World) -> None:
    alice = await world.granted(ALICE, *ALL)
    with pytest.raises(errors.MemoryInvalidError, match="nothing"):
        await world.ask(alice, compact(marked_at_ms=4))


async def test_compaction_says_what_it_did_in_as_many_rows_as_it_takes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "IDS_IN_A_ROW", 2)
    for number in range(1, 6):
        await world.server.memory.put(record(number, owner=ALICE))
    await world.server.memory.put(record(6, owner=ALICE, tier=Tier.LONGTERM))
    alice = await world.granted(ALICE, *ALL)
    cuts: dict[str, Any] = {"delete_working_before_ms": 5, "mark_longterm_stale_before_ms": 9}
    dry = (await world.ask(alice, compact(mode="dry_run", **cuts))).outcome
    done = (await world.ask(alice, compact(**cuts))).outcome
    assert dry.model_dump(exclude={"mode", "changed"}) == done.model_dump(exclude={"mode", "changed"})
    assert (dry.changed, done.changed) == (False, True)
    assert (done.deleted, done.stale_marked) == (tuple(map(name, range(1, 5))), (name(6),))
    rows = [r for r in await world.rows("memory_compaction_applied") if r["changed"]]
    assert [r["deleted"] for r in rows] == [[name(1), name(2)], [name(3), name(4)]]
    assert [r["stale_marked"] for r in rows] == [[name(6)], []]


async def test_backfill_is_operators_and_for_everybody(world: World) -> None:
    await world.server.memory.put(record(1, owner=ALICE))
    await world.server.receipts.append(receipt(1, memory=1, payer=ALICE, settled_at=5))
    alice = await world.granted(ALICE, *ALL)
    with pytest.raises(errors.OperatorOnlyError):
        await world.ask(alice, requests.BackfillMemoryRecords(dry_run=True))
    await world.granted(world.identity.agent, *ALL)
    with pytest.raises(errors.MemoryInvalidError):
        await world.ask(world.operator, requests.BackfillMemoryRecords(dry_run=True, scope_pubkey=ALICE.pubkey))
    for dry_run, counted in ((True, 1), (False, 1), (False, 0)):
        answer = await world.ask(world.operator, requests.BackfillMemoryRecords(dry_run=dry_run))
        assert (answer.row_count, answer.savepoint_name) == (counted, "backfill_receipt_correlation")
    found = await world.server.memory.get(name(1))
    assert found is not None
    assert found.metadata == {"receipt_id": receipt(1, settled_at=5).id}
    assert len(await world.rows("memory_record_backfill_applied")) == 3
