"""The result of an earlier intent, from memory: version 1's ``GET /intents/:id/result``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.wire import requests, responses
from policy import errors
from policy.signing import strict_json


async def get_intent_result(server: Server, caller: Caller, asked: requests.GetIntentResult) -> responses.IntentResult:
    """Return the result that was stored as working memory under the intent's id.

    No grant is required: it was the answer to the caller's own request. The operator may see all results.

    Raises:
        errors.NoMemoryError: none is stored, or it belongs to another caller; the error is the same.
        errors.MemoryConflictError: the intent has not ended.
    """
    shown = strict_json.shown(asked.intent_id)
    so_far = server.live.so_far(asked.intent_id)
    if so_far and (caller.operator or so_far[0].owner == caller.agent.pubkey):
        raise errors.MemoryConflictError(f"intent `{shown}` has not ended", hint="follow its events")
    record = await server.memory.get(asked.intent_id)
    # A record that a peer wrote itself has no intent's text.
    known: dict[str, Any] = record.metadata if record is not None and isinstance(record.metadata, dict) else {}
    mine = record is not None and (caller.operator or record.owner.pubkey == caller.agent.pubkey)
    if record is None or not mine or "intent_text" not in known:
        hint = "give a whole id: covenant audit recent --kind intent_dispatched shows those of intents with an answer"
        raise errors.NoMemoryError(f"no result of an intent `{shown}` is kept", hint=hint)
    sources = known.get("sources")
    words = {name: known[name] for name in ("agent_id", "run_id", "policy_digest") if isinstance(known.get(name), str)}
    return responses.IntentResult(
        intent_id=record.id,
        status=str(known.get("status", "ok")),
        text=record.text,
        sources=tuple(map(str, sources)) if isinstance(sources, list) else (),
        settlement=await server.receipts.get(record.id),
        **words,
    )


HANDLERS: Final[Mapping[str, Handler]] = {"get_intent_result": get_intent_result}
