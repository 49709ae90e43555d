"""A gateway on a free port of the loopback, over a server of in-memory stores, and clients that send any bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import anyio

from covenant.adapters.http import listen
from covenant.adapters.http.gateway import HttpBounds, HttpGateway
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.stores.capabilities.interface import Grant
from covenant.wire import responses
from covenant.wire.parts import AuditEvent
from covenant.wire.types import AgentId
from policy.capabilities.token import Token
from tests import server_kit

TOKEN = "7uqkz7sWhGTzvvtVoLhoBBxMEVZVKrsgYvvUbGUnbb6C"
OTHER_TOKEN = "BCiFGrQsMJXAWDcrn7oSNYMkX7jHbUMnqYp4cjDQ4SB3"
ME = AgentId(display="user@local", pubkey="4uQeVj5tqViQh7yWWGStvkEG1Zmhx6uasJtWCJziofM")
OTHER = AgentId(display="other@local", pubkey="8opHzTAnfzRpPEx21XtnrVTX28YQuCpAjcn1PczScKh")
CONSOLE = "http://localhost:3000"


class Identity:
    """The daemon's identity: a client with its key is the operator."""

    agent = ME


class Peers:
    """Enrolled peers, with the interface that ``covenant.handlers.access.authentication`` uses.

    A lookup raises ``broken``.
    """

    def __init__(self) -> None:
        self.tokens = {TOKEN: ME, OTHER_TOKEN: OTHER}
        self.broken: Exception | None = None

    def listing(self, limit: int, pubkey_prefix: str | None, status: str | None) -> Any:
        return SimpleNamespace(entries=(), truncated=False)

    async def authenticate(self, token: str) -> Any:
        if self.broken is not None:
            raise self.broken
        agent = self.tokens.get(token)
        return None if agent is None else SimpleNamespace(agent_id=agent, token_prefix=token[:6])

    def admits(self, pubkey: str, token_prefix: str) -> bool:
        return any(token.startswith(token_prefix) and one.pubkey == pubkey for token, one in self.tokens.items())


class Grants:
    """Grants without signatures, with the interface that ``covenant.handlers.access.authorization`` uses."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []

    def grant(self, agent: AgentId, action: str, scope: Any) -> None:
        token = Token(subject=agent.pubkey, action=action, scope=scope, granted_by=ME.pubkey, expires_at=None)
        self.grants.append(Grant(token, "1" * 64, agent.display, ME.display))

    def candidates(self, pubkey: str, action: str, now_ms: int) -> list[Grant]:
        return [one for one in self.grants if (one.token.subject, one.token.action) == (pubkey, action)]


@dataclass
class Rows:
    """An audit log that keeps its rows; ``broken`` is what writing raises."""

    rows: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    broken: Exception | None = None

    async def append(self, kind: str, fields: dict[str, Any], issuer: Any = None) -> str:
        if self.broken is not None:
            raise self.broken
        self.rows.append((kind, fields))
        return str(len(self.rows))


class Echo(Mapping[str, Any]):
    """A handler for every kind: it answers what ``answers`` holds for it, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Caller, Any]] = []
        self.answers: dict[str, Any] = {}

    def __getitem__(self, kind: str) -> Any:
        async def handler(server: Server, caller: Caller, asked: Any) -> responses.Response:
            self.asked.append((caller, asked))
            answer = self.answers.get(kind, responses.Pong())
            found = await answer(server, caller, asked) if callable(answer) else answer
            assert isinstance(found, responses.Response)
            return found

        return handler

    def __iter__(self) -> Any:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)


@asynccontextmanager
async def serving(server: Server, *, origins: Sequence[str] = (CONSOLE,), **bounds: Any) -> AsyncIterator[HttpGateway]:
    """The gateway of a server, on a free port."""
    async with anyio.create_task_group() as group:
        gateway = HttpGateway(server, group, origins=origins, bounds=HttpBounds(**bounds))
        await gateway.listen(listen.bind("127.0.0.1", 0))
        try:
            yield gateway
        finally:
            await gateway.stop(grace_seconds=0.2)
            group.cancel_scope.cancel()


@asynccontextmanager
async def client(gateway: HttpGateway, token: str | None = TOKEN) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield an HTTP client of the gateway."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=60)
    base = f"http://127.0.0.1:{gateway.port}"
    async with aiohttp.ClientSession(base, headers=headers, timeout=timeout) as session:
        yield session


async def raw(gateway: HttpGateway, data: bytes, *, until_end: bool = True, seconds: float = 60.0) -> bytes:
    """Send these bytes and return the answer: all of it up to the end of the connection, or only the first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    found = b""
    try:
        writer.write(data)
        async with asyncio.timeout(seconds):
            while more := await reader.read(65536):
                found += more
                if not until_end:
                    break
    except ConnectionResetError:
        # A close with unread data in the kernel may lose part of the answer: keep the part that came.
        pass
    finally:
        writer.close()
    return found


def head(gateway: HttpGateway, line: str, *headers: str, token: str | None = TOKEN) -> bytes:
    """A request's head, with our Host, the token and the headers."""
    lines = [line, f"Host: 127.0.0.1:{gateway.port}"]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, *headers, "", ""]).encode()


def statuses(answer: bytes) -> list[int]:
    """The status of each response in what came back."""
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] ([0-9]{3}) [A-Z]", answer)]


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    event: str
    id: str
    data: Any


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """The events of a stream as they come, by the format's own rules; comments are left out."""
    fields: dict[str, str] = {}
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if not text and fields:
            yield Event(fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"]))
            fields = {}
        elif text and not text.startswith(":"):
            name, _, value = text.partition(": ")
            assert name in {"event", "id", "data"} - fields.keys(), text
            fields[name] = value


def event(event_id: str, owner: AgentId = ME, **fields: Any) -> AuditEvent:
    """A row of the audit log."""
    return AuditEvent(id=event_id, timestamp_ms=1, issuer=owner, kind={"type": "denied", **fields})


def server(home: Path, handlers: Mapping[str, Handler]) -> Server:
    """A server of what this kit has in the place of stores, with these handlers."""
    return server_kit.make(home=home, peers=Peers(), audit=Rows(), identity=Identity(), handlers=handlers)
