"""Link receipts and records of memory that do not name each other: old ones, and those that a crash separated.

    (1) a receipt of memory that names no record, and is open, gets the record that it paid for: the one whose metadata
        names the receipt, else the first of its payer that existed then and has no receipt
    (2) a record that no receipt belongs to gets one, at the price of its text and with the time of the backfill

A settled receipt is unchanged: its batch commits to all its fields. The file is copied before any change.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import anyio.to_thread

from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.stores.memory import interface, plans
from covenant.wire import requests, responses
from covenant.wire.types import SettlementReceipt
from policy import budget
from policy.data import price_table

_ALL: Final = 2**62
# The same record gets the same receipt id in every backfill, so that an interrupted one can continue.
_NAMES: Final = uuid.UUID("b0a4d2a0-6d3c-5a51-8f0e-0f4f5d3f9a44")


@dataclass(frozen=True, slots=True)
class BackfillPlan:
    """Changed receipts, and the ids of records that get one."""

    changed: tuple[SettlementReceipt, ...]
    missing: tuple[str, ...]


def plan(records: Iterable[interface.Payable], receipts: Sequence[SettlementReceipt]) -> BackfillPlan:
    """Plan a backfill. It is computed from receipts and records alone; no input of the caller is trusted."""
    known = sorted(records, key=lambda record: (record.created_at, record.id))
    of_memory = {receipt.id: receipt for receipt in receipts if receipt.resource == "memory"}
    pairs = dict(plans.correlations(known, receipts))
    for record in known:
        said = of_memory.get(record.receipt or "")
        if said is not None and said.payer.pubkey == record.owner:
            pairs.setdefault(record.id, said.id)
    record_of = {receipt_id: record_id for record_id, receipt_id in pairs.items()}
    changed = tuple(
        receipt.model_copy(update={"memory_record_id": record_of[receipt.id]})
        for receipt in of_memory.values()
        if receipt.memory_record_id is None and receipt.batch_id is None and receipt.id in record_of
    )
    paid = {*pairs, *(one.memory_record_id for one in receipts if one.memory_record_id is not None)}
    return BackfillPlan(changed, tuple(record.id for record in known if record.id not in paid))


async def backfill_settlement_receipts(
    server: Server, caller: Caller, asked: requests.BackfillSettlementReceipts
) -> responses.SettlementReceiptsBackfilled:
    """Execute ``plan``, for all payers or for one; in a dry run only count."""
    action = f"settlement.backfill.{'dry_run' if asked.dry_run else 'apply'}"
    facts = authorization.RequestFacts(apply=not asked.dry_run)
    await authorization.require(server, caller, action, agent_id="settlement:backfill", facts=facts)
    async with server.receipts.flushing:
        whose = asked.scope_pubkey
        receipts = await server.receipts.recent(_ALL, keep=lambda one: whose is None or one.payer.pubkey == whose)
        records = await server.memory.payables(owner=whose)
        todo = await anyio.to_thread.run_sync(plan, records, receipts)
        now_ms = server.now_ms()
        copy = None if asked.dry_run or not todo.changed else server.receipts.copy_path(now_ms)
        count = len(todo.changed) + len(todo.missing)
        row = {"row_count": count, "rollback_path": copy, "dry_run": asked.dry_run}
        await server.audit.append("settlement_receipt_backfill_applied", row, issuer=caller.agent)
        if not asked.dry_run:
            if todo.changed:
                await server.receipts.revise(todo.changed, now_ms=now_ms)
            for record_id in todo.missing:
                await _write(server, record_id, now_ms)
    return responses.SettlementReceiptsBackfilled(row_count=count, rollback_path=copy, dry_run=asked.dry_run)


async def _write(server: Server, record_id: str, now_ms: int) -> None:
    record = await server.memory.get(record_id)
    if record is None:
        return  # deleted since it was planned
    name = hashlib.sha256(f"{record.owner.pubkey}\0{record.id}".encode()).hexdigest()
    await server.receipts.append(
        SettlementReceipt(
            id=str(uuid.uuid5(_NAMES, name)),
            payer=record.owner,
            resource="memory",
            memory_record_id=record.id,
            credits_consumed=budget.storage_cost(len(record.text.encode()), price_table.prices()),
            settled_at=max(now_ms, record.created_at),
        )
    )
