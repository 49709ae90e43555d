"""The requests about intents: submit one, only once if it has a key, and resume one that waited for credits."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

import anyio

from covenant.handlers import billing
from covenant.handlers.caller import Caller
from covenant.handlers.intents import pipeline, recovery
from covenant.handlers.intents.pipeline import KEY, KEY_WORD, SUBMITTER, IntentPipeline
from covenant.handlers.server import Handler, Server
from covenant.runtime.packages import Card
from covenant.wire import parts, requests, responses
from covenant.wire.types import MemoryRecord, Priority, SettlementReceipt
from policy import errors

# The namespace of intents with a key: the same caller and key give the same id after every start.
_KEYED: Final = uuid.UUID("6f0c3c2e-5f4b-5d0a-9a54-1c1f6e0f7a11")
# The most times that a key is tried again after its intent failed.
_MOST_TRIES: Final = 16
# The most intents whose complete end is remembered.
MOST_WHOLE: Final = 16_384


async def submit_intent(
    server: Server,
    caller: Caller,
    asked: requests.SubmitIntent,
    *,
    precondition: Callable[[Card | None], Awaitable[None]] | None = None,
    missing_grant: Callable[[Card], str | None] = lambda card: None,
) -> responses.IntentResult:
    """Execute the text; see ``covenant.handlers.intents.pipeline``."""
    key = asked.idempotency_key
    one = IntentPipeline(
        server,
        caller,
        asked.text,
        agent=asked.agent,
        priority=asked.priority,
        key=key,
        precondition=precondition,
        missing_grant=missing_grant,
    )
    return await one.go() if key is None else await _once(one, key)


async def resume_intent(server: Server, caller: Caller, asked: requests.ResumeIntent) -> responses.IntentResult:
    """Start a paused intent again under a new id. Its submitter may do so, once.

    An intent that was submitted under a key is resumed under that key, so that it is done once by either request.

    Raises:
        errors.NoCheckpointError: none of the caller's intents waits under this id.
        errors.BudgetExhaustedError: there are still too few credits; the intent still waits.
    """
    mine = (one for one in server.checkpoints.active() if one.resume_state.get(SUBMITTER) == caller.agent.pubkey)
    found = next((one for one in mine if one.intent_id == asked.intent_id), None)
    if found is None:
        raise errors.NoCheckpointError(f"no intent `{asked.intent_id}` of `{caller.agent.display}` waits to be resumed")
    tokens = server.budget.tokens(found.agent)
    if tokens is not None and tokens < found.requested_credits:
        when = billing.when_enough(server, found.agent, found.requested_credits)
        raise errors.BudgetExhaustedError(
            f"budget exhausted: intent `{found.intent_id}` still waits for credits of `{found.agent.display}`",
            hint=f"there are enough {when}: covenant intents resume {found.intent_id}",
        )
    state = found.resume_state
    one = IntentPipeline(
        server,
        caller,
        state["intent_text"],
        agent=state["agent_id"],
        priority=Priority(state["priority"]),
        resumes=found,
    )
    kept = state.get(KEY)
    if not isinstance(kept, str):
        return await one.go()
    one.key = kept.removeprefix(KEY_WORD)
    result = await _once(one, one.key)
    with contextlib.suppress(errors.NoCheckpointError):
        # It was done meanwhile, so its checkpoint is no longer needed.
        await server.checkpoints.claim(found.intent_id, found.agent)
    return result


async def _once(one: IntentPipeline, key: str) -> responses.IntentResult:
    """Return the stored answer of this key if its intent succeeded, else run it. Concurrent requests wait.

    The stored answer is the record in memory, so it lasts as long as the record and survives a restart.

    An intent whose answer was not stored or was deleted is not run again. Its receipt proves that it ran, and the log
    that it did not fail.

    Raises:
        errors.MemoryConflictError: another intent has this key, it failed too often, or its answer is not stored.
    """
    server = one.server
    on_their_way: dict[str, anyio.Event] = server.runners.on_their_way
    ids = [str(uuid.uuid5(_KEYED, f"{one.caller.agent.pubkey}/{number}/{key}")) for number in range(_MOST_TRIES)]
    failed: set[str] = set()
    for one.intent_id in ids:
        while (way := on_their_way.get(one.intent_id)) is not None:
            await way.wait()
        # INVARIANT: no await between the loop above and this line, so that only one request holds the id.
        way = on_their_way[one.intent_id] = anyio.Event()
        try:
            if one.intent_id in server.unfinished:
                await server.unfinished.write()
            record = await server.memory.get(one.intent_id)
            if record is not None:
                return await _again(one, record)
            receipt = await server.receipts.get(one.intent_id)
            if receipt is None:
                result = await one.go()
                _note_whole(server, one.intent_id)
                return result
            if one.intent_id not in failed:
                if one.precondition is None:
                    # The search costs time, and no credits.
                    server.rates.admit(one.caller, server.refusals, server.now_ms())
                # One scan for all ids: it reads the log from there to its end.
                failed = await _failed(server, one.caller, ids, receipt.settled_at)
            if one.intent_id not in failed:
                if (echoed := await _echoed(one, receipt)) is not None:
                    return echoed
                raise errors.MemoryConflictError(
                    "the intent with this key was done, and its answer is not kept",
                    hint="use another key to have it done again",
                )
        finally:
            del on_their_way[one.intent_id]
            way.set()
    raise errors.MemoryConflictError(f"the intent with this key failed {_MOST_TRIES} times", hint="use another key")


async def _echoed(one: IntentPipeline, receipt: SettlementReceipt) -> responses.IntentResult | None:
    """Rebuild the answer of an intent without an agent that memory had no room for. It depends on the text alone; its
    row has the hash. Returns None if an agent did the intent.

    Raises:
        errors.MemoryConflictError: the text or the requested agent differs.
    """

    def is_its(row: parts.AuditEvent) -> bool:
        return bool(row.kind["type"] == "intent_dispatched" and row.kind["intent_id"] == one.intent_id)

    found = await one.server.audit.scan(is_its, 1, since_ms=receipt.settled_at, issuer_pubkey=one.caller.agent.pubkey)
    row = next((event.kind for event in found.events), None)
    if row is None or row["matched_agent"] is not None:
        return None
    text = pipeline.echo(one.text)
    if one.agent is not None or row["result_hash_hex"] != hashlib.sha256(text.encode()).hexdigest():
        raise errors.MemoryConflictError("another intent had this idempotency key", hint="one key, one intent")
    return responses.IntentResult(intent_id=one.intent_id, status="ok", text=text, settlement=receipt)


async def _failed(server: Server, caller: Caller, ids: Collection[str], since_ms: int) -> set[str]:
    """Return the intents that ran and failed according to the log. An intent without rows does not count as failed."""
    failed, done, known = set[str](), set[str](), frozenset(ids)

    def note(row: parts.AuditEvent) -> bool:
        kind, intent_id = row.kind, str(row.kind.get("intent_id"))
        if intent_id in known:
            if kind["type"] == "intent_dispatched" or (kind["type"] == "run_usage" and kind["status"] == "ok"):
                done.add(intent_id)
            elif kind["type"] == "intent_failed" and kind["stage"] != "memory":
                failed.add(intent_id)
        return False

    await server.audit.scan(note, 1, since_ms=since_ms, issuer_pubkey=caller.agent.pubkey)
    return failed - done


def _note_whole(server: Server, intent_id: str) -> None:
    if len(server.whole) >= MOST_WHOLE:
        del server.whole[next(iter(server.whole))]
    server.whole[intent_id] = None


async def _again(one: IntentPipeline, record: MemoryRecord) -> responses.IntentResult:
    known = record.metadata if isinstance(record.metadata, dict) else {}
    if known.get("intent_text") != one.text or one.agent not in {None, known.get("agent_id")}:
        raise errors.MemoryConflictError("another intent had this idempotency key", hint="one key, one intent")
    server = one.server
    if record.id not in server.whole:
        if one.precondition is None:
            # The check reads the log from there on, and costs the caller no credits.
            server.rates.admit(one.caller, server.refusals, server.now_ms())
        with anyio.CancelScope(shield=True):
            await recovery.finish(server, record)
        _note_whole(server, record.id)
    return responses.IntentResult(
        intent_id=record.id,
        status=str(known.get("status", "ok")),
        text=record.text,
        sources=tuple(known.get("sources", ())),
        settlement=await server.receipts.get(record.id),
        agent_id=known.get("agent_id"),
        run_id=known.get("run_id"),
        policy_digest=known.get("policy_digest"),
    )


HANDLERS: Final[Mapping[str, Handler]] = {"submit_intent": submit_intent, "resume_intent": resume_intent}
