"""The supervisor's end of a service gate's line: each request that was passed on becomes one row of the log.

What the gate says is checked: it is the process that reads the agent's bytes. A request that had begun when the gate
ended has its row too, with what is known of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct, structs

from policy.grants.services import ServiceSet, WebSet
from sandbox.network.gate.rows import GateRows, RowShapes, RowTerms, read_row
from sandbox.network.service.a2a import messages

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
MESSAGE_BYTES: Final = 2048
_AT_ONCE: Final = 64
# An honest gate has no more under way (server.AT_ONCE).
_UNDER_WAY: Final = 1024


class Asked(Struct, frozen=True):
    """One request to a model. ``status`` is 0 where no provider answered; ``counted``: by the provider's own numbers;
    ``whole``: all of the answer reached the agent."""

    provider: str
    model: str
    path: str
    stream: bool
    status: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    whole: bool = False
    duration_ms: int = 0


class WebAsked(Struct, frozen=True):
    """One search or page. ``target`` is a provider of searches, or the host of the page."""

    service: str
    target: str
    status: int = 0
    results: int = 0
    bytes: int = 0
    duration_ms: int = 0


class AgentAsked(Struct, frozen=True):
    """One call to another agent over A2A. ``request_sha256`` is the digest of the call."""

    peer: str
    method: str
    request_sha256: str
    status: int = 0
    bytes: int = 0
    duration_ms: int = 0


class TelemetryRelayed(Struct, frozen=True):
    """One request of the agent's own telemetry: its records, those that the collector rejected, and its bytes."""

    signal: str
    records: int
    bytes: int
    status: int = 0
    rejected: int = 0
    duration_ms: int = 0


Row = Asked | WebAsked | AgentAsked | TelemetryRelayed
Told = Callable[[Row], None]


def _begins(row: type[Row]) -> dict[str, type]:
    """The fields that are known when a request begins: those without a default."""
    return {"number": int} | {field.name: field.type for field in structs.fields(row) if field.required}


def _ends(row: type[Row]) -> dict[str, type]:
    """The fields that are known when it has ended."""
    return {"number": int} | {field.name: field.type for field in structs.fields(row) if not field.required}


_SHAPES: Final[RowShapes] = {
    # A model's tokens are guessed at first, and its provider is said twice.
    "begun": {**_begins(Asked), "input_tokens": int},
    "ended": {**_ends(Asked), "provider": str},
    "web_begun": _begins(WebAsked),
    "web_ended": _ends(WebAsked),
    "agent_begun": _begins(AgentAsked),
    "agent_ended": _ends(AgentAsked),
    "telemetry_begun": _begins(TelemetryRelayed),
    "telemetry_ended": _ends(TelemetryRelayed),
}


class ModelLedger(GateRows):
    """Serves one gate. ``plan`` is the ``services`` part of gates.json."""

    def __init__(self, plan: Mapping[str, Any], told: Told) -> None:
        self._granted = ServiceSet.of((one["provider"], one["pattern"]) for one in plan.get("models", ()))
        self._providers = frozenset(one["provider"] for one in plan.get("models", ()))
        web = plan.get("web") or WebSet().canonical()
        self._web = WebSet.of(web["search"], web["fetch"])
        self._agents = frozenset(plan.get("agents", ()))
        self._signals = frozenset((plan.get("telemetry") or {}).get("signals", ()))
        self._told = told
        self._beginnings: dict[str, Callable[[dict[str, Any]], Row | None]] = {
            "begun": self._begun,
            "web_begun": self._web_begun,
            "agent_begun": self._agent_begun,
            "telemetry_begun": self._telemetry_begun,
        }
        self._under_way: dict[int, Row] = {}
        super().__init__(RowTerms("model", "tells what it may not", MESSAGE_BYTES, _AT_ONCE, self._one))

    def finish(self) -> None:
        """Write the rest, once the gate has ended: also the requests that it could not end."""
        self.rest()
        while self._under_way:
            self._told(self._under_way.pop(next(iter(self._under_way))))

    def _one(self, message: bytes) -> bool:
        row = read_row(message, _SHAPES)
        if row is None:
            return False
        kind, number = row.pop("kind"), row.pop("number")
        if kind in self._beginnings:
            begun = self._beginnings[kind](row)
            if begun is None or number in self._under_way or len(self._under_way) >= _UNDER_WAY:
                return False
            self._under_way[number] = begun
            return True
        asked = self._under_way.pop(number, None)
        if kind == "ended" and isinstance(asked, Asked) and row["provider"] in self._providers:
            self._told(Asked(model=asked.model, path=asked.path, stream=asked.stream, **row))
            return True
        if kind == "web_ended" and isinstance(asked, WebAsked):
            self._told(WebAsked(asked.service, asked.target, **row))
            return True
        if kind == "agent_ended" and isinstance(asked, AgentAsked):
            self._told(AgentAsked(asked.peer, asked.method, asked.request_sha256, **row))
            return True
        if kind == "telemetry_ended" and isinstance(asked, TelemetryRelayed):
            self._told(TelemetryRelayed(asked.signal, asked.records, asked.bytes, **row))
            return True
        return False

    def _begun(self, row: dict[str, Any]) -> Asked | None:
        listed = row["model"] == "" or self._granted.holds(row["provider"], row["model"])
        return Asked(**row) if row["provider"] in self._providers and listed else None

    def _web_begun(self, row: dict[str, Any]) -> WebAsked | None:
        held = {"search": self._web.searches, "fetch": self._web.holds}.get(row["service"])
        return WebAsked(**row) if held is not None and held(row["target"]) else None

    def _agent_begun(self, row: dict[str, Any]) -> AgentAsked | None:
        told = row["method"] == messages.CARD or row["method"] in messages.METHODS
        return (
            AgentAsked(**row)
            if told and row["peer"] in self._agents and _DIGEST.fullmatch(row["request_sha256"])
            else None
        )

    def _telemetry_begun(self, row: dict[str, Any]) -> TelemetryRelayed | None:
        return TelemetryRelayed(**row) if row["signal"] in self._signals else None
