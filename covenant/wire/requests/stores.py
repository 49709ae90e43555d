"""Memory, settlement and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

from covenant.wire import parts
from covenant.wire.parts import Limit
from covenant.wire.requests.base import Request
from covenant.wire.types import U64, MemoryTier
from policy.audit_log import event_kinds

Relevance = Annotated[float, pydantic.Field(ge=0.0, le=1.0)]


# Memory ---------------------------------------------------------------------------------------------------------


class RecentMemory(Request):
    """The newest records."""

    kind: Literal["recent_memory"] = "recent_memory"
    tier: MemoryTier | None = None
    limit: Limit = 10
    prefer_stream: bool = False


class SearchMemory(Request):
    """Records by meaning and words."""

    kind: Literal["search_memory"] = "search_memory"
    query: str
    tier: MemoryTier | None = None
    limit: Limit = 10
    min_relevance: Relevance | None = None


class PurgeMemory(Request):
    """Take out what is older."""

    kind: Literal["purge_memory"] = "purge_memory"
    tier: MemoryTier | None = None
    before_ms: U64


class RepairMemory(Request):
    """Repair one record."""

    kind: Literal["repair_memory"] = "repair_memory"
    request: parts.MemoryRepairOrder


class CompactMemory(Request):
    """Take out and mark what is old."""

    kind: Literal["compact_memory"] = "compact_memory"
    request: parts.MemoryCompactionOrder


class BackfillMemoryRecords(Request):
    """Write receipts' correlations into records; ``scope_pubkey`` is refused when set."""

    kind: Literal["backfill_memory_records"] = "backfill_memory_records"
    dry_run: bool = False
    scope_pubkey: str | None = None


class PutMemory(Request):
    """Ours: write a record of the caller's own."""

    kind: Literal["put_memory"] = "put_memory"
    tier: MemoryTier
    text: str
    metadata: Any = None
    parent: str | None = None


class PromoteMemory(Request):
    """Ours: put a record into another tier."""

    kind: Literal["promote_memory"] = "promote_memory"
    id: str
    tier: MemoryTier


class Verify(Request):
    """Hold the stores against each other."""

    kind: Literal["verify"] = "verify"
    window: Limit = 100


class IgnoreCheck(Request):
    """Would this text be ignored."""

    kind: Literal["ignore_check"] = "ignore_check"
    text: str


# Settlement -----------------------------------------------------------------------------------------------------


class RecentReceipts(Request):
    """The newest receipts."""

    kind: Literal["recent_receipts"] = "recent_receipts"
    limit: Limit = 10
    since_ms: U64 | None = None


class BackfillSettlementReceipts(Request):
    """Write records' ids into receipts that lack them, and receipts that records lack; of one payer if given."""

    kind: Literal["backfill_settlement_receipts"] = "backfill_settlement_receipts"
    dry_run: bool = False
    scope_pubkey: str | None = None


class ChainStatus(Request):
    """Show the configuration of the chain."""

    kind: Literal["chain_status"] = "chain_status"


class FlushReceipts(Request):
    """Put receipts into a batch."""

    kind: Literal["flush_receipts"] = "flush_receipts"
    limit: Limit = 10


class ReceiptBatches(Request):
    """The newest batches."""

    kind: Literal["receipt_batches"] = "receipt_batches"
    limit: Limit = 10


# Audit ----------------------------------------------------------------------------------------------------------


class RecentAudit(Request):
    """The caller's newest rows, of version 1's kinds. Ours: ``extended`` asks for all kinds, ``types`` for these;
    ``run_id`` and ``intent_id`` for rows about that run or that intent alone."""

    kind: Literal["recent_audit"] = "recent_audit"
    limit: Limit = 10
    since_ms: U64 | None = None
    prefer_stream: bool = False
    types: tuple[str, ...] = ()
    extended: bool = False
    run_id: str | None = None
    intent_id: str | None = None

    @property
    def whole(self) -> bool:
        """Whether every row was asked for."""
        return self.extended and not self.types and not self._about

    def shows(self, row: Mapping[str, Any]) -> bool:
        """Whether a row with these fields was asked for. Version 1's clients cannot decode a kind that they do not
        know."""
        if self._about and not any(row.get(name) == value for name, value in self._about.items()):
            return False
        kind = row["type"]
        return kind in self.types if self.types else self.extended or kind in event_kinds.VERSION_1

    @property
    def _about(self) -> dict[str, str]:
        asked = {"run_id": self.run_id, "intent_id": self.intent_id}
        return {name: value for name, value in asked.items() if value is not None}


class VerifyAuditIntegrity(Request):
    """Hold the rows against their chain."""

    kind: Literal["verify_audit_integrity"] = "verify_audit_integrity"


class PurgeAudit(Request):
    """Take out what is older; the chain goes on from a signed record."""

    kind: Literal["purge_audit"] = "purge_audit"
    before_ms: U64


class ProveAuditInclusion(Request):
    """That a row is in the log: by the chain's rest, or where ``extended`` (ours) is set, by RFC 6962."""

    kind: Literal["prove_audit_inclusion"] = "prove_audit_inclusion"
    event_id: str
    extended: bool = False


class CosignAuditCheckpoint(Request):
    """Ours. Keep with a checkpoint of the log's the cosignatures on it that are of ``witnesses`` (vkeys)."""

    kind: Literal["cosign_audit_checkpoint"] = "cosign_audit_checkpoint"
    checkpoint: str
    witnesses: tuple[str, ...]


class QueryProvenance(Request):
    """Query the acts in the audit log by actor, approver, rule and outcome."""

    kind: Literal["query_provenance"] = "query_provenance"
    since_ms: U64 | None = None
    until_ms: U64 | None = None
    actor: str | None = None
    approver: str | None = None
    rule: str | None = None
    outcome: str | None = None
    limit: Limit = 100


class RecentDenials(Request):
    """Ours: what the kernel or a gate denied agents, newest first."""

    kind: Literal["recent_denials"] = "recent_denials"
    limit: Limit = 20
    run_id: str | None = None
