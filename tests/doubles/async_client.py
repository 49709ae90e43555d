"""``covenant.wire.client`` for an event loop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from covenant.wire import client, frames
from policy import errors


class AsyncClient:
    """A conversation with the daemon; requests in turn, unless the caller keeps ``send`` and ``receive`` in step."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._buffered = BufferedByteReceiveStream(stream)

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """As ``client.Client.ask``.

        Raises:
            errors.CovenantError: as ``client.Client.ask``.
        """
        await self.send(kind, **fields)
        return await self.receive()

    async def stream(self, kind: str, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        """Ask for a stream, and yield its parts."""
        await self.send(kind, prefer_stream=True, **fields)
        while True:
            part = await self.receive()
            yield part
            if part["kind"] not in ("stream_begin", "stream_chunk"):
                return

    async def send(self, kind: str, **fields: Any) -> None:
        """One request; its answer comes after those of what was sent before."""
        given = {name: value for name, value in fields.items() if value is not None}
        await self.send_bytes(client.encoded(kind, given))

    async def send_bytes(self, raw: bytes) -> None:
        """Bytes as they are."""
        await self._stream.send(raw)

    async def receive(self) -> dict[str, Any]:
        """The next response, or the next part of a stream.

        Raises:
            errors.CovenantError: it says that something was refused.
            errors.DaemonSilentError: there is none.
        """
        try:
            size = frames.length(await self._buffered.receive_exactly(frames.HEADER_BYTES))
            return client.decoded(await self._buffered.receive_exactly(size))
        except (anyio.IncompleteRead, anyio.BrokenResourceError):
            raise errors.DaemonSilentError("the daemon ended the conversation before its answer") from None


@asynccontextmanager
async def opened(home: Path) -> AsyncIterator[AsyncClient]:
    """As ``client.opened``.

    Raises:
        errors.DaemonSilentError: no daemon listens there.
    """
    try:
        directory = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with anyio.fail_after(client.CONNECT_SECONDS):
                stream = await anyio.connect_unix(client.address(directory))
        finally:
            os.close(directory)
    except OSError as e:
        raise client.silent(home, e) from e
    async with stream:
        yield AsyncClient(stream)


@asynccontextmanager
async def connected(home: Path, *, token: str | None = None) -> AsyncIterator[AsyncClient]:
    """As ``client.connected``."""
    async with opened(home) as one:
        if token is None and not client.has_token(home):
            await one.ask("protocol_info")
        given = await anyio.to_thread.run_sync(client.operator_token, home) if token is None else token
        await one.ask("authenticate", token_b58=given)
        yield one
