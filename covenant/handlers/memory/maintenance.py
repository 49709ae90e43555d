"""The upkeep of memory over the wire: purging, repairing, compacting it, and correlating it with its receipts.

Who may touch what is as ``covenant.handlers.memory.records`` says; the check is durable before the act, and what was
done is durable before it is answered.

    purge              memory.purge
    repair, compact    memory.repair.<mode>, memory.compact.<mode>
    backfill           memory.backfill.<mode>, and the operator only
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from covenant.handlers import paging
from covenant.handlers.access import authorization
from covenant.handlers.access.authorization import RequestFacts
from covenant.handlers.memory import records
from covenant.stores.audit.interface import AuditEntry
from covenant.stores.memory import interface as stores
from covenant.wire import parts, requests, responses
from covenant.wire.types import MemoryRecord, Tier
from policy import errors

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.server import Handler, Server

MAX_REASON: Final = 4096
# Of each list, so that a row stays far below what one may have.
IDS_IN_A_ROW: Final = 20_000


async def purge_memory(server: Server, caller: Caller, asked: requests.PurgeMemory) -> responses.MemoryPurged:
    """Delete what was made before a moment, of one tier or of all."""
    facts = RequestFacts(tier=asked.tier, before_ms=asked.before_ms, apply=True)
    await authorization.require(server, caller, "memory.purge", agent_id="memory:purge", facts=facts)
    purged = await server.memory.purge(asked.tier, asked.before_ms, owner=records.whose(caller))
    tier = None if asked.tier is None else str(asked.tier)
    row = {"tier": tier, "before_ms": asked.before_ms, "purged": purged}
    await server.audit.append("memory_purged", row, issuer=caller.agent)
    return responses.MemoryPurged(purged=purged)


async def repair_memory(server: Server, caller: Caller, asked: requests.RepairMemory) -> responses.MemoryRepaired:
    """Repair one record, or show what that would do.

    Raises:
        errors.MemoryInvalidError: no reason is given.
        errors.NoMemoryError: the caller has no such record.
        errors.MemoryConflictError: its parent is not the expected one.
        errors.MemoryFullError: what it gets does not fit into what the caller may have.
    """
    order = asked.request
    reason = _reason(order.reason)
    found = await records.seen(server, caller, order.command.id)
    facts = RequestFacts(
        tier=None if found is None else found.tier,
        record_id=order.command.id,
        created_at=None if found is None else found.created_at,
        apply=order.mode == "apply",
    )
    action = f"memory.repair.{order.mode}"
    await authorization.require(server, caller, action, agent_id="memory:repair", facts=facts)
    if found is not None and isinstance(order.command, parts.BackfillProvenance):
        records.check_size(found, more=order.command.provenance)
    done: stores.Repaired | None = await server.memory.repair(
        _command(order.command), apply=order.mode == "apply", owner=records.whose(caller), room=records.room_of(caller)
    )
    if done is None:
        raise records.missing(order.command.id)
    row = {"memory_id": order.command.id, "action": order.command.action, "mode": order.mode}
    await server.audit.append(
        "memory_repair_applied", {**row, "changed": done.changed, "reason": reason}, issuer=caller.agent
    )
    before, after = _both(done)
    outcome = parts.MemoryRepairOutcome(
        id=order.command.id,
        action=order.command.action,
        mode=order.mode,
        would_change=done.would_change,
        changed=done.changed,
        before=before,
        after=after,
    )
    return responses.MemoryRepaired(outcome=outcome)


def _command(command: parts.MemoryCommand) -> stores.Repair:
    match command:
        case parts.DetachParent(id=record_id, expected_parent=expected):
            return stores.ParentDetachment(record_id, expected)
        case parts.DeleteRecord(id=record_id):
            return stores.RecordDeletion(record_id)
        case parts.BackfillProvenance(id=record_id, provenance=provenance):
            return stores.ProvenanceBackfill(record_id, provenance)


def _both(done: stores.Repaired) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The record before and after; of one so long that no answer takes it twice, only what became of it."""
    before = _told(done.before)
    if done.after is None:
        return before, None
    after = _told(done.after)
    return (before, after) if paging.size_of((before, after)) <= paging.ROOM else (None, after)


def _told(record: MemoryRecord | stores.BadRow) -> dict[str, Any]:
    if isinstance(record, stores.BadRow):
        return {"id": record.id, "row": record.row, "problems": list(record.problems)}
    return record.model_dump(mode="json")


