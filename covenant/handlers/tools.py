"""The tool requests: any caller may list tools; each call needs a grant and valid arguments, and writes a row.

The log has only a hash of a call's arguments.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any, Final

import anyio

from covenant.handlers import paging
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.wire import requests, responses
from policy import errors

_AUTHORITY: Final = "tools"
# For the row of a call whose client disconnected.
_WRITING_SECONDS: Final = 10.0


async def list_tools(server: Server, caller: Caller, asked: requests.ListTools) -> responses.ToolList:
    """Return the tools, sorted by name: those after the cursor, up to the limit and as far as they fit.

    A cursor is the last name of the page before, so a tool that comes or goes meanwhile hides no other.
    """
    after = asked.cursor or ""
    specs = [spec for spec in server.tools.specs() if spec.name > after]
    page = specs if asked.limit is None else specs[: asked.limit]
    tools, is_cut = paging.cut(page)
    more = is_cut or len(page) < len(specs)
    return responses.ToolList(tools=tools, next_cursor=tools[-1].name if more and tools else None)


async def call_tool(server: Server, caller: Caller, asked: requests.CallTool) -> responses.ToolResult:
    """Call a tool: (1) the caller may, with these arguments, (2) they fit the tool's schema, (3) count a use of a
    metered grant, durably, (4) call the tool, (5) write the row, for any outcome. An answer is withheld if the right to
    the call has ended before it comes.

    Raises:
        errors.CapabilityMissingError, errors.CapabilityScopeError, errors.CapabilityExhaustedError,
        errors.NoToolError, errors.ToolArgumentsError, errors.BusyError, errors.ToolError
    """
    name, arguments = asked.name, {} if asked.arguments is None else asked.arguments
    if name not in server.tools:
        # Every caller may list the tools, so this reveals nothing; and no grant is searched under a made-up name.
        raise errors.NoToolError(f"there is no tool `{name[:120]}`", hint="covenant tools list")
    hashed = _hash(arguments)
    # (1)
    facts = authorization.RequestFacts(tool=name, arguments=arguments)
    signed = await authorization.require(server, caller, f"tool.call.{name}", agent_id=_AUTHORITY, facts=facts)
    # (2)
    try:
        await server.tools.check(name, arguments)
    except errors.ToolArgumentsError as e:
        row = {"tool": name, "arguments_hash_hex": hashed, "reason": e.message}
        await server.audit.append("tool_call_schema_rejected", row, caller.agent)
        raise
    # (3)
    await authorization.consume(server, [signed])
    await authorization.still_holds(server, caller, f"tool.call.{name}", agent_id=_AUTHORITY, facts=facts)
    # (4) and (5)
    began, outcome = time.monotonic(), "failed"
    try:
        answer = await server.tools.call(name, arguments, caller=caller.agent.pubkey)
        outcome = "withheld"
        await authorization.still_holds(server, caller, f"tool.call.{name}", agent_id=_AUTHORITY, facts=facts)
        outcome = "error" if answer.is_error else "ok"
    finally:
        with anyio.move_on_after(_WRITING_SECONDS, shield=True):
            completed = {
                "tool": name,
                "arguments_hash_hex": hashed,
                "duration_ms": int((time.monotonic() - began) * 1000),
                "outcome": outcome,
            }
            await server.audit.append("tool_call_completed", completed, caller.agent)
    content = answer.content if asked.extended else tuple(map(_decodable, answer.content))
    return responses.ToolResult(content=content, is_error=answer.is_error)


def _decodable(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block that version 1's clients decode; another one is the value of a block of JSON."""
    is_text = block.get("type") == "text" and isinstance(block.get("text"), str)
    is_json = block.get("type") == "json" and "value" in block
    return block if is_text or is_json else {"type": "json", "value": block}


def _hash(arguments: Any) -> str:
    """Return the SHA-256 of the arguments as JSON with sorted keys and without spaces."""
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


HANDLERS: Final[Mapping[str, Handler]] = {"list_tools": list_tools, "call_tool": call_tool}
