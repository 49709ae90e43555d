"""The tool ``spawn`` of an agent's endpoint: its schema, its arguments, and the outcome of a child as its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NAME: Final = "spawn"
# A text as large as the broker takes one (sandbox.broker.spawn_request).
TEXT_BYTES: Final = 512 * 1024
_AGENT_CHARACTERS: Final = 128
ADVERTISED: Final[dict[str, Any]] = {
    "name": NAME,
    "description": "Start another agent with a text, wait until it has ended, and return its answer.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "agent": {"type": "string", "description": "the agent's id", "maxLength": _AGENT_CHARACTERS},
            "text": {"type": "string", "description": "its task"},
        },
        "required": ["agent", "text"],
        "additionalProperties": False,
    },
}


def check(arguments: Mapping[str, Any]) -> str:
    """Return why these are no arguments of it; nothing where they are."""
    if set(arguments) != {"agent", "text"} or not all(isinstance(one, str) for one in arguments.values()):
        return f"`{NAME}` takes `agent` and `text`, both texts"
    if len(arguments["agent"]) > _AGENT_CHARACTERS or len(arguments["text"].encode("utf-8", "replace")) > TEXT_BYTES:
        return f"`agent` has at most {_AGENT_CHARACTERS} characters, `text` at most {TEXT_BYTES} bytes"
    return ""


def result(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outcome of a child as the result of the call."""
    if "ok" not in outcome:
        error = outcome["error"]
        lines = [f"{error['code']}: {error['message']}", error.get("hint", "")]
        return failed("\n".join(line for line in lines if line))
    done = outcome["ok"]
    about = {"run": done["run"], "sources": done["sources"]}
    return {"content": [{"type": "text", "text": done["text"]}], "structuredContent": about, "isError": False}


def failed(said: str) -> dict[str, Any]:
    """Return a result that says why there is none."""
    return {"content": [{"type": "text", "text": said}], "isError": True}
