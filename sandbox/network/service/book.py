"""Tell the supervisor of each request that was passed on, when it begins and when it has ended: counts, never content.

A row that cannot be sent at once waits: an agent could otherwise ask while the supervisor is busy, and not be counted.
"""

from __future__ import annotations

import socket
import time

from msgspec import Struct

from sandbox.network.gate.row_sender import RowSender
from sandbox.network.service.shapes import ModelCall


class RequestEntry(Struct):
    """One request under way."""

    number: int
    provider: str
    begun: float


class WebEntry(Struct):
    """One search or page under way."""

    number: int
    begun: float


class AgentEntry(Struct):
    """One call to another agent under way."""

    number: int
    begun: float


class TelemetryEntry(Struct):
    """One request of the agent's own telemetry under way."""

    number: int
    begun: float


class Book:
    """The gate's end of the line to its supervisor, of which each message is one row."""

    def __init__(self, fd: int) -> None:
        self._line = socket.socket(fileno=fd)
        self._line.setblocking(False)
        self._rows = RowSender(self._line)
        self._next = 0

    def begin(self, call: ModelCall, provider: str, input_tokens: int) -> RequestEntry:
        """Tell that a request is about to be passed on. ``input_tokens`` are guessed."""
        self._next += 1
        self._rows.send(
            {
                "kind": "begun",
                "number": self._next,
                "provider": provider,
                "model": call.model,
                "path": call.path,
                "stream": call.stream,
                "input_tokens": input_tokens,
            }
        )
        return RequestEntry(self._next, provider, time.monotonic())

    def end(self, entry: RequestEntry, status: int, inward: int, outward: int, *, counted: bool, whole: bool) -> None:
        """Tell how a request ended. ``counted``: the tokens are the provider's own numbers."""
        self._rows.send(
            {
                "kind": "ended",
                "number": entry.number,
                "provider": entry.provider,
                "status": status,
                "input_tokens": inward,
                "output_tokens": outward,
                "counted": counted,
                "whole": whole,
                "duration_ms": int((time.monotonic() - entry.begun) * 1000),
            }
        )

    def begin_web(self, service: str, target: str) -> WebEntry:
        """Tell that a provider of searches is about to be asked, or a host for a page."""
        self._next += 1
        self._rows.send({"kind": "web_begun", "number": self._next, "service": service, "target": target})
        return WebEntry(self._next, time.monotonic())

    def end_web(self, entry: WebEntry, status: int, results: int, size: int) -> None:
        """Tell how it ended: ``size`` bytes of an answer, with so many results."""
        duration = int((time.monotonic() - entry.begun) * 1000)
        row = {"kind": "web_ended", "number": entry.number, "status": status, "results": results, "bytes": size}
        self._rows.send({**row, "duration_ms": duration})

    def begin_agent(self, peer: str, method: str, digest: str) -> AgentEntry:
        """Tell that another agent is about to be asked. ``digest`` is that of the call."""
        self._next += 1
        row = {"kind": "agent_begun", "number": self._next, "peer": peer, "method": method, "request_sha256": digest}
        self._rows.send(row)
        return AgentEntry(self._next, time.monotonic())

    def end_agent(self, entry: AgentEntry, status: int, size: int) -> None:
        """Tell how it ended: ``size`` bytes of an answer."""
        duration = int((time.monotonic() - entry.begun) * 1000)
        row = {"kind": "agent_ended", "number": entry.number, "status": status, "bytes": size}
        self._rows.send({**row, "duration_ms": duration})

    def begin_telemetry(self, signal: str, records: int, size: int) -> TelemetryEntry:
        """Tell that telemetry is about to go to the collector: records, and bytes as the agent made them, unpacked."""
        self._next += 1
        row = {"kind": "telemetry_begun", "number": self._next, "signal": signal, "records": records, "bytes": size}
        self._rows.send(row)
        return TelemetryEntry(self._next, time.monotonic())

    def end_telemetry(self, entry: TelemetryEntry, status: int, rejected: int) -> None:
        """Tell how it ended: the collector's status, 0 for none, and the records that it rejected."""
        duration = int((time.monotonic() - entry.begun) * 1000)
        row = {"kind": "telemetry_ended", "number": entry.number, "status": status, "rejected": rejected}
        self._rows.send({**row, "duration_ms": duration})
