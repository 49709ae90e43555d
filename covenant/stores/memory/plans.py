"""Plans for repairs, compaction, promotion and the backfill, without a database.

Both stores use them, dry or applied, so that a dry run shows exactly the effect.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, assert_never

from covenant.stores.memory.interface import (
    CompactionCutoffs,
    MemoryCompaction,
    ParentDetachment,
    Payable,
    ProvenanceBackfill,
    RecordDeletion,
    Repair,
)
from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier
from policy import errors

_HEIGHT: Final[Mapping[Tier, int]] = {Tier.WORKING: 0, Tier.EPISODIC: 1, Tier.LONGTERM: 2}


def repaired(record: MemoryRecord, command: Repair) -> MemoryRecord | None:
    """Return the record after the command; None if it is deleted.

    Raises:
        errors.MemoryConflictError: its parent is not the one that the command expects.
    """
    match command:
        case ParentDetachment(expected_parent=expected):
            if expected is not None and record.parent != expected:
                raise errors.MemoryConflictError(
                    f"parent of `{record.id}` is `{record.parent}`, not `{expected}`", where=record.id
                )
            return record.model_copy(update={"parent": None})
        case RecordDeletion():
            return None
        case ProvenanceBackfill(provenance=provenance):
            return _with_metadata(record, provenance=provenance)
        case _:
            assert_never(command)


def promoted(record: MemoryRecord, tier: Tier) -> MemoryRecord:
    """Return the record in the tier.

    Raises:
        errors.MemoryConflictError: it is in a higher one.
    """
    if _HEIGHT[tier] < _HEIGHT[record.tier]:
        raise errors.MemoryConflictError(
            f"memory `{record.id}` is in tier `{record.tier}`, above `{tier}`",
            hint="records are promoted from working to episodic to longterm, never back",
            where=record.id,
        )
    return record.model_copy(update={"tier": tier})


def stale(record: MemoryRecord, *, marked_at_ms: int, reason: str) -> MemoryRecord:
    """Return the record with ``metadata.stale_context``."""
    return _with_metadata(record, stale_context={"marked_at_ms": marked_at_ms, "reason": reason})


def correlated(record: MemoryRecord, receipt_id: str) -> MemoryRecord:
    """Return the record with ``metadata.receipt_id``."""
    return _with_metadata(record, receipt_id=receipt_id)


def _with_metadata(record: MemoryRecord, **more: Any) -> MemoryRecord:
    old = record.metadata
    base = dict(old) if isinstance(old, dict) else {} if old is None else {"previous_metadata": old}
    return record.model_copy(update={"metadata": {**base, **more}})


def is_stale(metadata: Any) -> bool:
    """Whether metadata marks the record as stale."""
    return isinstance(metadata, dict) and "stale_context" in metadata


@dataclass(frozen=True, slots=True)
class Line:
    """The fields of a record that a plan needs."""

    id: str
    tier: Tier
    owner: str
    created_at: int
    parent: str | None
    stale: bool = False


def line(record: MemoryRecord) -> Line:
    """Return the fields of this record that a plan needs."""
    marked = is_stale(record.metadata)
    return Line(record.id, record.tier, record.owner.pubkey, record.created_at, record.parent, marked)


def compaction(
    lines: Iterable[Line], policy: CompactionCutoffs, *, ids: Iterable[str] = (), owner: str | None = None
) -> MemoryCompaction:
    """Plan a compaction over all records. A parent is stale if no remaining record of any owner has its id.

    ``ids`` are those of bad rows: a parent that is one of them is not stale.
    """
    known = list(lines)
    cuts = {
        Tier.WORKING: policy.delete_working_before_ms,
        Tier.EPISODIC: policy.delete_episodic_before_ms,
        Tier.LONGTERM: policy.mark_longterm_stale_before_ms,
    }
    mine = [line for line in known if owner is None or line.owner == owner]
    old = [line for line in mine if (cut := cuts[line.tier]) is not None and line.created_at < cut]
    deleted = {line.id for line in old if line.tier is not Tier.LONGTERM}
    marked = {line.id for line in old if line.tier is Tier.LONGTERM and not line.stale}
    detached: set[str] = set()
    if policy.detach_stale_parents:
        left = ({line.id for line in known} | set(ids)) - deleted
        detached = {line.id for line in mine if line.parent is not None and line.parent not in left} - deleted
    return MemoryCompaction(tuple(sorted(deleted)), tuple(sorted(marked)), tuple(sorted(detached)))


def payable(record: MemoryRecord) -> Payable:
    """Return the fields of this record that the backfill needs."""
    receipt = record.metadata.get("receipt_id") if isinstance(record.metadata, dict) else None
    return Payable(record.id, record.owner.pubkey, record.created_at, receipt if isinstance(receipt, str) else None)


def correlations(records: Iterable[Payable], receipts: Sequence[SettlementReceipt]) -> tuple[tuple[str, str], ...]:
    """Compute which receipt paid for which record, from both sides. Returns the new pairs (record id, receipt id).

    1. A memory receipt that names a record of its payer belongs to it.
    2. Receipts without a record, oldest first: each belongs to the first record of its payer, oldest first, that has no
    receipt yet and existed when the receipt was settled.
    """
    known = sorted(records, key=lambda r: (r.created_at, r.id))
    by_id = {record.id: record for record in known}
    taken = {record.receipt for record in known if record.receipt is not None}
    found: dict[str, str] = {record.id: record.receipt for record in known if record.receipt is not None}
    payments = sorted((r for r in receipts if r.resource == "memory"), key=lambda r: (r.settled_at, r.id))
    for receipt in payments:
        record = by_id.get(receipt.memory_record_id or "")
        if record is not None and record.owner == receipt.payer.pubkey and receipt.id not in taken:
            if record.id not in found:
                found[record.id] = receipt.id
            taken.add(receipt.id)
    waiting: dict[str, deque[Payable]] = defaultdict(deque)
    for record in known:
        if record.id not in found:
            waiting[record.owner].append(record)
    for receipt in payments:
        queue = waiting.get(receipt.payer.pubkey)
        if receipt.memory_record_id is not None or receipt.id in taken or not queue:
            continue
        # Oldest first: if the first is not eligible, none is.
        if queue[0].created_at <= receipt.settled_at:
            found[queue.popleft().id] = receipt.id
    return tuple(sorted((i, r) for i, r in found.items() if by_id[i].receipt is None))
