"""The console's paths: files for any browser, a login, and requests of browsers that are logged in.

    /                      the page                POST /console/login     a code for the two halves of a session
    /console/NAME          its files               POST /console/ask       one request, both halves
    GET /console/live      events, both halves     POST /console/logout    the end of the session
    POST /console/attach   a terminal's output     POST /console/type      input and sizes for it, both halves

Every answer has the content policy. A request counts only from this origin's own pages (``_from_here``), and from no
other origin that the gateway lets ask elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from covenant.adapters.console import asks, files, live, terminals
from covenant.adapters.http import refusals, streams
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.handlers.state.console_logins import SESSION_MS, ConsoleSession
from policy import errors, wire_json

COOKIE: Final = "covenant_console"
PAGE_HEADER: Final = "X-Covenant-Page"
# More than a login's body needs. It is read before the caller is known.
_LOGIN_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Gate:
    """The gateway's own parts that the console shares with the other routes: bounds, and the log of refusals."""

    body: Callable[[web.Request], Awaitable[bytes]]
    refused: Callable[[errors.AuthenticationError], Awaitable[None]]
    known: Callable[[web.Request, Caller], None]
    stream: Callable[[Caller], AbstractContextManager[None]]
    pace: streams.Pace


@dataclass(frozen=True, slots=True)
class Services:
    """The services that pages ask beside the daemon itself: the supervisor, its terminals, and packages."""

    supervisor: asks.AskSupervisor
    attach: terminals.Attach
    packages: asks.ViewPackages


class Console:
    """The routes of the console of one daemon."""

    def __init__(self, server: Server, services: Services, gate: Gate) -> None:
        self._server, self._gate = server, gate
        self._asks = asks.Asks(server, services.supervisor, services.packages)
        self._terminals = terminals.Terminals(server, services.attach)
        self._live = live.Live(server, self._asks.runs, self._asks.held)

    def add_to(self, router: web.UrlDispatcher, not_yet: Any) -> None:
        """Add the routes. ``not_yet`` answers no ``Expect`` before the caller is known."""
        router.add_get("/", functools.partial(self._file, files.INDEX))
        for name in files.load():
            router.add_get(f"/console/{name}", functools.partial(self._file, name))
        acts = {"login": self._login, "logout": self._logout, "ask": self._ask}
        acts |= {"attach": self._attach, "type": self._type}
        for name, act in acts.items():
            router.add_post(f"/console/{name}", functools.partial(self._own, act), expect_handler=not_yet)
        router.add_get("/console/live", functools.partial(self._own, self._events), allow_head=False)

    async def _file(self, name: str, request: web.Request) -> web.StreamResponse:
        found = files.load()[name]
        return web.Response(body=found.body, headers=files.HEADERS, content_type=found.media_type, charset="utf-8")

    async def _own(
        self, act: Callable[[web.Request], Awaitable[web.StreamResponse]], request: web.Request
    ) -> web.StreamResponse:
        _from_here(request)
        response = await act(request)
        if not response.prepared:
            response.headers.update(files.HEADERS)
        return response

    async def _login(self, request: web.Request) -> web.StreamResponse:
        if request.content_length is None or request.content_length > _LOGIN_BYTES:
            raise errors.HttpRefusedError("a login has a short body of known length", status=413)
        asked = wire_json.read(await self._gate.body(request))
        code = asked.get("code") if isinstance(asked, dict) else None
        caller = self._server.console.redeem(code) if isinstance(code, str) else None
        if caller is None or not self._admits(caller):
            raise await self._refused("unknown, used or expired code of a console link")
        entered = self._server.console.enter(caller, request.cookies.get(_cookie(request), ""))
        row = {"expires_at": entered.session.expires_at}
        await self._server.audit.append("console_entered", row, issuer=caller.agent)
        # The key that signs checkpoints, for a page that checks one.
        told = {"page": entered.page, "display": caller.agent.display, "log_key": self._server.audit.verifier.text}
        response = web.json_response(told)
        response.set_cookie(
            *(_cookie(request), entered.cookie),
            max_age=SESSION_MS // 1000,
            path="/console/",
            httponly=True,
            samesite="Strict",
        )
        return response

    async def _logout(self, request: web.Request) -> web.StreamResponse:
        self._server.console.leave(await self._session(request))
        response = web.json_response({"left": True})
        response.del_cookie(_cookie(request), path="/console/", httponly=True, samesite="Strict")
        return response

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        session = await self._session(request)
        answer = await self._asks.answer(session.caller, await self._gate.body(request))
        return web.Response(body=answer, content_type=refusals.JSON)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        session = await self._session(request)
        headers = {**refusals.ALWAYS, **files.HEADERS}
        with self._gate.stream(session.caller):
            events = streams.Events(request, headers, self._gate.pace)
            return await self._live.follow(events, lambda: self._lives(session), self._gate.pace)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        session = await self._session(request)
        body = await self._gate.body(request)
        headers = {**refusals.ALWAYS, **files.HEADERS}
        with self._gate.stream(session.caller):
            events = streams.Events(request, headers, self._gate.pace)
            lives = functools.partial(self._lives, session)
            return await self._terminals.show(session, body, events, lives, self._gate.pace)

    async def _type(self, request: web.Request) -> web.StreamResponse:
        session = await self._session(request)
        return await self._terminals.take(session, await self._gate.body(request))

    async def _session(self, request: web.Request) -> ConsoleSession:
        """Return the session of a request, both of whose halves must fit.

        Raises:
            errors.AuthenticationError: they do not. A request that brings none of a session is not written to the log.
        """
        cookie, page = request.cookies.get(_cookie(request)), request.headers.get(PAGE_HEADER)
        if cookie is None or page is None:
            raise errors.AuthenticationError("this browser is not logged in", hint="covenant console prints a link")
        session = self._server.console.find(cookie, page)
        if session is None or not self._lives(session):
            raise await self._refused("unknown or ended session of the console")
        self._gate.known(request, session.caller)
        return session

    async def _refused(self, reason: str) -> errors.AuthenticationError:
        error = errors.AuthenticationError(reason, hint="covenant console prints a new link")
        await self._gate.refused(error)
        return error

    def _lives(self, session: ConsoleSession) -> bool:
        return self._server.console.lives(session) and self._admits(session.caller)

    def _admits(self, caller: Caller) -> bool:
        """Whether the token holds by which the link was asked for: a rotation of it ends the sessions too."""
        return self._server.peers.admits(caller.agent.pubkey, caller.token_prefix)


def _from_here(request: web.Request) -> None:
    """Refuse a page of another origin, which may be of this site: a site is a host without its port.

    Raises:
        errors.HttpRefusedError: another origin's page asks, or a change comes without an origin.
    """
    origins = request.headers.getall("Origin", [])
    own = f"http://{request.headers['Host'].lower()}"
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    if site != "same-origin" or ((origins or request.method != "GET") and origins != [own]):
        raise errors.HttpRefusedError("only the console's own pages may ask this", status=403)


def _cookie(request: web.Request) -> str:
    """Return the name of the cookie: ports share their cookies, and several daemons may have a console."""
    return f"{COOKIE}_{request.headers['Host'].rpartition(':')[2]}"
