"""The daemon as an MCP server: a message in, a reply or a request of the wire out.

The same table serves `covenant mcp` (stdio, in the client's own process) and `/mcp` of the HTTP gateway. Nothing here
decides: a call of a tool is the request of the wire of the same caller, which needs the same grants.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from covenant.wire import requests
from policy import errors, wire_json
from policy.manifest.tools.advertised import AdvertisedTool
from policy.signing import strict_json
from sandbox.network.tools import revisions
from sandbox.network.tools.revisions import Refusal

_NAME: Final = ("covenant", "1")
_INVALID, _NO_METHOD, _BAD_PARAMS = -32600, -32601, -32602
_ID_CHARACTERS: Final = 256
# Fields of a request that are no argument of a tool.
_UNSAID: Final = frozenset({"kind", "prefer_stream"})
# Fields with one value here: a client of MCP takes every block.
_FIXED: Final[Mapping[str, Mapping[str, Any]]] = {"call_tool": {"extended": True}}
# The tools: the request that each is, and whether it changes nothing.
TOOLS: Final[Mapping[str, tuple[str, bool, str]]] = {
    "intent_submit": ("submit_intent", False, "Submit an intent to an agent and return its result."),
    "intent_result": ("get_intent_result", True, "Return the result of an intent that was submitted."),
    "memory_search": ("search_memory", True, "Search memory records by meaning and words."),
    "memory_recent": ("recent_memory", True, "Return the newest memory records."),
    "memory_put": ("put_memory", False, "Write a memory record of the caller's own."),
    "audit_recent": ("recent_audit", True, "Return the caller's newest audit events."),
    "audit_verify": ("verify_audit_integrity", True, "Verify the audit events against their chain."),
    "denials_recent": ("recent_denials", True, "Return what agents were denied, and the lines that would allow it."),
    "agents_list": ("list_agents", True, "List the agent packages, and what is wrong with them."),
    "capabilities_recent": ("recent_capabilities", True, "Return grants of or by the caller."),
    "tools_list": ("list_tools", True, "List the tools of the daemon."),
    "tools_call": ("call_tool", False, "Call a tool of the daemon by its name."),
}

# The tools that a run may have, each with the action that its caller needs for any call; nothing where the request asks
# for one of its own or needs none. An intent is not submitted by a run: `spawn` and A2A hold that to the manifest.
OF_RUNS: Final[Mapping[str, str]] = {
    "intent_result": "",
    "memory_search": "memory.read",
    "memory_recent": "memory.read",
    "memory_put": "memory.write",
    "audit_recent": "",
    "audit_verify": "",
    "denials_recent": "",
    "agents_list": "",
    "capabilities_recent": "",
    "tools_list": "",
    "tools_call": "",
}


class McpCall(Struct, frozen=True):
    """A call of a tool: the id of its message, the request that it is, and what its result has beside its own keys."""

    id: str | int
    request: requests.Request
    stamp: Mapping[str, Any]


class McpReply(Struct, frozen=True):
    """A reply, and its status over HTTP."""

    message: bytes
    status: int = 200


def take(raw: bytes, headers: Mapping[str, str] | None = None) -> McpReply | McpCall | None:
    """Return the reply to a message, the request to ask for, or None where the message has no reply.

    ``headers`` are those of MCP over HTTP, by names in lower case; None over stdio.

    Raises:
        errors.MalformedRequestError: it is no message: HTTP answers with status 400, stdio with ``malformed``.
    """
    message = wire_json.read(raw)
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise errors.MalformedRequestError("a message is one JSON-RPC 2.0 object")
    method, number, params = message.get("method"), message.get("id"), message.get("params", {})
    if not isinstance(method, str):
        # An answer: nothing was asked of a client.
        if "method" not in message and ("result" in message or "error" in message):
            return None
        raise errors.MalformedRequestError("there is no method")
    if not isinstance(params, dict):
        raise errors.MalformedRequestError("parameters are given by name")
    if "id" not in message:
        return None
    if isinstance(number, bool) or not isinstance(number, str | int) or len(str(number)) > _ID_CHARACTERS:
        raise errors.MalformedRequestError("an id is a string or a whole number")
    alone = revisions.stands_alone(method, params, headers)
    if isinstance(alone, Refusal):
        return _refusal(number, alone)
    stamp = revisions.stamp(*_NAME) if alone else {}
    if method == "tools/call":
        return _asked(number, params, stamp)
    if not alone:
        return McpReply(_own(number, method, params))
    result = revisions.own_result(method, stamp, _listed())
    return _refusal(number, result) if isinstance(result, Refusal) else McpReply(reply(number, result))


def _own(number: str | int, method: str, params: Mapping[str, Any]) -> bytes:
    """Answer a request of a revision with `initialize`."""
    if method == "initialize":
        return reply(number, _about(params))
    if method == "tools/list":
        return reply(number, {"tools": _listed()})
    if method == "ping":
        return reply(number, {})
    return _error(number, _NO_METHOD, f"there is no method `{strict_json.shown(method)}`")


def advertised() -> tuple[AdvertisedTool, ...]:
    """Return the tools that a run may have, as the daemon advertises them."""
    return tuple(
        AdvertisedTool(one["name"], one["description"], one["inputSchema"])
        for one in _listed()
        if one["name"] in OF_RUNS
    )


def name_of(asked: McpCall) -> str:
    """Return the name of the tool that a call is of."""
    return next(name for name, (kind, _, _) in TOOLS.items() if kind == asked.request.kind)


def answer(asked: McpCall, document: Mapping[str, Any]) -> bytes:
    """Return the reply to a call: the response of the wire, which may be an error."""
    if document.get("kind") == "tool_result":
        return reply(asked.id, {"content": document["content"], "isError": document["is_error"], **asked.stamp})
    is_error = document.get("kind") in ("error", "stream_error")
    text = json.dumps(document, ensure_ascii=False)
    structured = {} if is_error else {"structuredContent": document}
    content = [{"type": "text", "text": text}]
    return reply(asked.id, {"content": content, "isError": is_error, **structured, **asked.stamp})


def malformed(error: errors.MalformedRequestError) -> bytes:
    """Return the reply to what is no message."""
    return _error(None, _INVALID, error.message)


def reply(number: str | int, result: Mapping[str, Any]) -> bytes:
    """Return a reply with a result."""
    return _message({"id": number, "result": result})


def _about(params: Mapping[str, Any]) -> dict[str, Any]:
    name, version = _NAME
    return {
        "protocolVersion": revisions.negotiated(params.get("protocolVersion")),
        "capabilities": {"tools": {}},
        "serverInfo": {"name": name, "version": version},
    }


def _asked(number: str | int, params: Mapping[str, Any], stamp: Mapping[str, Any]) -> McpReply | McpCall:
    name, arguments = params.get("name"), params.get("arguments", {})
    if not isinstance(name, str) or name not in TOOLS:
        return McpReply(_error(number, _BAD_PARAMS, f"there is no tool `{strict_json.shown(str(name))}`"))
    kind = TOOLS[name][0]
    known = requests.KINDS[kind].model_fields.keys() - _unsaid(kind)
    if not isinstance(arguments, dict) or (extra := sorted(arguments.keys() - known)):
        said = f"unknown argument `{strict_json.shown(extra[0])}`" if isinstance(arguments, dict) else "no object"
        return _refused(number, f"the arguments of `{name}`: {said}", stamp)
    try:
        return McpCall(
            number, requests.parse(json.dumps({**arguments, **_FIXED.get(kind, {}), "kind": kind}).encode()), stamp
        )
    except errors.MalformedRequestError as e:
        return _refused(number, f"the arguments of `{name}`: {e.message}", stamp)


def _refused(number: str | int, message: str, stamp: Mapping[str, Any]) -> McpReply:
    """An error of the tool, which a model reads and mends."""
    return McpReply(reply(number, {"content": [{"type": "text", "text": message}], "isError": True, **stamp}))


def _refusal(number: str | int, refusal: Refusal) -> McpReply:
    status = 404 if refusal.code == revisions.NO_METHOD else 400
    return McpReply(_message({"id": number, "error": refusal.error()}), status)


@functools.cache
def _tools() -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "name": name,
            "description": about,
            "inputSchema": _schema(kind),
            "annotations": {"readOnlyHint": reads, "destructiveHint": False, "openWorldHint": not reads},
        }
        for name, (kind, reads, about) in TOOLS.items()
    )


def _listed() -> list[dict[str, Any]]:
    return copy.deepcopy(list(_tools()))


def _schema(kind: str) -> dict[str, Any]:
    whole = requests.KINDS[kind].model_json_schema()
    properties = {name: one for name, one in whole["properties"].items() if name not in _unsaid(kind)}
    required = [name for name in whole.get("required", []) if name in properties]
    defined = {"$defs": whole["$defs"]} if "$defs" in whole else {}
    closed = {"type": "object", "required": required, "additionalProperties": False}
    return {**closed, "properties": _whole(properties), **_whole(defined)}


def _unsaid(kind: str) -> frozenset[str]:
    return _UNSAID | _FIXED.get(kind, {}).keys()


def _whole(value: Any) -> Any:
    """Return a schema with whole numbers as integers: tools.json, where an agent declares it, has no others."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _error(number: str | int | None, code: int, message: str) -> bytes:
    return _message({"id": number, "error": {"code": code, "message": message}})


def _message(message: Mapping[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode()
