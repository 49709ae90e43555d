"""The gate's requests to the sealed reader of telemetry."""

from __future__ import annotations

import socket
from typing import Final, NamedTuple

from sandbox.network.gate.sealed_reader import SealedReader
from sandbox.network.service.shapes import RefusedError
from sandbox.network.service.telemetry import wire

_READ_SECONDS: Final = 15.0


class Read(NamedTuple):
    """A request as the reader made it: its records, its bytes as the agent made them, and the message to pass on."""

    records: int
    size: int
    body: bytes


class TelemetryReader:
    """Asks the reader of telemetry."""

    def __init__(self, line: socket.socket) -> None:
        self._reader = SealedReader(
            line,
            name="telemetry",
            request="request",
            max_bytes=wire.OUTCOME_BYTES,
            timeout_seconds=_READ_SECONDS,
        )

    async def stamped(self, signal: str, body: bytes, *, is_json: bool, is_gzip: bool) -> Read:
        """Return a request with the run's attributes.

        Raises:
            RefusedError: it is no request of OTLP, too large, or the reader does not answer in time.
        """
        outcome, records, size, made = await self._asked(wire.STAMP, signal, body, is_json=is_json, is_gzip=is_gzip)
        if outcome == wire.DONE:
            return Read(records, size, made)
        status, code = (413, "frame_refused") if outcome == wire.LARGE else (400, "malformed")
        raise RefusedError(status, code, made[:400].decode("utf-8", "ignore"))

    async def answer(self, signal: str, body: bytes, *, is_json: bool) -> tuple[int, bytes]:
        """Return the records that the collector rejected, and its answer in the agent's form.

        Raises:
            RefusedError: the reader does not answer in time.
        """
        _, rejected, _, made = await self._asked(wire.ANSWER, signal, body, is_json=is_json, is_gzip=False)
        return rejected, made

    async def _asked(
        self, order: int, signal: str, body: bytes, *, is_json: bool, is_gzip: bool
    ) -> tuple[int, int, int, bytes]:
        head = wire.ORDER.pack(order, wire.SIGNALS.index(signal), is_json, is_gzip)
        try:
            found = await self._reader.ask(head + body)
        except TimeoutError as e:
            raise RefusedError(503, "provider_failed", str(e)) from e
        if len(found) < wire.OUTCOME.size:
            raise SystemExit("the reader of telemetry sends no outcome")
        return (*wire.OUTCOME.unpack_from(found), found[wire.OUTCOME.size :])