async def compact_memory(server: Server, caller: Caller, asked: requests.CompactMemory) -> responses.MemoryCompacted:
    """Delete and mark what is old, or show what that would do.

    Raises:
        errors.MemoryInvalidError: the policy asks for nothing, or no reason is given.
    """
    order = asked.request
    reason = _reason(order.reason)
    policy = stores.CompactionCutoffs(**order.policy.model_dump())
    if policy.empty:
        raise errors.MemoryInvalidError("the policy asks for nothing", hint="name a cut-off, or detach_stale_parents")
    apply = order.mode == "apply"
    cuts = {
        Tier.WORKING: policy.delete_working_before_ms,
        Tier.EPISODIC: policy.delete_episodic_before_ms,
        Tier.LONGTERM: policy.mark_longterm_stale_before_ms,
    }
    tiers = tuple(tier for tier, cut in cuts.items() if cut is not None)
    given = [cut for cut in cuts.values() if cut is not None]
    # A parent may dangle in any tier.
    facts = RequestFacts(
        tiers=tuple(Tier) if policy.detach_stale_parents else tiers, before_ms=max(given, default=None)
    )
    action = f"memory.compact.{order.mode}"
    await authorization.require(server, caller, action, agent_id="memory:compact", facts=facts)
    plan: stores.MemoryCompaction = await server.memory.compact(
        policy, reason=reason, now_ms=server.now_ms(), apply=apply, owner=records.whose(caller)
    )
    lists = {"deleted": plan.deleted, "stale_marked": plan.stale_marked, "parents_detached": plan.parents_detached}
    changed = apply and plan.would_change
    about = {"mode": order.mode, "changed": changed, "reason": reason}
    longest = max(map(len, lists.values()))
    rows = [
        AuditEntry(
            "memory_compaction_applied",
            about | {name: list(ids[start : start + IDS_IN_A_ROW]) for name, ids in lists.items()},
            caller.agent,
        )
        for start in range(0, max(longest, 1), IDS_IN_A_ROW)
    ]
    await server.audit.append_all(rows)
    # Each row above names all of them; an answer takes what it takes.
    shown = {name: paging.that_fit(ids, paging.ROOM // len(lists)) for name, ids in lists.items()}
    outcome = parts.MemoryCompactionOutcome(
        mode=order.mode,
        would_change=plan.would_change,
        changed=changed,
        **shown,
        not_shown=sum(map(len, lists.values())) - sum(map(len, shown.values())) or None,
    )
    return responses.MemoryCompacted(outcome=outcome)


async def backfill_memory_records(
    server: Server, caller: Caller, asked: requests.BackfillMemoryRecords
) -> responses.MemoryRecordsBackfilled:
    """Write into records which receipts paid for them, recomputed from both.

    Raises:
        errors.MemoryInvalidError: it is asked for one peer's records.
        errors.OperatorOnlyError: the caller is not the operator.
    """
    await authorization.require_operator(server, caller, None, "backfill memory records")
    if asked.scope_pubkey is not None:
        raise errors.MemoryInvalidError("`scope_pubkey` is not taken: receipts and records are correlated as a whole")
    action = "memory.backfill.dry_run" if asked.dry_run else "memory.backfill.apply"
    facts = RequestFacts(apply=not asked.dry_run)
    await authorization.require(server, caller, action, agent_id="memory:backfill", facts=facts)
    receipts = await server.receipts.recent(2**32, keep=lambda receipt: receipt.resource == "memory")
    found = await server.memory.backfill(receipts, apply=not asked.dry_run)
    answer = responses.MemoryRecordsBackfilled(
        row_count=len(found), savepoint_name=stores.BACKFILL_SAVEPOINT, dry_run=asked.dry_run
    )
    row = answer.model_dump(exclude={"kind"})
    await server.audit.append("memory_record_backfill_applied", row, issuer=caller.agent)
    return answer


def _reason(text: str) -> str:
    if not text.strip() or len(text) > MAX_REASON:
        raise errors.MemoryInvalidError(f"a reason is needed, of at most {MAX_REASON} characters")
    return text


HANDLERS: Final[Mapping[str, Handler]] = {
    "purge_memory": purge_memory,
    "repair_memory": repair_memory,
    "compact_memory": compact_memory,
    "backfill_memory_records": backfill_memory_records,
}
