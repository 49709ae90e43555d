"""Serve in the service gate's process: an HTTP server for one agent, without rights and without a way to anywhere.

    (1) the request's frame: host, version, headers, size
    (2) what it asks for: an operation, a model, the content            (shapes)
    (3) the limits of the run                                          (limits)
    (4) a provider, and the next one where it fails                    (upstream)
    (5) the answer, part by part as it comes, and its counts           (usage)

The process is sealed before it reads a byte from the agent. A request that is refused is told as a denial; one that was
passed on as a row of counts, never of content.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, NoReturn

import aiohttp
from aiohttp import web

from policy.grants.services import SENTENCES, ServiceSet
from sandbox.network.gate.main import GateInput
from sandbox.network.service import shapes
from sandbox.network.service.a2a.server import NAME as AGENTS_NAME
from sandbox.network.service.a2a.server import AgentEndpoint
from sandbox.network.service.book import Book
from sandbox.network.service.commands import CommandEndpoint, CommandLine, command_line
from sandbox.network.service.limits import CreditLimit, ModelLimits, price
from sandbox.network.service.relay import AnswerRelay
from sandbox.network.service.shapes import ModelCall, RefusedError, Shape
from sandbox.network.service.telemetry import wire as telemetry_wire
from sandbox.network.service.telemetry.line import TelemetryReader
from sandbox.network.service.telemetry.server import NAME as TELEMETRY_NAME
from sandbox.network.service.telemetry.server import TelemetryEndpoint
from sandbox.network.service.tools import NAME as TOOLS_NAME
from sandbox.network.service.tools import ToolEndpoint, ToolLine, tool_line
from sandbox.network.service.upstream import Connector, ProviderClient, ProviderPeer
from sandbox.network.service.usage import BYTES_PER_TOKEN
from sandbox.network.service.web.server import NAMES as WEB_NAMES
from sandbox.network.service.web.server import WebServer

BODY_BYTES: Final = 16 << 20
# Of the bodies of all requests in progress: each is there as it came, as a document, and as it is passed on, and the
# gates of a run have 256 MiB together. A request has whole parts of it.
_ROOM_PARTS, _PART_BYTES = 512, 64 << 10
_HEADER_BYTES: Final = 16 * 1024
# Requests of one agent at once.
AT_ONCE: Final = 256
# Answers of a provider after which the next one is asked.
_FAILED: Final = frozenset({500, 502, 503, 504, 529})
_QUERIES: Final = {"gemini": {"alt": "sse"}, "anthropic": {"beta": "true"}}


class BodyRoom:
    """Room for the bodies of one agent's requests. A request waits for its own, in order, and has it until its end."""

    def __init__(self) -> None:
        self._turn, self._parts = asyncio.Lock(), asyncio.Semaphore(_ROOM_PARTS)

    @contextlib.asynccontextmanager
    async def of(self, request: web.BaseRequest) -> AsyncIterator[None]:
        """Hold room for a request's body. One without a length may have the greatest."""
        size = request.content_length if request.content_length is not None else BODY_BYTES * request.body_exists
        # More than the greatest is refused and not read.
        wanted, taken = -(-size // _PART_BYTES) if size <= BODY_BYTES else 0, 0
        try:
            if wanted:
                async with self._turn:
                    while taken < wanted:
                        await self._parts.acquire()
                        taken += 1
            yield
        finally:
            for _ in range(taken):
                self._parts.release()


class ServiceServer:
    """Answers the requests of one agent."""

    def __init__(
        self, gate: GateInput, connector: Connector, tools: ToolLine | None, commands: CommandLine | None
    ) -> None:
        plan = gate.plan
        # Refusals are told from the moment on that it is sealed.
        self.denied: Callable[[str, str], None] = lambda target, code: None
        self._names = frozenset(plan["names"])
        self._agent = str(plan["agent"])
        self._book = Book(gate.fds["usage"])
        models = [(one["provider"], one["pattern"]) for one in plan.get("models", ())]
        self._granted = ServiceSet.of(models)
        self._most: int | None = plan.get("max_output_tokens")
        self._limits = ModelLimits(plan.get("requests_per_minute"), plan.get("tokens_per_hour"), clock=time.monotonic)
        peers = [ProviderPeer(number, **one) for number, one in enumerate(plan["providers"])]
        self._upstreams = {peer.name: ProviderClient(connector, peer) for peer in peers}
        self._credits = CreditLimit(plan.get("credits"), gate.fds.get("credits"))
        self._tools = None if tools is None else ToolEndpoint(tools, whole_body)
        self._commands = None if commands is None else CommandEndpoint(commands, whole_body)
        self._busy, self._room = 0, BodyRoom()
        self.agents = AgentEndpoint(plan.get("agents", ()), self._upstreams.values(), self._book, whole_body)
        self.telemetry = self._collected(gate, connector, len(peers))
        self.web = WebServer(gate, connector, self._upstreams, self._book, self._credits)

    def _collected(self, gate: GateInput, connector: Connector, number: int) -> TelemetryEndpoint:
        """The endpoint of telemetry. The collector is the connector's last provider."""
        peer, plan = gate.plan.get("collector"), gate.plan.get("telemetry") or {}
        collector = None if peer is None else ProviderClient(connector, ProviderPeer(number, **peer))
        line = gate.fds.get("telemetry")
        reader = None if line is None else TelemetryReader(socket.socket(fileno=line))
        body = functools.partial(whole_body, keep=telemetry_wire.BODY_BYTES)
        return TelemetryEndpoint(plan, reader, collector, self._book, body)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        async with self._room.of(request):
            return await self._answer(request)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        shape: Shape = "openai"
        try:
            name = self._frame(request)
            if name in WEB_NAMES:
                return await self.web.answer(name, request)
            if name == AGENTS_NAME:
                return await self._asked_tools(self.agents, request)
            if name == TELEMETRY_NAME:
                return await self._asked_tools(self.telemetry, request)
            if name == TOOLS_NAME and self._commands is not None and self._commands.named(request.raw_path):
                return await self._asked_tools(self._commands, request)
            if name == TOOLS_NAME and self._tools is not None:
                return await self._asked_tools(self._tools, request)
            path, only = self._place(request)
            found, named = shapes.route(request.method, path, anthropic="anthropic-version" in request.headers)
            shape = found.shape
            query = self._query(request, shape)
            call = shapes.read(found, path, named, await whole_body(request))
            if call.route.operation == "list":
                return self._listed(call, only)
            for kind in call.left_out:
                self.denied(f"{request.method[:16]} {path[:200]}: tool {kind}", "tool_left_out")
            return await self._pass_on(request, call, only, query)
        except RefusedError as e:
            self.denied(f"{request.method[:16]} {request.path[:200]}: {e.message}"[:400], e.code)
            retry = {} if e.retry_seconds is None else {"Retry-After": str(e.retry_seconds)}
            body = shapes.refusal(shape, e.status, e.code, e.message)
            refused = web.Response(status=e.status, body=body, content_type="application/json", headers=retry)
            if e.code in ("malformed", "frame_refused"):
                refused.force_close()
            return refused

    async def _asked_tools(
        self, tools: ToolEndpoint | CommandEndpoint | AgentEndpoint | TelemetryEndpoint, request: web.BaseRequest
    ) -> web.StreamResponse:
        self._busy += 1
        try:
            return await tools.handle(request)
        finally:
            self._busy -= 1

    # --- (1) ------------------------------------------------------------------------------------------------

    def _frame(self, request: web.BaseRequest) -> str:
        """Refuse what could be understood in two ways, or is meant for another server. Returns the name asked."""
        if request.remote != self._agent:
            raise RefusedError(403, "frame_refused", "this is not the agent's address")
        if not request.raw_path.startswith("/") or request.version != (1, 1):
            raise RefusedError(400, "frame_refused", "the gate takes a path of its own, by HTTP/1.1")
        hosts = request.headers.getall("Host", [])
        named = hosts[0].lower().removesuffix(":80") if len(hosts) == 1 else ""
        if named not in self._names:
            raise RefusedError(421, "host_refused", "the gate answers for its own names alone")
        refused = ("Upgrade", "Expect", "Content-Encoding", "Trailer", "TE", "HTTP2-Settings", "Proxy-Authorization")
        for name in refused:
            # Exporters of OTLP may pack their bodies.
            if name in request.headers and not (name == "Content-Encoding" and named == TELEMETRY_NAME):
                raise RefusedError(400, "frame_refused", f"the header {name} is not taken")
        if "Transfer-Encoding" in request.headers and "Content-Length" in request.headers:
            raise RefusedError(400, "frame_refused", "a body has one length")
        if self._busy >= AT_ONCE:
            raise RefusedError(429, "limit", f"more than {AT_ONCE} requests at once", retry_seconds=1)
        return named

    def _place(self, request: web.BaseRequest) -> tuple[str, str]:
        """The path of the operation, and the provider that it names before that, if any."""
        path = request.raw_path.partition("?")[0]
        first, slash, rest = path[1:].partition("/")
        if slash and any(first == provider for provider, _ in self._granted.models):
            return f"/{rest}", first
        return path, ""

    def _query(self, request: web.BaseRequest, shape: Shape) -> dict[str, str]:
        """The part of the query that is passed on. A key in it is dropped, as one in a header is."""
        known, query = _QUERIES.get(shape, {}), request.query
        odd = [name for name in query if name not in known and name != "key"]
        if odd or any(query.getall(name) != [value] for name, value in known.items() if name in query):
            raise RefusedError(400, "frame_refused", "this query is not passed on")
        return {name: value for name, value in known.items() if name in query}

    # --- (2) to (4) -----------------------------------------------------------------------------------------

    def _candidates(self, call: ModelCall, only: str) -> list[ProviderClient]:
        """The providers of this API that are granted the model, in the operator's order."""
        spoken = [
            one
            for one in self._upstreams.values()
            if call.route.shape in shapes.SPOKEN.get(one.peer.kind, ()) and only in ("", one.peer.name)
        ]
        if call.route.operation == "version":
            return spoken[:1]
        return [one for one in spoken if self._granted.holds(one.peer.name, call.model)]

    async def _pass_on(
        self, request: web.BaseRequest, call: ModelCall, only: str, query: Mapping[str, str]
    ) -> web.StreamResponse:
        candidates = self._candidates(call, only)
        if not candidates:
            raise RefusedError(403, "model_not_granted", SENTENCES["model_not_granted"].format(call.model))
        if self._most is not None and call.route.operation == "generate":
            shapes.bound_output(call, self._most)
        strip = shapes.with_usage(call)
        body = shapes.encoded(call.body) if call.body else b""
        bound = shapes.output_limit(call) if call.route.operation == "generate" else 0
        least = len(body) // BYTES_PER_TOKEN
        dearest = None if bound is None else max(_price(one.peer, least, bound) for one in candidates)
        priced = any(one.peer.input_price or one.peer.output_price for one in candidates)
        held = await self._credits.begin(dearest if priced else 0)
        try:
            reserved = await self._limits.begin(None if bound is None else bound + least)
        except BaseException:
            await self._credits.end(held, 0)
            raise
        relay = AnswerRelay(request, call, asked_bytes=len(body), strip=strip)
        row = self._book.begin(call, candidates[0].peer.name, least)
        self._busy += 1
        try:
            upstream, response = await self._first(candidates, call, query, request.headers, body)
            row.provider = upstream.peer.name
            return await relay.answer(upstream, response)
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            if relay.whole or relay.started:
                raise ConnectionResetError(str(e)) from e  # the agent's connection ends where the provider's did
            raise RefusedError(502, "provider_failed", "the provider's answer broke off") from e
        finally:
            self._busy -= 1
            inward, outward, known = relay.tokens
            self._book.end(row, relay.status, inward, outward, counted=known, whole=relay.whole)
            peer = self._upstreams[row.provider].peer
            await self._credits.end(held, _price(peer, inward, outward))
            await self._limits.end(reserved, inward + outward)

    async def _first(
        self,
        candidates: Sequence[ProviderClient],
        call: ModelCall,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> tuple[ProviderClient, aiohttp.ClientResponse | None]:
        """The first provider that does not fail, with its answer; the last one's failure where all do."""
        lower = {name.lower(): value for name, value in headers.items()}
        for index, upstream in enumerate(candidates):
            if upstream.peer.kind == "mock":
                return upstream, None
            is_last = index == len(candidates) - 1
            try:
                response = await upstream.send(call, query, lower, body)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
                self.denied(f"provider {upstream.peer.name}", "provider_failed")
                continue
            if response.status in _FAILED and not is_last:
                response.close()
                self.denied(f"provider {upstream.peer.name}: status {response.status}", "provider_failed")
                continue
            return upstream, response
        raise RefusedError(502, "no_provider", "no provider of this model answers")

    # --- lists ----------------------------------------------------------------------------------------------

    def _listed(self, call: ModelCall, only: str) -> web.Response:
        """The granted models that the manifest names whole; a pattern names none."""
        spoken = {
            peer.name
            for peer in (one.peer for one in self._upstreams.values())
            if call.route.shape in shapes.SPOKEN.get(peer.kind, ()) and only in ("", peer.name)
        }
        names = sorted({model for provider, model in self._granted.models if provider in spoken and model[-1] != "*"})
        return web.Response(body=shapes.listing(call.route.shape, names), content_type="application/json")


async def whole_body(request: web.BaseRequest, keep: int = BODY_BYTES) -> bytes:
    """Read the body of a request. One of more than ``keep`` bytes is read whole, and returned cut, longer than that.

    Raises:
        RefusedError: it has more than ``BODY_BYTES``.
    """
    large = RefusedError(413, "frame_refused", f"a request has at most {BODY_BYTES} bytes")
    if (request.content_length or 0) > BODY_BYTES:
        raise large
    data, size = bytearray(), 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > BODY_BYTES:
            raise large
        if len(data) <= keep:
            data += chunk
    return bytes(data)


def _price(peer: ProviderPeer, inward: int, outward: int) -> int:
    return price(inward, outward, peer.input_price, peer.output_price)


def serve(gate: GateInput) -> NoReturn:
    """The gate's life."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(gate))
    raise SystemExit("the gate stopped serving")


async def _serve(gate: GateInput) -> None:
    connector = Connector(gate.fds["connector"])
    tools = tool_line(gate.fds["tools"]) if "tools" in gate.fds else None
    commands = command_line(gate.fds["commands"]) if "commands" in gate.fds else None
    server = ServiceServer(gate, connector, tools, commands)
    runner = web.ServerRunner(
        web.Server(
            server.handle,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
            keepalive_timeout=75,
            lingering_time=0,
        )
    )
    await runner.setup()
    await _warm(runner)
    listener = socket.socket(fileno=gate.fds["listener"])
    gate.seal()
    server.denied = server.web.denied = server.agents.denied = server.telemetry.denied = gate.denied
    connector.start(asyncio.get_running_loop())
    if tools is not None:
        await tools.start()
    if commands is not None:
        await commands.start()
    await web.SockSite(runner, listener).start()
    await asyncio.Event().wait()


async def _warm(runner: web.ServerRunner) -> None:
    """Answer one refused request over a pair of sockets: what is imported late cannot be imported once it is sealed."""
    ours, theirs = socket.socketpair()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(runner.server, theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(b"GET / HTTP/1.1\r\nHost: none\r\nConnection: close\r\n\r\n")
    await reader.read()
    writer.close()
