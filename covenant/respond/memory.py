"""Memory over the wire: reading, searching, writing, promoting, purging, repairing and compacting it.

Who sees what: the operator every record, anybody else its own alone, whatever a grant says; a grant then bounds what is
done to them (covenant-v1.md, section 7). A record of somebody else is answered as one that is not there. A read is
let through when its grant admits some records, and shows those that the grant admits.

    recent, search     memory.read, or memory.read.<tier> for a tier that is named
    put, promote       memory.write; a promotion touches both tiers
    purge              memory.purge
    repair, compact    memory.repair.<mode>, memory.compact.<mode>
    backfill           memory.backfill.<mode>, and the operator only

The check is durable before the act, and what was done is durable before it is answered.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from covenant.respond import accounting, authority, fitting
from covenant.respond.authority import Facts
from covenant.stores.audit.interface import Entry
from covenant.stores.memory import interface as stores
from covenant.wire import parts, requests, responses
from covenant.wire.types import MemoryRecord, SignedCapability, Tier
from policy import errors

if TYPE_CHECKING:
    from covenant.respond.caller import Caller
    from covenant.respond.server import Handler, Server

_LOG = logging.getLogger(__name__)

# How many records one answer holds, and how many bytes of them.
MAX_RECORDS: Final = 1000
MAX_ANSWER_BYTES: Final = fitting.ROOM
# What a record takes on the wire: one that no answer carries could be kept and not be had again.
MAX_RECORD_BYTES: Final = fitting.ROOM
MAX_TEXT_BYTES: Final = 4 * 1024 * 1024
MAX_REASON: Final = 4096
# Of each list, so that a row stays far below what one may have.
_IDS_IN_A_ROW: Final = 20_000
# How many records are looked at for a grant that admits only some.
_MOST_LOOKED_AT: Final = 16 * MAX_RECORDS
# So many are read before more are: what fits is held, and not a thousand of the longest.
_AT_FIRST: Final = 32

Find = Callable[[int], Awaitable[Sequence[MemoryRecord]]]


def _owner(caller: Caller) -> str | None:
    """Whose records the caller sees: None is everybody's."""
    return None if caller.operator else caller.agent.pubkey


async def embedding_of(server: Server, text: str, *, what: str) -> tuple[float, ...]:
    """The vector of a text, empty when there is none to be had: words are found without it. ``what``: for our log."""
    try:
        vector: tuple[float, ...] = await server.embedder.embed(text)
    except errors.CovenantError as e:
        _LOG.warning("%s has no vector: %s", what, e)
        return ()
    return vector


# Reading ------------------------------------------------------------------------------------------------------


async def recent_memory(server: Server, caller: Caller, asked: requests.RecentMemory) -> responses.Memories:
    """The newest records."""
    signed = await _may_read(server, caller, asked.tier)
    owner = _owner(caller)

    async def find(count: int) -> Sequence[MemoryRecord]:
        found: Sequence[MemoryRecord] = await server.memory.recent(asked.tier, count, owner=owner)
        return found

    return responses.Memories(records=await _shown(signed, find, asked.limit))


async def search_memory(server: Server, caller: Caller, asked: requests.SearchMemory) -> responses.Memories:
    """Records by likeness and words."""
    signed = await _may_read(server, caller, asked.tier)
    owner = _owner(caller)
    vector = await embedding_of(server, asked.query, what="a query")

    async def find(count: int) -> Sequence[MemoryRecord]:
        hits = await server.memory.search(vector, asked.query, asked.tier, count, asked.min_relevance, owner=owner)
        return [hit.record for hit in hits]

    return responses.Memories(records=await _shown(signed, find, asked.limit))


async def _may_read(server: Server, caller: Caller, tier: Tier | None) -> SignedCapability:
    facts = Facts(tier=tier, apply=False, filtered=True)
    return await authority.require(server, caller, "memory.read", agent_id="memory:read", facts=facts)


async def _shown(signed: SignedCapability, find: Find, limit: int) -> tuple[MemoryRecord, ...]:
    """The first of what is found that the grant admits, as many as fit."""
    wanted = min(limit, MAX_RECORDS)
    count = min(wanted, _AT_FIRST)
    while True:
        found = await find(count)
        admitted = [record for record in found if _admits(signed, record)][:wanted]
        shown, full = fitting.cut(admitted, MAX_ANSWER_BYTES)
        if full or len(admitted) >= wanted or len(found) < count or count >= _MOST_LOOKED_AT:
            return shown
        count *= 4


def _admits(signed: SignedCapability, record: MemoryRecord) -> bool:
    return authority.admits_record(signed, tier=record.tier, record_id=record.id, created_at=record.created_at)


# Writing ------------------------------------------------------------------------------------------------------


