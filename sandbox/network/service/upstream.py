"""Speak to the operator's providers from the gate's process, which can open no connection itself.

For each connection it asks the connector for a descriptor that is connected to provider N, and makes TLS on it. The
provider's key is added here, to a request of which nothing but the judged parts is left.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - the ssl module asks for it by name, once the gate can open no file
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec
import yarl
from aiohttp.client_proto import ResponseHandler
from msgspec import Struct

from sandbox.network.gate.call_line import PendingCalls
from sandbox.network.service import connector_wire
from sandbox.network.service.shapes import ModelCall

# Of a provider's answer, and of an agent's request to one.
_PASSED_BACK: Final = ("content-type", "request-id", "x-request-id", "retry-after", "retry-after-ms")
_PASSED_BACK_PREFIXES: Final = ("x-ratelimit-", "anthropic-ratelimit-")
_PASSED_ON: Final = ("accept", "anthropic-version", "anthropic-beta", "openai-beta")
VERSION: Final = "2023-06-01"


class ProviderPeer(Struct, frozen=True):
    """One provider as the gate has it: ``number`` is its place for the connector, ``key`` is empty without one."""

    number: int
    name: str
    kind: str
    url: str
    key: str
    timeout_seconds: int
    ca: str
    authorities: Sequence[str] = ()
    input_price: int = 0
    output_price: int = 0
    request_price: int = 0
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Connector:
    """The line to the connector's process, with the connections that were asked for and have not come."""

    def __init__(self, fd: int) -> None:
        self._line = socket.socket(fileno=fd)
        self._line.setblocking(False)
        self._pending = PendingCalls[socket.socket]()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to take its answers."""
        loop.add_reader(self._line.fileno(), self._answers)

    async def connect(self, number: int, host: str = "") -> socket.socket:
        """Return a socket that is connected to provider ``number``, or to ``host`` where it is ``BY_NAME``.

        Raises:
            OSError: there is no connection.
        """
        with self._pending.one() as (ident, found):
            self._line.send(connector_wire.REQUEST.pack(ident, number) + host.encode("ascii"))
            return await found

    def _answers(self) -> None:
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._line, connector_wire.REPLY.size, 1)
            except BlockingIOError:
                return
            if not message:
                raise SystemExit("the connector is gone")
            ident, status = connector_wire.REPLY.unpack(message)
            made = [socket.socket(fileno=fd) for fd in fds]
            waiting = self._pending.waiting(ident)
            if waiting is None:
                for one in made:
                    one.close()
            elif status or not made:
                waiting.set_exception(OSError(status, "the provider does not answer"))
            else:
                made[0].setblocking(False)
                waiting.set_result(made[0])


class _Connections(aiohttp.BaseConnector):
    """Connections to one provider, kept for further requests."""

    def __init__(self, connector: Connector, peer: ProviderPeer, context: ssl.SSLContext | None) -> None:
        super().__init__(limit=0, limit_per_host=0, keepalive_timeout=30)
        self._line, self._peer, self._tls = connector, peer, context

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:  # noqa: ASYNC109
        try:
            async with asyncio.timeout(self._peer.timeout_seconds):
                made = await self._line.connect(self._peer.number)
                host = yarl.URL(self._peer.url).host if self._tls else None
                _, protocol = await self._loop.create_connection(
                    self._factory, sock=made, ssl=self._tls, server_hostname=host
                )
        except (OSError, TimeoutError) as e:
            raise aiohttp.ClientConnectionError(str(e)) from e
        return protocol


class ProviderClient:
    """One provider's client."""

    def __init__(self, connector: Connector, peer: ProviderPeer) -> None:
        self.peer = peer
        context = None
        if peer.url.startswith("https:"):
            # Read now: after it is sealed the gate opens no file.
            context = ssl.create_default_context(cafile=peer.ca or None)
            for one in peer.authorities:
                context.load_verify_locations(one)
        self._session = aiohttp.ClientSession(
            connector=_Connections(connector, peer, context),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_silence(peer)),
        )

    async def send(self, call: ModelCall, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> Any:
        """Send a request on. Returns the response, whose body is not read yet.

        Raises:
            aiohttp.ClientError, TimeoutError: the provider cannot be reached, or does not answer.
        """
        peer = self.peer
        _, _, rest = call.path[1:].partition("/")
        path = call.path if peer.kind == "ollama" else f"/{rest}"
        url = yarl.URL(peer.url + path, encoded=True)
        sent = {name: headers[name] for name in _PASSED_ON if name in headers}
        sent["Accept-Encoding"] = "identity"
        sent["User-Agent"] = "covenant"
        if body:
            sent["Content-Type"] = "application/json"
        if peer.kind == "anthropic":
            sent.setdefault("anthropic-version", VERSION)
        if peer.key:
            sent |= _key(peer)
        method = "POST" if body else "GET"
        return await self._session.request(
            method, url, params=dict(query) or None, headers=sent, data=body or None, allow_redirects=False
        )

    async def ask_agent(self, path: str, headers: Mapping[str, str], body: bytes) -> aiohttp.ClientResponse:
        """Post a call to an agent, or get its card where there is no body. The answer's body is not read yet.

        Raises:
            aiohttp.ClientError, TimeoutError: the daemon cannot be reached, or does not answer.
        """
        sent = {**headers, **_key(self.peer), "Accept-Encoding": "identity", "User-Agent": "covenant"}
        sent |= {"Content-Type": "application/json"} if body else {}
        url = yarl.URL(self.peer.url + path, encoded=True)
        method = "POST" if body else "GET"
        return await self._session.request(method, url, headers=sent, data=body or None, allow_redirects=False)

    async def post_telemetry(self, path: str, body: bytes, most: int) -> tuple[int, int, bytes]:
        """Post OTLP to the collector. Returns the status, the seconds that it asks for, and the answer up to ``most``.

        Raises:
            aiohttp.ClientError, TimeoutError: the collector cannot be reached, or does not answer.
        """
        sent = {**self.peer.headers, "Accept-Encoding": "identity", "User-Agent": "covenant"}
        sent["Content-Type"] = "application/x-protobuf"
        url = yarl.URL(self.peer.url + path, encoded=True)
        async with self._session.post(url, headers=sent, data=body, allow_redirects=False) as response:
            data = bytearray()
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > most:
                    response.close()
                    break
            asked = response.headers.get("Retry-After", "")
            wait = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 9 else 0
            return response.status, wait, bytes(data[:most])

    async def get(
        self, path: str, parameters: Mapping[str, str], headers: Mapping[str, str], most: int
    ) -> tuple[int, bytes]:
        """Return status and body of what is at a path, of at most so many bytes.

        Raises:
            aiohttp.ClientError, TimeoutError: Raised when the provider cannot be reached, or does not answer.
            ValueError: Raised when the answer is longer, or compressed.
        """
        sent = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "covenant", **headers}
        url = yarl.URL(self.peer.url + path, encoded=True)
        async with self._session.get(url, params=dict(parameters), headers=sent, allow_redirects=False) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise ValueError("the answer is compressed")
            data = bytearray()
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > most:
                    raise ValueError(f"the answer has over {most} bytes")
            return response.status, bytes(data)


def _silence(peer: ProviderPeer) -> int:
    """How long an answer may rest (seconds). The daemon waits up to 300 s for the end of a task."""
    return max(peer.timeout_seconds, 330) if peer.kind == "a2a" else peer.timeout_seconds


def _key(peer: ProviderPeer) -> dict[str, str]:
    if peer.kind == "anthropic":
        return {"x-api-key": peer.key}
    if peer.kind == "gemini":
        return {"x-goog-api-key": peer.key}
    return {"Authorization": f"Bearer {peer.key}"}


def passed_back(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an answer that the agent gets."""
    return {
        name: value
        for name, value in headers.items()
        if name.lower() in _PASSED_BACK or name.lower().startswith(_PASSED_BACK_PREFIXES)
    }
