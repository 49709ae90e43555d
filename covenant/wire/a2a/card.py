"""The card of an agent: one document that clients of version 0.3 and of version 1.0 both read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

WELL_KNOWN: Final = ".well-known/agent-card.json"
_TEXT: Final = ["text/plain"]
_BINDINGS: Final = ("JSONRPC", "HTTP+JSON")


def card(
    *, url: str, name: str, about: str, version: str, agent_id: str, tags: Sequence[str], push: bool
) -> dict[str, Any]:
    """Return the card of an agent that is served at ``url``. It has one skill, which is the agent itself."""
    skill = {"id": agent_id, "name": name, "description": about, "tags": list(tags), "examples": []}
    return {
        "name": name,
        "description": about,
        "version": version,
        "capabilities": {
            "streaming": True,
            "pushNotifications": push,
            "extendedAgentCard": False,
            "stateTransitionHistory": False,
        },
        "defaultInputModes": _TEXT,
        "defaultOutputModes": _TEXT,
        "skills": [skill],
        # Version 1.0.
        "supportedInterfaces": [
            {"url": url, "protocolBinding": binding, "protocolVersion": spoken}
            for spoken in ("1.0", "0.3")
            for binding in _BINDINGS
        ],
        "securityRequirements": [{"schemes": {"bearer": {"list": []}}}],
        # Version 0.3.
        "protocolVersion": "0.3.0",
        "url": url,
        "preferredTransport": "JSONRPC",
        "additionalInterfaces": [{"url": url, "transport": binding} for binding in _BINDINGS],
        "security": [{"bearer": []}],
        "supportsAuthenticatedExtendedCard": False,
        # Either version reads its own fields of a scheme and ignores the other's.
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer", "httpAuthSecurityScheme": {"scheme": "bearer"}}
        },
    }
