"""Memory, settlement and the audit log."""

from __future__ import annotations

from typing import Literal

from covenant.wire import parts
from covenant.wire.responses.base import Response
from covenant.wire.types import U64, MemoryRecord, SettlementReceipt

# Memory ---------------------------------------------------------------------------------------------------------


class Memories(Response):
    """To ``recent_memory`` and ``search_memory``."""

    kind: Literal["memories"] = "memories"
    records: tuple[MemoryRecord, ...]


class MemoryPurged(Response):
    """To ``purge_memory``."""

    kind: Literal["memory_purged"] = "memory_purged"
    purged: U64


class MemoryRepaired(Response):
    """To ``repair_memory``."""

    kind: Literal["memory_repaired"] = "memory_repaired"
    outcome: parts.MemoryRepairOutcome


class MemoryCompacted(Response):
    """To ``compact_memory``."""

    kind: Literal["memory_compacted"] = "memory_compacted"
    outcome: parts.MemoryCompactionOutcome


class MemoryRecordsBackfilled(Response):
    """To ``backfill_memory_records``."""

    kind: Literal["memory_records_backfilled"] = "memory_records_backfilled"
    row_count: U64
    savepoint_name: str
    dry_run: bool


class MemoryStored(Response):
    """Ours, to ``put_memory``."""

    kind: Literal["memory_stored"] = "memory_stored"
    record: MemoryRecord


class MemoryPromoted(Response):
    """Ours, to ``promote_memory``."""

    kind: Literal["memory_promoted"] = "memory_promoted"
    record: MemoryRecord


class VerifyReport(Response):
    """To ``verify``."""

    kind: Literal["verify_report"] = "verify_report"
    window: U64
    checks: tuple[parts.Check, ...]
    drift: tuple[parts.Drift, ...]
    orphans_total: U64


class IgnoreReport(Response):
    """To ``ignore_check``."""

    kind: Literal["ignore_report"] = "ignore_report"
    ignored: bool
    matched_pattern: str | None = None
    rules_loaded: U64


# Settlement -----------------------------------------------------------------------------------------------------


class ReceiptListing(Response):
    """To ``recent_receipts``."""

    kind: Literal["receipts"] = "receipts"
    receipts: tuple[SettlementReceipt, ...]


class SettlementReceiptsBackfilled(Response):
    """To ``backfill_settlement_receipts``."""

    kind: Literal["settlement_receipts_backfilled"] = "settlement_receipts_backfilled"
    row_count: U64
    rollback_path: str | None
    dry_run: bool


class ChainStatusReport(Response):
    """To ``chain_status``."""

    kind: Literal["chain_status"] = "chain_status"
    status: parts.ChainConfiguration


class ReceiptBatchFlushed(Response):
    """To ``flush_receipts``."""

    kind: Literal["receipt_batch_flushed"] = "receipt_batch_flushed"
    batch: parts.ReceiptBatch
    receipts_updated: U64


class ReceiptBatchListing(Response):
    """To ``receipt_batches``."""

    kind: Literal["receipt_batches"] = "receipt_batches"
    batches: tuple[parts.ReceiptBatch, ...]


class X402Paid(Response):
    """Never sent: payments are not served here."""

    kind: Literal["x402_paid"] = "x402_paid"
    receipt_id: str
    status: U64
    body: str


class CompletionProven(Response):
    """Never sent; version 1's page names no field."""

    kind: Literal["completion_proven"] = "completion_proven"


class EscrowReleased(Response):
    """Never sent; version 1's page names no field."""

    kind: Literal["escrow_released"] = "escrow_released"


# Audit ----------------------------------------------------------------------------------------------------------


class AuditEvents(Response):
    """To ``recent_audit``."""

    kind: Literal["audit_events"] = "audit_events"
    events: tuple[parts.AuditEvent, ...]


class AuditIntegrity(Response):
    """To ``verify_audit_integrity``."""

    kind: Literal["audit_integrity"] = "audit_integrity"
    report: parts.AuditReport


class AuditPurged(Response):
    """To ``purge_audit``."""

    kind: Literal["audit_purged"] = "audit_purged"
    purged: U64


class AuditInclusion(Response):
    """To ``prove_audit_inclusion``; no proof where no row has that id."""

    kind: Literal["audit_inclusion"] = "audit_inclusion"
    proof: parts.InclusionProof | parts.ChainProof | None


class AuditCheckpoint(Response):
    """Ours, to ``cosign_audit_checkpoint``: the signed note with all cosignatures that it has now."""

    kind: Literal["audit_checkpoint"] = "audit_checkpoint"
    checkpoint: str


class ProvenanceActions(Response):
    """To ``query_provenance``; ``scanned`` rows were looked at."""

    kind: Literal["provenance_actions"] = "provenance_actions"
    integrity: parts.AuditReport
    actions: tuple[parts.ProvenanceAction, ...]
    scanned: U64


class Denials(Response):
    """Ours, to ``recent_denials``."""

    kind: Literal["denials"] = "denials"
    denials: tuple[parts.Denial, ...]
