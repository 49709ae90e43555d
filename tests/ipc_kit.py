"""The socket's adapter over a server of in-memory stores, and a client that sends any bytes."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream

from covenant.adapters.ipc import gateway as ipc_gateway
from covenant.adapters.ipc import limits
from covenant.handlers import routes
from covenant.handlers.server import Handler
from covenant.wire import frames
from covenant.wire.types import AgentId
from policy import base58
from tests import server_kit

ME = AgentId(display="operator@local", pubkey="4zvwRjXUKGfvwnParsHAS3HuSVzV5cA4McphgmoCtajS")
YOU = AgentId(display="you@there", pubkey="8qbHbw2BbbTHBW1sbeqakYXVKRQM8Ne7pLK7m6CVfeR")
MY_TOKEN, YOUR_TOKEN = base58.encode(b"mine" * 8), base58.encode(b"your" * 8)
TOKENS = {MY_TOKEN: ME, YOUR_TOKEN: YOU}


class Peers:
    """Two who have a token."""

    async def authenticate(self, token_b58: str) -> Any:
        agent = TOKENS.get(token_b58)
        return None if agent is None else SimpleNamespace(agent_id=agent, token_prefix=token_b58[:6])

    def admits(self, pubkey: str, token_prefix: str) -> bool:
        return True


class Rows:
    """The rows that were written."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Mapping[str, Any]]] = []

    async def append(self, kind: str, fields: Mapping[str, Any], issuer: AgentId | None = None) -> str:
        self.rows.append((kind, fields))
        return str(len(self.rows))

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """The fields of the rows of a kind."""
        return [fields for row, fields in self.rows if row == kind]


class Client:
    """Bytes to the socket, frames from it."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self._buffered = BufferedByteReceiveStream(stream)

    async def send(self, *documents: Any) -> None:
        await self.stream.send(b"".join(frame(document) for document in documents))

    async def receive(self) -> Any:
        """The next document; None once there is no more."""
        with anyio.fail_after(60):
            try:
                (size,) = struct.unpack(">I", await self._buffered.receive_exactly(4))
                return json.loads(await self._buffered.receive_exactly(size))
            except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.EndOfStream):
                return None

    async def ask(self, document: Any) -> Any:
        await self.send(document)
        return await self.receive()

    async def enter(self, token: str = MY_TOKEN) -> Client:
        answer = await self.ask({"kind": "authenticate", "token_b58": token})
        assert answer == {"kind": "authenticated", "display": TOKENS[token].display}
        return self


def frame(document: Any) -> bytes:
    """A frame of a document, or of bytes as they are."""
    return frames.encode(document if isinstance(document, bytes) else json.dumps(document).encode())


class Running:
    """An adapter that listens."""

    def __init__(self, path: Path, gateway: ipc_gateway.IpcGateway, rows: Rows) -> None:
        self.path, self.gateway, self.audit = path, gateway, rows

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with await anyio.connect_unix(self.path) as stream:
            yield Client(stream)


@contextlib.asynccontextmanager
async def running(
    home: Path, *, bounds: limits.IpcBounds | None = None, handlers: Mapping[str, Handler] | None = None
) -> AsyncIterator[Running]:
    """The adapter with some handlers in the place of the daemon's."""
    rows = Rows()
    server = server_kit.make(
        home=home,
        audit=rows,
        peers=Peers(),
        identity=SimpleNamespace(agent=ME),
        handlers={**routes.HANDLERS, **(handlers or {})},
    )
    home.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(home / "sock"))
        sock.listen(512)
        async with anyio.create_task_group() as group:
            gateway = ipc_gateway.IpcGateway(server, group, bounds=bounds)
            group.start_soon(gateway.listen, sock)
            yield Running(home / "sock", gateway, rows)
            await gateway.stop(grace_seconds=5)
