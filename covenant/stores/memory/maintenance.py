"""Purges, repairs, promotions, compactions and the backfill, each within one transaction of the caller.

``plans`` decides; this module reads and writes the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from covenant.stores.memory import plans, read, sqlite
from covenant.stores.memory.index.cache import Gone
from covenant.stores.memory.interface import (
    BadRow,
    CompactionCutoffs,
    MemoryCompaction,
    RecordDeletion,
    Repair,
    Repaired,
)
from covenant.stores.memory.write import Transaction
from covenant.wire.types import SettlementReceipt, Tier

_TIERS: Final = frozenset(Tier)


async def purge(under_way: Transaction, tier: Tier | None, before_ms: int, *, owner: str | None) -> int:
    """Delete records created before ``before_ms``. Returns their number."""
    where, values = sqlite.where(tier=tier, owner=owner)
    found = await under_way.db.execute_fetchall(
        f"DELETE FROM memories WHERE created_at < ? AND {where} RETURNING id",  # noqa: S608
        (sqlite.clipped(before_ms), *values),
    )
    gone = [Gone(str(row[0])) for row in found]
    under_way.changes += gone
    return len(gone)


async def repair(under_way: Transaction, command: Repair, *, apply: bool, owner: str | None) -> Repaired | None:
    """Plan a repair, and execute it if ``apply``. Returns None if there is no such record.

    Raises:
        errors.MemoryConflictError: the parent is not the expected one.
    """
    before = await read.row(under_way.db, command.id)
    if isinstance(before, BadRow):
        # A bad row can only be deleted, and only by a caller that may see every row.
        if owner is not None or not isinstance(command, RecordDeletion):
            return None
        after = None
    elif before is None or owner not in (None, before.owner.pubkey):
        return None
    else:
        after = plans.repaired(before, command)
    changed = apply and after != before
    if changed and after is None:
        await under_way.delete(command.id)
    elif changed and after is not None:
        await under_way.update(after)
    return Repaired(before, after, changed)


async def promote(
    under_way: Transaction, record_id: str, tier: Tier, *, at_ms: int, owner: str | None
) -> Repaired | None:
    """Move a record up to ``tier``. Returns None if there is no such record.

    Raises:
        errors.MemoryConflictError: the record is in a higher tier already.
    """
    before = await read.one(under_way.db, record_id)
    if before is None or owner not in (None, before.owner.pubkey):
        return None
    after = plans.promoted(before, tier)
    if after != before:
        await under_way.move(record_id, after.tier, from_tier=before.tier, at_ms=at_ms)
    return Repaired(before, after, after != before)


async def compact(
    under_way: Transaction, policy: CompactionCutoffs, *, reason: str, now_ms: int, apply: bool, owner: str | None
) -> MemoryCompaction:
    """Plan a compaction, and execute it if ``apply``."""
    marked_at_ms = now_ms if policy.marked_at_ms is None else policy.marked_at_ms
    lines, ids = await _lines(under_way, policy)
    plan = plans.compaction(lines, policy, ids=ids, owner=owner)
    if apply:
        for record_id in plan.deleted:
            await under_way.delete(record_id)
        for record_id in plan.parents_detached:
            await under_way.db.execute("UPDATE memories SET parent = NULL WHERE id = ?", (record_id,))
        for record_id in plan.stale_marked:
            record = await read.one(under_way.db, record_id)
            assert record is not None  # it was planned from within this transaction
            await under_way.update(plans.stale(record, marked_at_ms=marked_at_ms, reason=reason))
    return plan


async def _lines(under_way: Transaction, policy: CompactionCutoffs) -> tuple[list[plans.Line], list[str]]:
    """Return the input of the plan, and the ids of bad rows. Reads a whole row only if it may be marked."""
    lines, bad = [], []
    select = "SELECT rowid, id, tier, owner_pubkey, created_at, parent FROM memories"
    cut = policy.mark_longterm_stale_before_ms
    async for chunk in read.chunks(under_way.db, select):
        for _, record_id, tier, owner, created_at, parent in chunk:
            good = isinstance(created_at, int) and created_at >= 0 and tier in _TIERS
            good = good and isinstance(record_id, str) and isinstance(parent, str | None)
            good = good and sqlite.sayable(record_id + (parent or ""))
            marks = good and cut is not None and tier == Tier.LONGTERM and created_at < cut
            record = await read.one(under_way.db, record_id) if marks else None
            if not good or (marks and record is None):
                bad.append(str(record_id))
                continue
            is_stale = record is not None and plans.is_stale(record.metadata)
            lines.append(plans.Line(record_id, Tier(tier), owner, created_at, parent, is_stale))
    return lines, bad


async def backfill(
    under_way: Transaction, receipts: Sequence[SettlementReceipt], *, apply: bool
) -> tuple[tuple[str, str], ...]:
    """Write to ``metadata.receipt_id`` the receipt that paid for a record. Returns (record id, receipt id); see
    ``plans``."""
    found = plans.correlations(await read.payables(under_way.db), receipts)
    for record_id, receipt_id in found if apply else ():
        paid = await read.one(under_way.db, record_id)
        assert paid is not None  # it was read within this transaction
        await under_way.update(plans.correlated(paid, receipt_id))
    return found
