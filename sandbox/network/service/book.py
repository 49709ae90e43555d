"""Tell the supervisor of each request that was passed on, when it begins and when it has ended: counts, never content.

A row that cannot be sent at once waits: an agent could otherwise ask while the supervisor is busy, and not be counted.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from msgspec import Struct

from sandbox.network.gate.row_sender import RowSender
from sandbox.network.service.shapes import ModelCall


class RequestEntry(Struct):
    """One request under way. ``provider`` is that of a model."""

    number: int
    begun: float
    provider: str = ""


class Book:
    """The gate's end of the line to its supervisor, of which each message is one row."""

    def __init__(self, fd: int) -> None:
        self._line = socket.socket(fileno=fd)
        self._line.setblocking(False)
        self._rows = RowSender(self._line)
        self._next = 0

    def begin(self, call: ModelCall, provider: str, input_tokens: int) -> RequestEntry:
        """Tell that a request is about to be passed on. ``input_tokens`` are guessed."""
        return self._begin(
            "begun",
            provider=provider,
            model=call.model,
            path=call.path,
            stream=call.stream,
            input_tokens=input_tokens,
        )

    def end(self, entry: RequestEntry, status: int, inward: int, outward: int, *, counted: bool, whole: bool) -> None:
        """Tell how a request ended. ``counted``: the tokens are the provider's own numbers."""
        self._end(
            "ended",
            entry,
            provider=entry.provider,
            status=status,
            input_tokens=inward,
            output_tokens=outward,
            counted=counted,
            whole=whole,
        )

    def begin_web(self, service: str, target: str) -> RequestEntry:
        """Tell that a provider of searches is about to be asked, or a host for a page."""
        return self._begin("web_begun", service=service, target=target)

    def end_web(self, entry: RequestEntry, status: int, results: int, size: int) -> None:
        """Tell how it ended: ``size`` bytes of an answer, with so many results."""
        self._end("web_ended", entry, status=status, results=results, bytes=size)

    def begin_agent(self, peer: str, method: str, digest: str) -> RequestEntry:
        """Tell that another agent is about to be asked. ``digest`` is that of the call."""
        return self._begin("agent_begun", peer=peer, method=method, request_sha256=digest)

    def end_agent(self, entry: RequestEntry, status: int, size: int) -> None:
        """Tell how it ended: ``size`` bytes of an answer."""
        self._end("agent_ended", entry, status=status, bytes=size)

    def begin_telemetry(self, signal: str, records: int, size: int) -> RequestEntry:
        """Tell that telemetry is about to go to the collector: records, and bytes as the agent made them, unpacked."""
        return self._begin("telemetry_begun", signal=signal, records=records, bytes=size)

    def end_telemetry(self, entry: RequestEntry, status: int, rejected: int) -> None:
        """Tell how it ended: the collector's status, 0 for none, and the records that it rejected."""
        self._end("telemetry_ended", entry, status=status, rejected=rejected)

    def _begin(self, kind: str, **fields: Any) -> RequestEntry:
        self._next += 1
        self._rows.send({"kind": kind, "number": self._next, **fields})
        return RequestEntry(self._next, time.monotonic(), fields.get("provider", ""))

    def _end(self, kind: str, entry: RequestEntry, **fields: Any) -> None:
        duration_ms = int((time.monotonic() - entry.begun) * 1000)
        self._rows.send({"kind": kind, "number": entry.number, **fields, "duration_ms": duration_ms})
