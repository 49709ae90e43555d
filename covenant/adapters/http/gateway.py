"""The HTTP gateway: passes loopback requests to ``Server.respond``, by the table of routes.

    head ──guard──> route ──token──> caller ──body──> request ──Server.respond──> JSON, or a stream of events

In this order, so that a page of another origin never reaches the token check, and no body is read before the caller is
known. Every wait has a limit. A handler's refusal has status 200 and kind ``error``, as in version 1.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import anyio
import anyio.abc
from aiohttp import HttpVersion11, web

from covenant.adapters.a2a import endpoints
from covenant.adapters.a2a.endpoints import A2aEndpoints
from covenant.adapters.a2a.peer_tasks import PeerTasks
from covenant.adapters.a2a.push import Pushes
from covenant.adapters.console.pages import Console, Gate, Services
from covenant.adapters.http import feeds, guard, metrics, openapi, refusals, routes, streams
from covenant.adapters.http import requests as http_requests
from covenant.adapters.http.guard import Guard, Head
from covenant.adapters.http.listen import Listener
from covenant.adapters.http.refusals import JSON
from covenant.adapters.http.routes import Route
from covenant.fair_share import Shares
from covenant.handlers.access import auth_failures, authentication
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.wire import mcp_server, requests, responses
from covenant.wire.a2a.push_urls import PushUrl
from policy import errors
from policy.signing import strict_json

_LOG = logging.getLogger(__name__)

# The key of a request's caller among its items, once it is known.
_CALLER: Final = web.RequestKey("caller", Caller)


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """The limits of clients. At most ``large_bodies`` bodies above ``large_bytes`` are read at once, half of a caller.

    ``head_seconds`` limits the wait for a head, also between requests. In each ``wrong_seconds`` the first
    ``wrong_tokens`` get log rows, the rest a count.
    """

    connections: int = 256
    streams_of_one: int = 32
    head_seconds: float = 15.0
    body_seconds: float = 30.0
    large_bytes: int = 256 * 1024
    large_bodies: int = 8
    wrong_tokens: int = 20
    wrong_seconds: float = 1.0
    pace: streams.Pace = field(default_factory=streams.Pace)


class HttpGateway:
    """The HTTP server of one port.

    Args:
        group: runs the task that writes the count of unlogged wrong tokens.
        origins: the origins whose pages may send requests; invalid ones are ignored with a warning.
        push_urls: where push notifications of A2A may go.
        console: the services that the console's pages ask beside the daemon itself.
    """

    def __init__(
        self,
        server: Server,
        group: anyio.abc.TaskGroup,
        *,
        origins: Sequence[str] = (),
        push_urls: Sequence[PushUrl] = (),
        bounds: HttpBounds | None = None,
        console: Services | None = None,
    ) -> None:
        self.server = server
        self.bounds = bounds or HttpBounds()
        self.port = 0
        good, bad = guard.origins(origins)
        for word in bad:
            _LOG.warning("COVENANT_HTTP_ORIGINS: `%s` is no origin and is left out", strict_json.shown(word))
        self._guard = Guard(self.port, good)
        self._large = Shares(self.bounds.large_bodies, operator=server.identity.agent.pubkey)
        self._streams: Counter[str] = Counter()
        self._wrong = auth_failures.Refusals(
            server, "http", group, most=self.bounds.wrong_tokens, seconds=self.bounds.wrong_seconds
        )
        # The number of requests in progress.
        self.busy = 0
        self._idle = anyio.Event()
        self._idle.set()
        self._own: dict[str, Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]] = {
            "/intents/{intent_id}/events": self._intent_events,
            "/metrics": self._metrics,
            "/mcp": self._mcp,
        }
        app = web.Application(middlewares=[self._outermost], client_max_size=guard.BODY_BYTES)
        for route in routes.TABLE:
            answer = self._open if route.open else self._serve
            handler = functools.partial(answer, route)
            # GET and HEAD are for every server (RFC 9110, section 9.1). A stream has no end that a HEAD could wait for.
            has_head = route.method == "GET" and route.stream is None and route.pattern not in self._own
            for method in (route.method, *(["HEAD"] if has_head else [])):
                app.router.add_route(method, route.pattern, handler, expect_handler=_not_yet)
        gate = Gate(self._body, self._write_refused, self._known, self._one_more_stream, self.bounds.pace)
        self._a2a = A2aEndpoints(
            server,
            endpoints.A2aGate(
                *(self._let_in, self._body, self._one_more_stream, self._still, self._headers, self.bounds.pace)
            ),
            Pushes(server, group, push_urls),
        )
        self._a2a.add_to(app.router, _not_yet)
        self._peer_tasks = PeerTasks(server, self._body)
        nothing = Services(_no_supervisor, _no_terminal, _no_packages)
        Console(server, console or nothing, gate).add_to(app.router, _not_yet)
        self._listener = Listener(app, connections=self.bounds.connections, head_seconds=self.bounds.head_seconds)

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections from now on (``listen.bind``)."""
        self.port = sock.getsockname()[1]
        self._guard = Guard(self.port, self._guard.origins)
        await self._listener.listen(sock)
        name = sock.getsockname()[0]
        self.server.console.address = f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"

    async def stop(self, *, grace_seconds: float) -> None:
        """Accept no more, end the streams, finish running requests within ``grace_seconds``, and abort the rest."""
        self._listener.refuse_more()
        self.server.feed.close()
        self._a2a.stop()
        with anyio.move_on_after(grace_seconds):
            await self._idle.wait()
        await self._listener.stop()
        await self._a2a.close()

    # Every request --------------------------------------------------------------------------------------------

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not self.busy:
            self._idle = anyio.Event()
        self.busy += 1
        try:
            response = await self._guarded(request, handler)
            if _CALLER not in request:
                self._listener.unknown(request.transport)
            if not response.prepared:
                response.headers.update(refusals.ALWAYS)
                with streams.within(request, self.bounds.pace.write_seconds):
                    await response.prepare(request)
                    await response.write_eof()
            return response
        finally:
            self.busy -= 1
            if not self.busy:
                self._idle.set()

    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        cors: Mapping[str, str] = self._guard.cors(None)
        try:
            head = Head(
                *(request.method, request.raw_path, request.headers, request.query.keys(), request.body_exists),
                (request.version.major, request.version.minor),
            )
            self._guard.check(head)
            cors = self._guard.cors(self._guard.origin(head), preflight=request.method == "OPTIONS")
            response = web.Response(status=204) if request.method == "OPTIONS" else await handler(request)
        except errors.HttpRefusedError as e:
            response = self._refusal(request, e.details["status"], e)
        except errors.MalformedRequestError as e:
            response = self._refusal(request, 400, e)
        except errors.AuthenticationError as e:
            response = self._refusal(request, 401, e)
            response.headers["WWW-Authenticate"] = "Bearer"
        except web.HTTPException as e:
            response = self._refusal(request, e.status, errors.HttpRefusedError(e.reason.lower()))
            response.headers.update({name: e.headers[name] for name in ("Allow",) if name in e.headers})
        except ConnectionError:
            raise
        except Exception:
            _LOG.exception("a request over HTTP failed")
            response = refusals.fault("the daemon failed at this; its log has more")
        if not response.prepared:
            response.headers.update(cors)
        return response

    def _refusal(self, request: web.Request, status: int, error: errors.CovenantError) -> web.Response:
        self.server.meter.refused[str(status)] += 1
        if endpoints.is_ours(request):
            return endpoints.refusal(request, status, error)
        return refusals.refusal(status, error)

    # Routes ---------------------------------------------------------------------------------------------------

    async def _open(self, route: Route, request: web.Request) -> web.StreamResponse:
        if route.path == "/health":
            return web.json_response({"status": "ok"})
        if route.path == "/version":
            described = json.loads(responses.ProtocolDescription().to_bytes())
            return web.json_response({**described, "name": "covenantd", "version": _version()})
        if route.path == "/openapi.json":
            return web.Response(body=_described(), content_type=JSON)
        return await self._peer_tasks.answer(request)

    async def _let_in(self, request: web.Request) -> Caller:
        caller = await self._admitted(request)
        self._known(request, caller)
        return caller

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        caller = await self._let_in(request)
        if own := self._own.get(route.path):
            return await own(request, caller)
        asked, on = await self._asked(route, request), _follow(route, request)
        if route.stream and streams.wanted(request.headers.getall("Accept", [])):
            return await self._stream(request, caller, asked, on=on)
        return self._answered(await authentication.respond(self.server, caller, asked))

    def _known(self, request: web.Request, caller: Caller) -> None:
        """Count the connection as the caller's."""
        request[_CALLER] = caller
        if not self._listener.known(request.transport, None if caller.operator else caller.agent.pubkey):
            raise errors.HttpRefusedError(
                "too many connections of this caller are open, or of all callers", hint="close one of them", status=429
            )

    async def _admitted(self, request: web.Request) -> Caller:
        try:
            return await authentication.admit(self.server, guard.bearer(request.headers), "http")
        except errors.AuthenticationError as e:
            await self._write_refused(e)
            raise
        except (errors.CovenantError, OSError):
            _LOG.exception("the registry of peers cannot be read")
            raise _unavailable("the registry of peers cannot be read") from None

    async def _write_refused(self, error: errors.AuthenticationError) -> None:
        """Log a refused token, or fail the request: attempts must not go unlogged."""
        try:
            written = await self._wrong.write(error.message)
        except (errors.CovenantError, OSError):
            _LOG.exception("a refusal cannot be written to the audit log")
            raise _unavailable("the refusal cannot be written down") from None
        if not written:
            raise errors.HttpRefusedError("too many tokens were wrong", hint="wait a second", status=429)

    async def _asked(self, route: Route, request: web.Request) -> requests.Request:
        body = await self._body(request) if request.body_exists else b""
        build = functools.partial(
            http_requests.build, route, path=request.match_info, query=list(request.query.items()), body=body
        )
        # Parsing a large body would block other requests noticeably.
        return await anyio.to_thread.run_sync(build) if len(body) > self.bounds.large_bytes else build()

    async def _body(self, request: web.Request) -> bytes:
        body = await self._read_body(request)
        # A client may send its body long after its token was let in, which may have been revoked meanwhile.
        if (caller := request.get(_CALLER)) is not None:
            authentication.check(self.server, caller)
        return body

    async def _read_body(self, request: web.Request) -> bytes:
        if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
            # RFC 9110, section 10.1.1; only now, because a refused client need not send its body.
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        large = request.content_length is None or request.content_length > self.bounds.large_bytes
        with anyio.move_on_after(self.bounds.body_seconds):
            if not large:
                return await request.read()
            caller = request.get(_CALLER)
            async with self._large.place("" if caller is None else caller.agent.pubkey):
                return await request.read()
        raise errors.HttpRefusedError("the body did not come in time", status=408)

    @staticmethod
    def _answered(response: responses.Response) -> web.Response:
        if isinstance(response, responses.Error) and response.code == errors.InternalError.code:
            return refusals.fault(response.message)
        return web.Response(body=response.to_bytes(), content_type=JSON)

    # Streams, and what has no request -------------------------------------------------------------------------

    async def _stream(
        self, request: web.Request, caller: Caller, asked: requests.Request, *, on: bool
    ) -> web.StreamResponse:
        with self._one_more_stream(caller):
            watch = self._watch(request, caller)
            if isinstance(asked, requests.SubmitIntent):
                return await feeds.submitted(watch, asked)
            assert isinstance(asked, requests.RecentAudit | requests.RecentMemory)
            seen = request.headers.get("Last-Event-ID", "")
            done = await feeds.recent(watch, asked, on=on, seen=seen)
            return self._answered(done) if isinstance(done, responses.Response) else done

    async def _intent_events(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        with self._one_more_stream(caller):
            extended = _flag(request, "extended", default=False)
            done = await feeds.of_intent(
                self._watch(request, caller), request.match_info["intent_id"], extended=extended
            )
            return self._answered(done) if isinstance(done, responses.Response) else done

    async def _metrics(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        text = await metrics.text(self.server, caller)
        return web.Response(body=text.encode(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _mcp(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """Answer one message of MCP (streamable HTTP without sessions or streams)."""
        given = request.headers
        headers = {one.lower(): ", ".join(given.getall(one)) for one in given if one.lower().startswith("mcp-")}
        body = await self._body(request) if request.body_exists else b""
        found = await anyio.to_thread.run_sync(mcp_server.take, body, headers)
        if found is None:
            return web.Response(status=202)
        if isinstance(found, mcp_server.McpReply):
            return web.Response(body=found.message, status=found.status, content_type=JSON)
        document = json.loads((await authentication.respond(self.server, caller, found.request)).to_bytes())
        return web.Response(body=mcp_server.answer(found, document), content_type=JSON)

    def _watch(self, request: web.Request, caller: Caller) -> feeds.Watch:
        token = guard.bearer(request.headers)
        return feeds.Watch(self.server, caller, token, request, self._headers(request), self.bounds.pace)

    def _headers(self, request: web.Request) -> dict[str, str]:
        return {**refusals.ALWAYS, **self._guard.cors(request.headers.get("Origin"))}

    async def _still(self, request: web.Request, caller: Caller) -> bool:
        return await self._watch(request, caller).still()

    @contextmanager
    def _one_more_stream(self, caller: Caller) -> Iterator[None]:
        """Limit the streams of each caller; a full feed is an error, not a wait."""
        key = caller.agent.pubkey
        if self._streams[key] >= self.bounds.streams_of_one:
            raise errors.HttpRefusedError("too many streams are open", hint="close one of them", status=429)
        self._streams[key] += 1
        try:
            yield
        except errors.TooManySubscribersError as e:
            raise errors.HttpRefusedError(e.message, hint=e.hint, status=429) from None
        finally:
            self._streams[key] -= 1
            if not self._streams[key]:
                del self._streams[key]


def _follow(route: Route, request: web.Request) -> bool:
    """Whether a stream of this request continues with new items; other requests have no such parameter."""
    return _flag(request, "follow", default=True) if route.stream and route.method == "GET" else True


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    said = request.query.getall(name, ["true" if default else "false"])
    if said not in (["true"], ["false"]):
        raise errors.MalformedRequestError(f"`{name}` is `true` or `false`")
    return said == ["true"]


async def _not_yet(request: web.Request) -> None:
    """Do nothing: aiohttp would ask for the body before the token is checked."""


async def _no_supervisor(kind: str, /, **fields: Any) -> Mapping[str, Any]:
    raise errors.NoSupervisorError("no supervisor is there to ask", hint="start covenant-supervisor")


def _no_terminal(run: str, rows: int, columns: int) -> NoReturn:
    raise errors.NoSupervisorError("no supervisor is there to ask", hint="start covenant-supervisor")


def _no_packages(kind: str, fields: Mapping[str, str]) -> Mapping[str, Any]:
    raise errors.UnsupportedError("this gateway shows no packages")


def _unavailable(message: str) -> errors.HttpRefusedError:
    return errors.HttpRefusedError(message, hint="the daemon's log has more", status=503)


@functools.cache
def _version() -> str:
    return importlib.metadata.version("covenant-supervisor")


@functools.cache
def _described() -> bytes:
    return openapi.text().encode()