async def put_memory(server: Server, caller: Caller, asked: requests.PutMemory) -> responses.MemoryStored:
    """Keep a record of the caller's own, with its receipt.

    Raises:
        errors.MemoryInvalidError: the text is empty or too long, or the metadata cannot be stored.
        errors.NoMemoryError: the caller has no record that is named as its parent.
        errors.TextIgnoredError: a rule of .covenantignore matches.
    """
    now_ms = server.now_ms()
    record_id = str(uuid.uuid4())
    facts = Facts(tier=asked.tier, record_id=record_id, created_at=now_ms, apply=True)
    await authority.require(server, caller, "memory.write", agent_id="memory:write", facts=facts)
    if not asked.text.strip() or len(asked.text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise errors.MemoryInvalidError(f"text is empty, or longer than {MAX_TEXT_BYTES} bytes")
    await _refuse_ignored(server, caller, record_id, asked)
    if asked.parent is not None:
        await _visible(server, caller, asked.parent)
    record = MemoryRecord(
        id=record_id,
        tier=asked.tier,
        owner=caller.agent,
        text=asked.text,
        embedding=await embedding_of(server, asked.text, what=f"memory {record_id}"),
        metadata=asked.metadata,
        created_at=now_ms,
        parent=asked.parent,
    )
    check_size(record)
    await server.memory.put(record)
    receipt = await accounting.settle_memory(server, caller, record.id, record.text)
    await server.audit.append_all([written(record, "client"), accounting.receipt_row(receipt, None)])
    server.feed.publish("memory", record)
    return responses.MemoryStored(record=record)


def check_size(record: MemoryRecord, *, more: Any = None) -> None:
    """Refuse a record that no answer could carry, with what is to be added to it.

    Raises:
        errors.MemoryInvalidError: it is one, or holds what is no text.
    """
    try:
        size = fitting.size_of(record) + (0 if more is None else fitting.size_of(more))
    except ValueError as e:
        raise errors.MemoryInvalidError("text or metadata is not valid Unicode, or no JSON") from e
    if size > MAX_RECORD_BYTES:
        raise errors.MemoryInvalidError(
            f"the record takes {size} bytes on the wire, and {MAX_RECORD_BYTES} are the most",
            hint="a control character takes six",
        )


def written(record: MemoryRecord, reason: str) -> Entry:
    """The row of a record that was kept; its text is hashed."""
    digest = hashlib.sha256(record.text.encode()).hexdigest()
    about = {"memory_id": record.id, "tier": str(record.tier), "reason": reason, "text_hash_hex": digest}
    return Entry("memory_written", about, record.owner)


async def _refuse_ignored(server: Server, caller: Caller, record_id: str, asked: requests.PutMemory) -> None:
    try:
        metadata = json.dumps(asked.metadata, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as e:
        raise errors.MemoryInvalidError("metadata cannot be stored") from e
    pattern = server.ignore.match(asked.text) or server.ignore.match(metadata)
    if pattern is not None:
        row = {"memory_id": record_id, "matched_pattern": pattern}
        await server.audit.append("memory_write_ignored", row, issuer=caller.agent)
        raise errors.TextIgnoredError(
            f"the text matches `{pattern}`", hint="covenant ignore check", where=".covenantignore"
        )


async def promote_memory(server: Server, caller: Caller, asked: requests.PromoteMemory) -> responses.MemoryPromoted:
    """Put a record into a higher tier.

    Raises:
        errors.NoMemoryError: the caller has no such record.
        errors.MemoryConflictError: it stands in a higher tier already.
    """
    found = await _found(server, caller, asked.id)
    facts = Facts(
        tiers=(asked.tier,) if found is None else (found.tier, asked.tier),
        record_id=asked.id,
        created_at=None if found is None else found.created_at,
        apply=True,
    )
    await authority.require(server, caller, "memory.write", agent_id="memory:promote", facts=facts)
    done = await server.memory.promote(asked.id, asked.tier, at_ms=server.now_ms(), owner=_owner(caller))
    if done is None:
        raise _missing(asked.id)
    # Only a repair of a row that cannot be read has no record before or after.
    assert isinstance(done.before, MemoryRecord)
    assert isinstance(done.after, MemoryRecord)
    if done.changed:
        row = {"memory_id": asked.id, "from_tier": str(done.before.tier), "to_tier": str(done.after.tier)}
        await server.audit.append("memory_promoted", {**row, "reason": "client"}, issuer=caller.agent)
        server.feed.publish("memory", done.after)
    return responses.MemoryPromoted(record=done.after)


# Maintenance --------------------------------------------------------------------------------------------------


async def purge_memory(server: Server, caller: Caller, asked: requests.PurgeMemory) -> responses.MemoryPurged:
    """Delete what was made before a moment, of one tier or of all."""
    facts = Facts(tier=asked.tier, before_ms=asked.before_ms, apply=True)
    await authority.require(server, caller, "memory.purge", agent_id="memory:purge", facts=facts)
    purged = await server.memory.purge(asked.tier, asked.before_ms, owner=_owner(caller))
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
    """
    order = asked.request
    reason = _reason(order.reason)
    found = await _found(server, caller, order.command.id)
    facts = Facts(
        tier=None if found is None else found.tier,
        record_id=order.command.id,
        created_at=None if found is None else found.created_at,
        apply=order.mode == "apply",
    )
    action = f"memory.repair.{order.mode}"
    await authority.require(server, caller, action, agent_id="memory:repair", facts=facts)
    if found is not None and isinstance(order.command, parts.BackfillProvenance):
        check_size(found, more=order.command.provenance)
    done: stores.Repaired | None = await server.memory.repair(
        _command(order.command), apply=order.mode == "apply", owner=_owner(caller)
    )
    if done is None:
        raise _missing(order.command.id)
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
            return stores.DetachParent(record_id, expected)
        case parts.DeleteRecord(id=record_id):
            return stores.DeleteRecord(record_id)
        case parts.BackfillProvenance(id=record_id, provenance=provenance):
            return stores.BackfillProvenance(record_id, provenance)


def _both(done: stores.Repaired) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The record before and after; of one so long that no answer takes it twice, only what became of it."""
    before = _told(done.before)
    if done.after is None:
        return before, None
    after = _told(done.after)
    return (before, after) if fitting.size_of((before, after)) <= fitting.ROOM else (None, after)


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
    policy = stores.CompactionPolicy(**order.policy.model_dump())
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
    facts = Facts(tiers=tuple(Tier) if policy.detach_stale_parents else tiers, before_ms=max(given, default=None))
    action = f"memory.compact.{order.mode}"
    await authority.require(server, caller, action, agent_id="memory:compact", facts=facts)
    plan: stores.Compacted = await server.memory.compact(
        policy, reason=reason, now_ms=server.now_ms(), apply=apply, owner=_owner(caller)
    )
    lists = {"deleted": plan.deleted, "stale_marked": plan.stale_marked, "parents_detached": plan.parents_detached}
    changed = apply and plan.would_change
    about = {"mode": order.mode, "changed": changed, "reason": reason}
    longest = max(map(len, lists.values()))
    rows = [
        Entry(
            "memory_compaction_applied",
            about | {name: list(ids[start : start + _IDS_IN_A_ROW]) for name, ids in lists.items()},
            caller.agent,
        )
        for start in range(0, max(longest, 1), _IDS_IN_A_ROW)
    ]
    await server.audit.append_all(rows)
    # Each row above names all of them; an answer takes what it takes.
    shown = {name: fitting.that_fit(ids, fitting.ROOM // len(lists)) for name, ids in lists.items()}
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
    await authority.require_operator(server, caller, None, "backfill memory records")
    if asked.scope_pubkey is not None:
        raise errors.MemoryInvalidError("`scope_pubkey` is not taken: receipts and records are correlated as a whole")
    action = "memory.backfill.dry_run" if asked.dry_run else "memory.backfill.apply"
    facts = Facts(apply=not asked.dry_run)
    await authority.require(server, caller, action, agent_id="memory:backfill", facts=facts)
    receipts = await server.receipts.recent(2**32, keep=lambda receipt: receipt.resource == "memory")
    found = await server.memory.backfill(receipts, apply=not asked.dry_run)
    answer = responses.MemoryRecordsBackfilled(
        row_count=len(found), savepoint_name=stores.BACKFILL_SAVEPOINT, dry_run=asked.dry_run
    )
    row = answer.model_dump(exclude={"kind"})
    await server.audit.append("memory_record_backfill_applied", row, issuer=caller.agent)
    return answer


# Shared -------------------------------------------------------------------------------------------------------


async def _found(server: Server, caller: Caller, record_id: str) -> MemoryRecord | None:
    """The record, as far as the caller may know of it."""
    record: MemoryRecord | None = await server.memory.get(record_id)
    return record if record is not None and _owner(caller) in (None, record.owner.pubkey) else None


async def _visible(server: Server, caller: Caller, record_id: str) -> MemoryRecord:
    record = await _found(server, caller, record_id)
    if record is None:
        raise _missing(record_id)
    return record


def _missing(record_id: str) -> errors.NoMemoryError:
    return errors.NoMemoryError(f"there is no memory `{record_id[:128]}`")


def _reason(text: str) -> str:
    if not text.strip() or len(text) > MAX_REASON:
        raise errors.MemoryInvalidError(f"a reason is needed, of at most {MAX_REASON} characters")
    return text


HANDLERS: Final[Mapping[str, Handler]] = {
    "recent_memory": recent_memory,
    "search_memory": search_memory,
    "purge_memory": purge_memory,
    "repair_memory": repair_memory,
    "compact_memory": compact_memory,
    "backfill_memory_records": backfill_memory_records,
    "put_memory": put_memory,
    "promote_memory": promote_memory,
}
