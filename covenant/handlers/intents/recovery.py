"""What a daemon that died left: every intent that had its reservation gets its row, whatever became of it.

A reservation is settled when all else of its intent is on the disk. So one that is open at the start is of an intent of
which something may be missing:

    its row is in the log          it was done or it failed, and was not settled
    its answer is in memory        it was done; its rows are written now
    neither                        it failed: its run ended with the connections of the daemon that asked for it
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, Final

from covenant.handlers import billing
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.stores.audit.interface import Entry
from covenant.stores.budget.interface import Reservation
from covenant.wire import parts
from covenant.wire.types import MemoryRecord
from policy import errors

# So many receipts are looked through for that of a record.
_MOST_RECEIPTS: Final = 100_000
_ENDS: Final = frozenset({"intent_dispatched", "intent_failed"})


async def look(server: Server) -> None:
    """At the start: what became of each intent that was not settled, written down, and settled by its receipt.

    Raises:
        errors.StoreError: it could not be written; the next start looks again.
    """
    waiting = server.budget.unsettled()
    if not waiting:
        return
    ended = await told(server, {one.paired_receipt: one.at_ms for one in waiting})
    for one in waiting:
        receipt = await server.receipts.get(one.paired_receipt)
        if one.paired_receipt not in ended:
            rows = [] if receipt is None else [billing.receipt_row(receipt, one.paired_receipt)]
            record = await server.memory.get(one.paired_receipt)
            if record is None or not await finish(server, record, rows):
                await server.audit.append_all([*rows, _failed(server, one)])
        reserved = billing.Reserved(one.agent, one.credits)
        await billing.settle(server, reserved, one.paired_receipt, receipt)


async def finish(server: Server, record: MemoryRecord, rows: Collection[Entry] = ()) -> bool:
    """Write what a daemon that died between an answer's record and its row left out: no answer is without its row.
    False, and nothing is done, where the record is no intent's answer."""
    known: dict[str, Any] = record.metadata if isinstance(record.metadata, dict) else {}
    if not isinstance(known.get("intent_text"), str):
        return False
    missing, since_ms = list(rows), record.created_at
    receipts = await server.receipts.recent(_MOST_RECEIPTS, since_ms)
    if not any(receipt.memory_record_id == record.id for receipt in receipts):
        owner = Caller(agent=record.owner, operator=False, token_prefix="", transport="ipc")
        receipt = await billing.settle_memory(server, owner, record.id, record.text)
        missing.append(billing.receipt_row(receipt, record.id))

    def is_its(row: parts.AuditEvent) -> bool:
        return bool(row.kind["type"] == "intent_dispatched" and row.kind["intent_id"] == record.id)

    found = await server.audit.scan(is_its, 1, since_ms=since_ms, issuer_pubkey=record.owner.pubkey)
    if not found.events:
        dispatched = {
            "run_id": known.get("run_id"),
            "intent_id": record.id,
            "intent_text": known["intent_text"],
            "matched_agent": known.get("agent_id"),
            "result_hash_hex": hashlib.sha256(record.text.encode()).hexdigest(),
            "status": "ok",
        }
        missing.append(Entry("intent_dispatched", dispatched, record.owner))
    if missing:
        await server.audit.append_all(missing)
    return True


async def told(server: Server, since_ms: Mapping[str, int]) -> set[str]:
    """Which of these intents have the row that says how they ended, since they had their reservation: under a key one
    may have failed before.

    Raises:
        errors.StoreError: the log was not looked through to its end; of one that is not told nothing is known then.
    """
    ended: set[str] = set()

    def is_the_last(row: parts.AuditEvent) -> bool:
        if row.kind["type"] not in _ENDS:
            return False
        began_ms = since_ms.get(row.kind["intent_id"])
        if began_ms is not None and row.timestamp_ms >= began_ms:
            ended.add(str(row.kind["intent_id"]))
        return len(ended) == len(since_ms)

    # Nothing is wanted but the names: rows may be as long as intents, and a look that holds them all is cut.
    found = await server.audit.scan(is_the_last, 1, since_ms=min(since_ms.values()))
    if found.cut and not found.events:
        raise errors.StoreError("the log could not be looked through", hint="start again")
    return ended


def _failed(server: Server, one: Reservation) -> Entry:
    by_nobody = one.agent.pubkey == server.identity.agent.pubkey
    row = {
        "intent_id": one.paired_receipt,
        "matched_agent": None if by_nobody else one.agent.display.removesuffix("@agent"),
        "run_id": None,
        "stage": "run",
        "code": errors.CutOffError.code,
        "message": "the daemon ended while it ran",
    }
    return Entry("intent_failed", row, one.submitter)
