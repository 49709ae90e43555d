"""The memory requests: read, search, write and promote. ``covenant.handlers.memory.maintenance`` has the rest.

Visibility: the operator sees every record, other callers only their own, independent of grants; a grant then limits the
acts on them (covenant-v1.md, section 7). Another owner's record is reported as missing. A read is allowed if its grant
admits some records, and returns only those.

    recent, search     memory.read, or memory.read.<tier> for a tier that is named
    put, promote       memory.write; a promotion touches both tiers

The check is durable before the act, and the act before the response.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio

from covenant.handlers import billing, paging
from covenant.handlers.access import authorization
from covenant.handlers.access.authorization import RequestFacts
from covenant.stores.audit.interface import AuditEntry
from covenant.stores.memory.interface import Room
from covenant.wire import parts, requests, responses
from covenant.wire.types import MemoryRecord, SignedCapability, Tier
from policy import errors

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.server import Handler, Server

_LOG = logging.getLogger(__name__)

# The most records in one response, and the most bytes of them.
MAX_RECORDS: Final = 1000
MAX_ANSWER_BYTES: Final = paging.ROOM
# The most bytes of a record in a response: a larger one could be stored and never read.
MAX_RECORD_BYTES: Final = paging.ROOM
# The limit of each caller but the operator, including answers to its intents: no peer can fill the shared disk.
MAX_OWN: Final = Room(records=100_000, bytes=1024 * 1024 * 1024)
MAX_TEXT_BYTES: Final = 4 * 1024 * 1024
# The most records that are read for a grant that admits only some.
_MOST_LOOKED_AT: Final = 16 * MAX_RECORDS
# The number of records in the first read: avoids holding a thousand of the longest at once.
_AT_FIRST: Final = 32

Find = Callable[[int], Awaitable[Sequence[MemoryRecord]]]


def whose(caller: Caller) -> str | None:
    """Return the owner whose records the caller sees; None means all owners."""
    return None if caller.operator else caller.agent.pubkey


def room_of(caller: Caller) -> Room | None:
    """Return the limits of the caller; None means unlimited."""
    return None if caller.operator else MAX_OWN


async def embedding_of(server: Server, text: str, *, what: str) -> tuple[float, ...]:
    """Return the vector of a text; empty if the embedder fails, since words are found without it. ``what`` names the
    text in our log."""
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
    owner = whose(caller)

    async def find(count: int) -> Sequence[MemoryRecord]:
        found: Sequence[MemoryRecord] = await server.memory.recent(asked.tier, count, owner=owner)
        return found

    return responses.Memories(records=await _shown(signed, find, asked.limit))


async def search_memory(server: Server, caller: Caller, asked: requests.SearchMemory) -> responses.Memories:
    """Records by likeness and words."""
    signed = await _may_read(server, caller, asked.tier)
    owner = whose(caller)
    vector = await embedding_of(server, asked.query, what="a query")

    async def find(count: int) -> Sequence[MemoryRecord]:
        hits = await server.memory.search(vector, asked.query, asked.tier, count, asked.min_relevance, owner=owner)
        return [hit.record for hit in hits]

    return responses.Memories(records=await _shown(signed, find, asked.limit))


async def _may_read(server: Server, caller: Caller, tier: Tier | None) -> SignedCapability:
    facts = RequestFacts(tier=tier, apply=False, filtered=True)
    return await authorization.require(server, caller, "memory.read", agent_id="memory:read", facts=facts)


async def _shown(signed: SignedCapability, find: Find, limit: int) -> tuple[MemoryRecord, ...]:
    """Return the first records that the grant admits, as many as fit."""
    wanted = min(limit, MAX_RECORDS)
    count = min(wanted, _AT_FIRST)
    while True:
        found = await find(count)
        admitted = [record for record in found if _admits(signed, record)][:wanted]
        shown, full = paging.cut(admitted, MAX_ANSWER_BYTES)
        if full or len(admitted) >= wanted or len(found) < count or count >= _MOST_LOOKED_AT:
            return shown
        count *= 4


def _admits(signed: SignedCapability, record: MemoryRecord) -> bool:
    return authorization.admits_record(signed, tier=record.tier, record_id=record.id, created_at=record.created_at)


# Writing ------------------------------------------------------------------------------------------------------


async def put_memory(server: Server, caller: Caller, asked: requests.PutMemory) -> responses.MemoryStored:
    """Store a record of the caller, with its receipt.

    Raises:
        errors.MemoryInvalidError: the text is empty or too long, or the metadata cannot be stored.
        errors.MemoryFullError: the caller, who is not the operator, has ``MAX_OWN`` already.
        errors.NoMemoryError: the caller has no record that is named as its parent.
        errors.TextIgnoredError: a rule of .covenantignore matches.
    """
    now_ms = server.now_ms()
    record_id = str(uuid.uuid4())
    facts = RequestFacts(tier=asked.tier, record_id=record_id, created_at=now_ms, apply=True)
    await authorization.require(server, caller, "memory.write", agent_id="memory:write", facts=facts)
    # While the receipt of a record waits for room, no other record is stored.
    await server.unfinished.write()
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
    write = _account(server, caller, record)
    try:
        await server.memory.put(record, room=room_of(caller))
    except anyio.get_cancelled_exc_class():

        async def write_if_stored() -> None:
            if await server.memory.get(record.id) is not None:
                await write()

        server.unfinished.keep(record.id, write_if_stored)
        raise
    await server.unfinished.write_or_keep(
        record.id,
        write,
        what=f"the receipt of record `{record.id}`",
        hint="make room on the disk; the record is stored, and its receipt is written then: do not repeat",
    )
    return responses.MemoryStored(record=record)


def _account(server: Server, caller: Caller, record: MemoryRecord) -> Callable[[], Awaitable[None]]:
    """Return a function that writes the receipt and the rows of a stored record, and publishes the record. Each call
    continues where the last one failed or was cut off: there is one receipt, and its rows are written once."""
    receipt = billing.memory_receipt(server, caller, record.id, record.text)
    began = False

    def is_its(row: parts.AuditEvent) -> bool:
        return row.kind["type"] == "receipt_written" and bool(row.kind["receipt_id"] == receipt.id)

    async def write() -> None:
        nonlocal began
        # An equal one again changes nothing.
        await server.receipts.append(receipt)
        if began:
            await server.audit.caught_up()
            if (await server.audit.scan(is_its, 1, since_ms=record.created_at)).events:
                return
        began = True
        try:
            await server.audit.append_all([written(record, "client"), billing.receipt_row(receipt, None)])
        except errors.CovenantError:
            began = False  # nothing of it is in the log
            raise
        server.feed.publish("memory", record)

    return write


def check_size(record: MemoryRecord, *, more: Any = None) -> None:
    """Refuse a record that, with ``more`` added, fits in no response.

    Raises:
        errors.MemoryInvalidError: it is too large, or its text is not valid Unicode.
    """
    try:
        size = paging.size_of(record) + (0 if more is None else paging.size_of(more))
    except ValueError as e:
        raise errors.MemoryInvalidError("text or metadata is not valid Unicode, or no JSON") from e
    if size > MAX_RECORD_BYTES:
        raise errors.MemoryInvalidError(
            f"the record takes {size} bytes on the wire, and {MAX_RECORD_BYTES} are the most",
            hint="a control character takes six",
        )


def written(record: MemoryRecord, reason: str) -> AuditEntry:
    """Return the row of a stored record, with a hash of its text."""
    digest = hashlib.sha256(record.text.encode()).hexdigest()
    about = {"memory_id": record.id, "tier": str(record.tier), "reason": reason, "text_hash_hex": digest}
    return AuditEntry("memory_written", about, record.owner)


async def _refuse_ignored(server: Server, caller: Caller, record_id: str, asked: requests.PutMemory) -> None:
    try:
        metadata = json.dumps(asked.metadata, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as e:
        raise errors.MemoryInvalidError("metadata cannot be stored") from e
    pattern = await server.ignore.find(asked.text) or await server.ignore.find(metadata)
    if pattern is not None:
        row = {"memory_id": record_id, "matched_pattern": pattern}
        await server.audit.append("memory_write_ignored", row, issuer=caller.agent)
        raise errors.TextIgnoredError(
            f"the text matches `{pattern}`", hint="covenant ignore check", where=".covenantignore"
        )


async def promote_memory(server: Server, caller: Caller, asked: requests.PromoteMemory) -> responses.MemoryPromoted:
    """Move a record to a higher tier.

    Raises:
        errors.NoMemoryError: the caller has no such record.
        errors.MemoryConflictError: it is in a higher tier already.
    """
    found = await seen(server, caller, asked.id)
    facts = RequestFacts(
        tiers=(asked.tier,) if found is None else (found.tier, asked.tier),
        record_id=asked.id,
        created_at=None if found is None else found.created_at,
        apply=True,
    )
    await authorization.require(server, caller, "memory.write", agent_id="memory:promote", facts=facts)
    done = await server.memory.promote(asked.id, asked.tier, at_ms=server.now_ms(), owner=whose(caller))
    if done is None:
        raise missing(asked.id)
    # Only a repair of an unreadable row has no record before or after.
    assert isinstance(done.before, MemoryRecord)
    assert isinstance(done.after, MemoryRecord)
    if done.changed:
        row = {"memory_id": asked.id, "from_tier": str(done.before.tier), "to_tier": str(done.after.tier)}
        await server.audit.append("memory_promoted", {**row, "reason": "client"}, issuer=caller.agent)
        server.feed.publish("memory", done.after)
    return responses.MemoryPromoted(record=done.after)


# Shared -------------------------------------------------------------------------------------------------------


async def seen(server: Server, caller: Caller, record_id: str) -> MemoryRecord | None:
    """Return the record if the caller may see it."""
    record: MemoryRecord | None = await server.memory.get(record_id)
    return record if record is not None and whose(caller) in (None, record.owner.pubkey) else None


async def _visible(server: Server, caller: Caller, record_id: str) -> MemoryRecord:
    record = await seen(server, caller, record_id)
    if record is None:
        raise missing(record_id)
    return record


def missing(record_id: str) -> errors.NoMemoryError:
    """Return the error for a missing record; another owner's record gets the same."""
    return errors.NoMemoryError(f"there is no memory `{record_id[:128]}`")


HANDLERS: Final[Mapping[str, Handler]] = {
    "recent_memory": recent_memory,
    "search_memory": search_memory,
    "put_memory": put_memory,
    "promote_memory": promote_memory,
}
