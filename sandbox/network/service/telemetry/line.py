"""The gate's end of the line to the reader of telemetry: one request at a time."""

from __future__ import annotations

import asyncio
import socket
from typing import Final, NamedTuple

from sandbox.network.service.shapes import RefusedError
from sandbox.network.service.telemetry import wire

_READ_SECONDS: Final = 15.0


class Read(NamedTuple):
    """A request as the reader made it: its records, its bytes as the agent made them, and the message to pass on."""

    records: int
    size: int
    body: bytes


class ReaderLine:
    """Asks the reader. After a request that takes too long there is no other."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._turn = asyncio.Lock()
        self._stuck = False

    async def stamped(self, signal: str, body: bytes, *, is_json: bool, is_gzip: bool) -> Read:
        """Return a request with the run's attributes.

        Raises:
            RefusedError: it is no request of OTLP, too large, or the reader does not answer in time.
        """
        outcome, records, size, made = await self._asked(wire.STAMP, signal, body, is_json=is_json, is_gzip=is_gzip)
        if outcome == wire.DONE:
            return Read(records, size, made)
        status, code = (413, "frame_refused") if outcome == wire.LARGE else (400, "malformed")
        raise RefusedError(status, code, made[:400].decode("utf-8", "replace"))

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
        head = wire.ORDER.pack(order, wire.SIGNALS.index(signal), is_json, is_gzip, len(body))
        async with self._turn:
            if self._stuck:
                raise RefusedError(503, "provider_failed", "the reader of telemetry is stuck for the rest of the run")
            self._stuck = True
            try:
                async with asyncio.timeout(_READ_SECONDS):
                    found = await self._exchange(asyncio.get_running_loop(), head + body)
            except TimeoutError as e:
                raise RefusedError(503, "provider_failed", "the request takes too long to read") from e
            self._stuck = False
            return found

    async def _exchange(self, loop: asyncio.AbstractEventLoop, order: bytes) -> tuple[int, int, int, bytes]:
        await loop.sock_sendall(self._socket, order)
        outcome, first, second, length = wire.OUTCOME.unpack(await self._exactly(loop, wire.OUTCOME.size))
        if length > wire.MOST_OUT:
            raise SystemExit("the reader sends more than a request")
        return outcome, first, second, await self._exactly(loop, length)

    async def _exactly(self, loop: asyncio.AbstractEventLoop, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = await loop.sock_recv(self._socket, length - len(data))
            if not part:
                raise SystemExit("the reader is gone")
            data += part
        return bytes(data)
