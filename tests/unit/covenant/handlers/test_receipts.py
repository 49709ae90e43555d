"""Receipts over the wire: who sees which, how they are settled, and how receipts and records find each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.handlers import receipt_backfill, receipts
from covenant.handlers.caller import Caller
from covenant.handlers.intents import budget as budget_requests
from covenant.handlers.server import Server
from covenant.keys.identity import Identity
from covenant.providers.chain.interface import OffChain
from covenant.providers.chain.local_vm import LocalVm
from covenant.stores.capabilities.in_memory import InMemoryCapabilities
from covenant.stores.capabilities.interface import to_wire
from covenant.stores.memory import interface as memory_interface
from covenant.stores.settlement import durable, interface
from covenant.wire import requests, responses
from covenant.wire.types import AgentId, MemoryRecord, SettlementReceipt, Tier
from policy import base58, errors
from policy.audit_log import receipt_tree
from policy.capabilities.token import Token
from tests import server_kit
from tests.doubles.audit import InMemoryAudit

pytestmark = pytest.mark.anyio

ALICE = AgentId(display="alice@here", pubkey=base58.encode(b"\5" * 32))
BOB = AgentId(display="bob@here", pubkey=base58.encode(b"\6" * 32))


class Desk:
    """A server, its log and one caller to whom things are granted."""

    def __init__(self, server: Server, audit: InMemoryAudit) -> None:
        self.server = server
        self.audit = audit
        self.caller: Caller = server_kit.caller(ALICE)

    async def grant(self, action: str, **scope: Any) -> None:
        given = {"version": 1, **scope} if scope else {}
        token = Token(ALICE.pubkey, action, given, self.server.identity.agent.pubkey, None)
        signed = to_wire(token, self.server.identity.grant(token), ALICE.display, "operator@local")
        await self.server.capabilities.grant(signed, self.server.now_ms())

    async def fill(self, *payers: AgentId) -> list[SettlementReceipt]:
        made = [receipt(number, payer) for number, payer in enumerate(payers)]
        for one in made:
            await self.server.receipts.append(one)
        return made

    async def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row.kind for row in await self.audit.recent(100) if row.kind["type"] == kind]


def receipt(number: int, payer: AgentId = ALICE, **more: Any) -> SettlementReceipt:
    fields: dict[str, Any] = {"resource": "compute", "credits_consumed": number + 1, "settled_at": number, **more}
    return SettlementReceipt(id=f"r{number}", payer=payer, **fields)


def record(name: str, owner: AgentId = ALICE, *, created_at: int = 1, **more: Any) -> MemoryRecord:
    return MemoryRecord(
        id=name, tier=Tier.WORKING, owner=owner, text=more.pop("text", "text"), created_at=created_at, **more
    )


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Desk]:
    def made(**given: Any) -> Desk:
        clock = server_kit.Clock()
        identity = Identity(b"\7" * 32)
        audit = InMemoryAudit(issuer=identity.agent, now_ms=clock)
        capabilities = InMemoryCapabilities(identity.agent.pubkey)
        fields = {"identity": identity, "audit": audit, "capabilities": capabilities, **given}
        return Desk(server_kit.make(home=tmp_path, now_ms=clock, **fields), audit)

    return made


@pytest.fixture
def desk(make: Callable[..., Desk]) -> Desk:
    return make()


async def test_without_grant_nothing_is_shown_or_settled(desk: Desk) -> None:
    await desk.fill(ALICE)
    for asked in (
        requests.RecentReceipts(),
        requests.ReceiptBatches(limit=1),
        requests.FlushReceipts(limit=1),
        requests.BackfillSettlementReceipts(dry_run=True),
        requests.BackfillSettlementReceipts(dry_run=False),
    ):
        with pytest.raises(errors.CapabilityMissingError):
            await receipts.HANDLERS[asked.kind](desk.server, desk.caller, asked)
    checks = await desk.rows("capability_check")
    assert [row["required_actions"][0] for row in reversed(checks)] == [
        "chain.receipts",
        "chain.batches",
        "chain.flush",
        "settlement.backfill.dry_run",
        "settlement.backfill.apply",
    ]
    assert not any(row["passed"] for row in checks)


async def test_receipts_are_shown_newest_first(desk: Desk) -> None:
    made = await desk.fill(ALICE, BOB, ALICE)
    await desk.grant("chain.receipts")
    shown = await receipts.recent_receipts(desk.server, desk.caller, requests.RecentReceipts(limit=2))
    assert shown.receipts == (made[2], made[1])
    later = await receipts.recent_receipts(desk.server, desk.caller, requests.RecentReceipts(since_ms=2))
    assert later.receipts == (made[2],)


@pytest.mark.parametrize(
    ("scope", "numbers"),
    [
        ({"payer_pubkey_b58": BOB.pubkey}, [3, 1]),
        ({"resource": "memory"}, [3, 2]),
        ({"resource": "memory", "payer_pubkey_b58": ALICE.pubkey}, [2]),
        ({"resource": "tool"}, []),
        ({"cluster": "litesvm"}, []),
        ({"limit": 4}, [3, 2, 1, 0]),
    ],
)
async def test_scope_lets_only_what_it_names_be_seen(desk: Desk, scope: dict[str, Any], numbers: list[int]) -> None:
    made = await desk.fill(ALICE, BOB)
    made += [receipt(2, ALICE, resource="memory"), receipt(3, BOB, resource="memory")]
    for one in made[2:]:
        await desk.server.receipts.append(one)
    await desk.grant("chain.receipts", **scope)
    shown = await receipts.recent_receipts(desk.server, desk.caller, requests.RecentReceipts(limit=4))
    assert [one.id for one in shown.receipts] == [f"r{number}" for number in numbers]
    assert (await desk.rows("capability_check"))[0]["passed"]


async def test_scope_that_cannot_be_met_refuses(desk: Desk) -> None:
    await desk.fill(ALICE)
    await desk.grant("chain.receipts", limit=3)
    await desk.grant("chain.batches", payer_pubkey_b58=ALICE.pubkey)
    await desk.grant("chain.flush", batch_id="ab")
    with pytest.raises(errors.CapabilityScopeError):
        await receipts.recent_receipts(desk.server, desk.caller, requests.RecentReceipts(limit=4))
    with pytest.raises(errors.CapabilityScopeError):
        await receipts.receipt_batches(desk.server, desk.caller, requests.ReceiptBatches(limit=1))
    with pytest.raises(errors.CapabilityScopeError):
        await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=1))
    assert len(await desk.rows("capability_scope_rejected")) == 3
    assert len(await desk.server.receipts.unsettled(9)) == 1


async def test_widest_grant_counts(desk: Desk) -> None:
    made = await desk.fill(ALICE, BOB)
    await desk.grant("chain.receipts", payer_pubkey_b58=BOB.pubkey)
    await desk.grant("chain.receipts")
    shown = await receipts.recent_receipts(desk.server, desk.caller, requests.RecentReceipts())
    assert shown.receipts == (made[1], made[0])


async def test_flush_is_off_chain_by_default_and_its_root_is_in_log(desk: Desk) -> None:
    made = await desk.fill(ALICE, BOB, ALICE)
    await desk.grant("chain.flush")
    await desk.grant("chain.batches")
    flushed = await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=2))
    root = receipt_tree.root([interface.leaf(one).digest() for one in made[:2]])
    assert flushed.receipts_updated == flushed.batch.receipt_count == 2
    assert flushed.batch.merkle_root == root.hex()
    assert (flushed.batch.tx_sig, flushed.batch.slot) == (None, None)
    (row,) = await desk.rows("receipts_flushed")
    assert (row["merkle_root_hex"], row["credits"], row["tx_sig"]) == (root.hex(), 3, None)
    second = await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=2))
    listed = await receipts.receipt_batches(desk.server, desk.caller, requests.ReceiptBatches(limit=9))
    assert listed.batches == (second.batch, flushed.batch)
    with pytest.raises(errors.NothingToSettleError):
        await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=2))
    with pytest.raises(errors.MalformedRequestError):
        await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=0))


async def test_flush_settles_what_its_scope_names(desk: Desk) -> None:
    made = await desk.fill(ALICE, BOB, BOB)
    await desk.grant("chain.flush", payer_pubkey_b58=BOB.pubkey)
    flushed = await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=9))
    assert flushed.receipts_updated == 2
    assert list(await desk.server.receipts.unsettled(9)) == [made[0]]


async def test_no_row_no_batch(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await desk.fill(ALICE)
    await desk.grant("chain.flush")
    write = desk.audit.append

    async def append(kind: str, fields: Any, issuer: AgentId | None = None) -> str:
        if kind == "receipts_flushed":
            raise errors.StoreFullError("no room")
        return await write(kind, fields, issuer)

    monkeypatch.setattr(desk.audit, "append", append)
    with pytest.raises(errors.StoreFullError):
        await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=1))
    assert list(await desk.server.receipts.unsettled(9)) == made


async def test_batches_are_shown_as_far_as_scope_goes(make: Callable[..., Desk]) -> None:
    desk = make(chain=LocalVm(b"\1" * 32))
    await desk.fill(ALICE, ALICE)
    await desk.grant("chain.flush", cluster="litesvm")
    first = await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=1))
    desk.server.chain = OffChain()
    with pytest.raises(errors.CapabilityScopeError):
        await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=1))
    await desk.grant("chain.flush")
    second = await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=1))
    await desk.grant("chain.batches", cluster="litesvm")
    shown = await receipts.receipt_batches(desk.server, desk.caller, requests.ReceiptBatches(limit=9))
    assert shown.batches == (first.batch,)
    await desk.grant("chain.batches")
    both = await receipts.receipt_batches(desk.server, desk.caller, requests.ReceiptBatches(limit=9))
    assert both.batches == (second.batch, first.batch)


async def test_chain_ready_keeps_root_and_receipts_say_where(make: Callable[..., Desk]) -> None:
    desk = make(chain=LocalVm(b"\1" * 32))
    await desk.fill(ALICE, BOB)
    await desk.grant("chain.flush")
    flushed = await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=9))
    assert flushed.batch.tx_sig is not None
    assert flushed.batch.slot is not None
    settled = await desk.server.receipts.get("r1")
    assert settled is not None
    assert settled.tx_sig == settled.onchain_sig == flushed.batch.tx_sig
    assert (settled.chain, settled.cluster) == ("solana", "litesvm")
    assert settled.confirmed_at == desk.server.now_ms()
    anchored, made = await desk.rows("receipts_flushed")
    assert (made["tx_sig"], made["credits"]) == (None, 3)
    assert (anchored["tx_sig"], anchored["slot"]) == (flushed.batch.tx_sig, flushed.batch.slot)


async def test_batch_that_chain_did_not_take_is_anchored_by_next_flush(make: Callable[..., Desk]) -> None:
    class Refusing(LocalVm):
        async def anchor(self, batch: interface.Batch, *, now_ms: int) -> interface.Anchor:
            raise errors.ChainError("the node did not answer", hint="look")

    desk = make(chain=Refusing(b"\1" * 32))
    await desk.fill(ALICE, BOB)
    await desk.grant("chain.flush")
    with pytest.raises(errors.ChainError) as refused:
        await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=1))
    assert refused.value.hint == "the batch is made off-chain; the next flush anchors it (look)"
    (waiting,) = await desk.server.receipts.unconfirmed(9)
    desk.server.chain = LocalVm(b"\1" * 32)
    again = await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=1))
    assert again.batch.batch_id == waiting.batch_id
    assert again.batch.tx_sig is not None
    assert len(await desk.server.receipts.unsettled(9)) == 1
    other = await receipts.flush_receipts(desk.server, desk.caller, requests.FlushReceipts(limit=1))
    assert other.batch.batch_id != waiting.batch_id


async def test_status_of_chain_is_for_everybody(desk: Desk) -> None:
    shown = await receipts.chain_status(desk.server, desk.caller, requests.ChainStatus())
    assert not shown.status.ready
    assert "signer" in shown.status.missing
    assert await desk.rows("capability_check") == []


async def _debits(desk: Desk, caller: Caller) -> list[tuple[AgentId, int, str]]:
    shown = await budget_requests.recent_debits(desk.server, caller, requests.RecentDebits(limit=5))
    assert isinstance(shown, responses.Debits)
    return [(one.agent, one.credits, one.paired_receipt) for one in shown.debits]


async def test_debits_are_for_whose_they_are_and_compaction_has_its_row(desk: Desk) -> None:
    agent = AgentId(display="a@agent", pubkey=base58.encode(b"\7" * 32))
    await desk.server.budget.set_capacity(agent, 5)
    await desk.server.budget.try_debit(agent, 2, "r", submitter=BOB)
    assert await _debits(desk, desk.caller) == []
    operator = Caller(agent=desk.server.identity.agent, operator=True, token_prefix="o" * 6, transport="ipc")
    for allowed in (server_kit.caller(BOB), server_kit.caller(agent), operator):
        assert await _debits(desk, allowed) == [(agent, 2, "r")]
    assert (await budget_requests.compact(desk.server, 1)).dropped == 0
    assert await desk.rows("budget_compacted") == []
    after = desk.server.now_ms() + 1
    assert (await budget_requests.compact(desk.server, after)).dropped == 1
    assert (await desk.rows("budget_compacted"))[0]["before_ms"] == after


class _Enough(Exception):
    pass


async def test_upkeep_drops_what_is_old_and_goes_on_when_it_cannot(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.server.budget.set_capacity(BOB, 5)
    await desk.server.budget.try_debit(BOB, 1, "old")
    clock = desk.server.now_ms
    assert isinstance(clock, server_kit.Clock)
    clock.at_ms += budget_requests.KEPT_MS + 1
    await desk.server.budget.try_debit(BOB, 1, "new")
    days = []

    async def day(seconds: float) -> None:
        days.append([one.paired_receipt for one in await desk.server.budget.recent(9)])
        if len(days) == 3:
            raise _Enough

    real, calls = desk.server.budget.compact, []

    async def compact(before_ms: int) -> Any:
        calls.append(before_ms)
        if len(calls) == 1:
            raise errors.StoreFullError("no room")
        return await real(before_ms)

    monkeypatch.setattr(desk.server.budget, "compact", compact)
    monkeypatch.setattr(anyio, "sleep", day)
    with pytest.raises(_Enough):
        await budget_requests.upkeep(desk.server)
    assert days == [["new", "old"], ["new"], ["new"]]
    assert calls == [server_kit.NOW_MS + 1] * 3


# --- backfill ----------------------------------------------------------------------------------------------------


def test_backfill_believes_both_sides_and_nothing_else() -> None:
    records = [
        memory_interface.Payable("said", ALICE.pubkey, 5, "r1"),
        memory_interface.Payable("first", ALICE.pubkey, 1),
        memory_interface.Payable("later", ALICE.pubkey, 9),
        memory_interface.Payable("of-bob", BOB.pubkey, 1),
        memory_interface.Payable("lies", BOB.pubkey, 1, "r2"),
        memory_interface.Payable("named", ALICE.pubkey, 1),
    ]
    memory: dict[str, Any] = {"resource": "memory"}
    found = receipt_backfill.plan(
        records,
        [
            receipt(1, **memory),
            receipt(2, **memory),
            receipt(3, **memory, batch_id="ab"),
            receipt(4),
            receipt(5, **memory, memory_record_id="named"),
        ],
    )
    # r2 is Alice's, and a record of Bob's that names it gets one of its own. r3 pays for her first record and is in a
    # batch, which commits to it as it is.
    assert {one.id: one.memory_record_id for one in found.changed} == {"r1": "said"}
    assert found.missing == ("lies", "of-bob", "later")


async def test_backfill_counts_dry_and_changes_applied(make: Callable[..., Desk], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "receipts" / "working.jsonl"
    desk = make(receipts=await durable.DurableReceipts.open(path))
    server = desk.server
    await server.memory.put(record("old", created_at=3))
    await server.memory.put(record("new", BOB, created_at=4, text="x" * 1500))
    await server.receipts.append(receipt(9, resource="memory", settled_at=5))
    before = path.read_bytes()
    await desk.grant("settlement.backfill.dry_run")
    await desk.grant("settlement.backfill.apply")
    dry = requests.BackfillSettlementReceipts(dry_run=True)
    counted = await receipt_backfill.backfill_settlement_receipts(server, desk.caller, dry)
    assert (counted.row_count, counted.rollback_path, counted.dry_run) == (2, None, True)
    assert path.read_bytes() == before
    alices = requests.BackfillSettlementReceipts(dry_run=True, scope_pubkey=ALICE.pubkey)
    assert (await receipt_backfill.backfill_settlement_receipts(server, desk.caller, alices)).row_count == 1
    wet = requests.BackfillSettlementReceipts(dry_run=False)
    applied = await receipt_backfill.backfill_settlement_receipts(server, desk.caller, wet)
    assert applied.row_count == 2
    assert applied.rollback_path is not None
    assert Path(applied.rollback_path).read_bytes() == before
    paired = await server.receipts.get("r9")
    assert paired is not None
    assert paired.memory_record_id == "old"
    (made,) = [one for one in await server.receipts.recent(9) if one.id != "r9"]
    assert (made.payer, made.memory_record_id, made.credits_consumed) == (BOB, "new", 2)
    assert made.settled_at == server.now_ms()
    again = await receipt_backfill.backfill_settlement_receipts(server, desk.caller, wet)
    assert (again.row_count, again.rollback_path) == (0, None)
    rows = await desk.rows("settlement_receipt_backfill_applied")
    assert [row["row_count"] for row in rows] == [0, 2, 1, 2]
    assert rows[1]["rollback_path"] == applied.rollback_path
    assert json.loads(path.read_bytes().splitlines()[0])["memory_record_id"] == "old"
    await server.receipts.close()
