"""Calls of A2A as the gate reads them: JSON-RPC of versions 1.0 and 0.3, and errors and cards of the same form.

A call is read as the daemon reads it (policy.wire_json), and written anew from what was read. So the daemon reads what
the gate judged.
"""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401 - wire_json quotes by it, once the gate can open no file
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from policy import errors, wire_json
from sandbox.network.service.shapes import RefusedError

WELL_KNOWN: Final = ".well-known/agent-card.json"
CARD: Final = "card"
METHODS: Final = frozenset({
    "message/send", "message/stream", "tasks/get", "tasks/cancel", "tasks/resubscribe",
    "SendMessage", "SendStreamingMessage", "GetTask", "ListTasks", "CancelTask", "SubscribeToTask",
})  # fmt: skip
_PUSH: Final = "push"
_NUMBERS: Final = {"malformed": -32600, "path_refused": -32601, "content_refused": -32003, "provider_failed": -32603}
_OURS: Final = -32000
# Refusals that JSON-RPC says by itself; HTTP says the status of the others.
_BY_RPC: Final = frozenset({"malformed", "path_refused", "content_refused"})

Number = str | int | None


class AgentCall(NamedTuple):
    """One call: its JSON-RPC id, its method, and the message to pass on."""

    number: Number
    method: str
    message: bytes


class RpcRefusedError(RefusedError):
    """Raised for a call whose JSON-RPC id is known."""

    def __init__(self, number: Number, status: int, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.number = number


def read(body: bytes) -> AgentCall:
    """Return the call of a body.

    Raises:
        RefusedError: it is no call of JSON-RPC, or one that is not passed on.
    """
    try:
        document = wire_json.read(body)
    except errors.MalformedRequestError as e:
        raise RefusedError(400, "malformed", f"the body: {e.message}") from e
    if not isinstance(document, dict) or document.get("jsonrpc") != "2.0":
        raise RefusedError(400, "malformed", "a call is one message of JSON-RPC 2.0")
    number, method, params = document.get("id"), document.get("method"), document.get("params", {})
    if isinstance(number, bool) or not isinstance(number, str | int) or len(str(number)) > 256:
        raise RefusedError(400, "malformed", "a call has an id, a text or a number")
    if not isinstance(method, str) or not isinstance(params, dict):
        raise RpcRefusedError(number, 400, "malformed", "a call has a method and an object of parameters")
    if _PUSH in method.lower() or _configures_push(params):
        raise RpcRefusedError(number, 403, "content_refused", "an agent has no push notifications: use a stream")
    if method not in METHODS:
        raise RpcRefusedError(number, 404, "path_refused", "the gate passes on messages and tasks alone")
    passed = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    return AgentCall(number, method, json.dumps(passed, separators=(",", ":")).encode())


def _configures_push(params: Mapping[str, Any]) -> bool:
    found = params.get("configuration")
    return isinstance(found, dict) and any(_PUSH in key.lower() for key in found)


def status(refused: RefusedError) -> int:
    """Return the HTTP status of a refusal: JSON-RPC has the code of some, in an answer of status 200."""
    return 200 if isinstance(refused, RpcRefusedError) and refused.code in _BY_RPC else refused.status


def refusal(refused: RefusedError, number: Number = None) -> bytes:
    """Return a refusal as an answer of JSON-RPC."""
    known = refused.number if isinstance(refused, RpcRefusedError) else number
    error = {
        "code": _NUMBERS.get(refused.code, _OURS),
        "message": refused.message,
        "data": [{"reason": refused.code.upper(), "domain": "agents.covenant"}],
    }
    return json.dumps({"jsonrpc": "2.0", "id": known, "error": error}).encode()


def card(body: bytes, url: str) -> bytes:
    """Return an agent's card as it is at the gate: at ``url``, by JSON-RPC alone, without tokens and push.

    Raises:
        ValueError: it is no card.
    """
    try:
        document = wire_json.read(body)
    except errors.MalformedRequestError as e:
        raise ValueError("no card") from e
    if not isinstance(document, dict) or not isinstance(document.get("capabilities"), dict):
        raise ValueError("no card")
    for key in ("security", "securityRequirements", "securitySchemes"):
        document.pop(key, None)
    document["capabilities"]["pushNotifications"] = False
    spoken = [{"url": url, "protocolBinding": "JSONRPC", "protocolVersion": version} for version in ("1.0", "0.3")]
    document |= {"url": url, "preferredTransport": "JSONRPC", "supportedInterfaces": spoken}
    document["additionalInterfaces"] = [{"url": url, "transport": "JSONRPC"}]
    return json.dumps(document, separators=(",", ":")).encode()
