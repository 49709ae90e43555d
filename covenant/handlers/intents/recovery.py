"""Recover the intents of a daemon that died: every intent with a reservation gets its final row.

A reservation is settled after all other data of its intent is on disk. So an open reservation at the start belongs to
an intent whose data may be incomplete:

    its row is in the log          it succeeded or failed, and was not settled
    its answer is in memory        it succeeded; its rows are written now
    neither                        it failed: its run ended with the connections of the daemon that asked for it
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, Final

from covenant.handlers import billing
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.stores.audit.interface import AuditEntry
from covenant.stores.budget.interface import Reservation
from covenant.wire import parts
from covenant.wire.types import MemoryRecord
from policy import errors

# The most receipts that are searched for a record's receipt.
_MOST_RECEIPTS: Final = 100_000
_ENDS: Final = frozenset({"intent_dispatched", "intent_failed"})


async def recover_open_intents(server: Server) -> None:
    """At the start: write the outcome of each intent that was not settled, and settle it by its receipt.

    Raises:
        errors.StoreError: it could not be written; the next start tries again.
    """
    waiting = server.budget.unsettled()
    if not waiting:
        return
    ended = await written_ends(server, {one.paired_receipt: one.at_ms for one in waiting})
    for one in waiting:
        receipt = await server.receipts.get(one.paired_receipt)
        if one.paired_receipt not in ended:
            rows = [] if receipt is None else [billing.receipt_row(receipt, one.paired_receipt)]
            record = await server.memory.get(one.paired_receipt)
            if record is None or not await finish(server, record, rows):
                await server.audit.append_all([*rows, _failed(server, one)])
        reserved = billing.Reserved(one.agent, one.credits)
        await billing.settle(server, reserved, one.paired_receipt, receipt)


async def finish(server: Server, record: MemoryRecord, rows: Collection[AuditEntry] = ()) -> bool:
    """Write the rows that a daemon left out when it died between writing an answer's record and its row.

    Returns False without any effect if the record is not the answer of an intent.
    """
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
        missing.append(AuditEntry("intent_dispatched", dispatched, record.owner))
    if missing:
        await server.audit.append_all(missing)
    return True


async def written_ends(server: Server, since_ms: Mapping[str, int]) -> set[str]:
    """Return the intents that have a final row since their reservation: an earlier try under the same key may have
    failed.

    Raises:
        errors.StoreError: the log was not read to its end, so the result would be incomplete.
    """
    ended: set[str] = set()

    def is_the_last(row: parts.AuditEvent) -> bool:
        if row.kind["type"] not in _ENDS:
            return False
        began_ms = since_ms.get(row.kind["intent_id"])
        if began_ms is not None and row.timestamp_ms >= began_ms:
            ended.add(str(row.kind["intent_id"]))
        return len(ended) == len(since_ms)

    # Only the ids are needed: rows may be as long as intents, and a scan that holds them all is cut off.
    found = await server.audit.scan(is_the_last, 1, since_ms=min(since_ms.values()))
    if found.cut and not found.events:
        raise errors.StoreError("the log could not be looked through", hint="start again")
    return ended


def _failed(server: Server, one: Reservation) -> AuditEntry:
    by_nobody = one.agent.pubkey == server.identity.agent.pubkey
    row = {
        "intent_id": one.paired_receipt,
        "matched_agent": None if by_nobody else one.agent.display.removesuffix("@agent"),
        "run_id": None,
        "stage": "run",
        "code": errors.CutOffError.code,
        "message": "the daemon ended while it ran",
    }
    return AuditEntry("intent_failed", row, one.submitter)
