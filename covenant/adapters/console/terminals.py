"""Terminals of sessions in the browser: output as events of one request, input and sizes by requests of their own.

    POST /console/attach   {run, rows, columns}            events: {terminal}, {data: base64}, ..., the end
    POST /console/type     {terminal, data} or with a size  nothing but whether it was taken

All of them need both halves of a session, as every request of a page does; a WebSocket could send no header, and so
not the half that is bound to this origin. A terminal belongs to the session that attached it. The supervisor decides
whether this daemon's user may attach to the run.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NamedTuple, Protocol

import anyio
from aiohttp import web

from covenant.adapters.http import refusals
from covenant.adapters.http.streams import Events, Pace
from covenant.handlers.server import Server
from covenant.handlers.state.console_logins import ConsoleSession
from covenant.wire import responses
from policy import errors, wire_json

# The terminals of all pages. Each is an open request at the supervisor, which takes 32 of one user.
MOST: Final = 3
MOST_INPUT: Final = 64 * 1024
_RUN: Final = re.compile(r"[0-9a-f][0-9a-f-]{0,35}")
_MOST_ROWS: Final = 1000
# How long a session that ended, or a daemon that stops, may go unnoticed.
_SECONDS: Final = 1.0


class Terminal(Protocol):
    """As covenant.runtime.attached.AttachedTerminal."""

    run_id: str
    ended: Callable[[], Awaitable[Mapping[str, Any]]]

    async def read(self) -> bytes | None:
        """Return the next filtered output; None at its end."""

    async def write(self, data: bytes) -> None:
        """Type ``data``."""

    def resize(self, rows: int, columns: int) -> None:
        """Set the size."""


# Attaches to the terminal of a run: its id, rows and columns.
Attach = Callable[[str, int, int], AbstractAsyncContextManager[Terminal]]


class Attached(NamedTuple):
    """A terminal, and the key of the session of the browser that attached it."""

    terminal: Terminal
    session: bytes


class Terminals:
    """The terminals of all pages of one daemon."""

    def __init__(self, server: Server, attach: Attach) -> None:
        self._server, self._attach = server, attach
        self._open: dict[str, Attached] = {}
        self._taken = 0

    async def show(
        self, session: ConsoleSession, body: bytes, events: Events, lives: Callable[[], bool], pace: Pace
    ) -> web.StreamResponse:
        """Attach to a run and write its output until it ends, the client disconnects, or its session ends.

        Raises:
            errors.MalformedRequestError: the request names no run or no size.
        """
        asked = _object(body, {"run", "rows", "columns"})
        run, (rows, columns) = asked["run"], _size(asked)
        if not isinstance(run, str) or not _RUN.fullmatch(run):
            raise errors.MalformedRequestError("a run is named by its id")
        if self._taken >= MOST:
            busy = errors.BusyError(
                f"{MOST} terminals are open in browsers", hint="close one: covenant attach works too"
            )
            return _refusal(busy)
        self._taken += 1
        try:
            async with self._attach(run, rows, columns) as terminal:
                await self._attached(session, terminal, events, lives, pace)
        except errors.CovenantError as e:
            if events.response.prepared:
                await events.fail(e)
            else:
                return _refusal(e)
        finally:
            self._taken -= 1
        return events.response

    async def _attached(
        self, session: ConsoleSession, terminal: Terminal, events: Events, lives: Callable[[], bool], pace: Pace
    ) -> None:
        about = {"run_id": terminal.run_id}
        await self._server.audit.append("console_attached", about, issuer=session.caller.agent)
        name = secrets.token_urlsafe(16)
        self._open[name] = Attached(terminal, session.key)
        try:
            await events.begin("console_terminal")
            await events.chunk({"terminal": name, **about})
            await self._follow(terminal, events, lives, pace)
        finally:
            del self._open[name]

    async def _follow(self, terminal: Terminal, events: Events, lives: Callable[[], bool], pace: Pace) -> None:
        quiet = 0.0
        while not events.gone:
            if self._server.feed.closed:
                return await events.end({"reason": "the daemon stops"})
            if not lives():
                raise errors.AuthenticationError("the session of this page has ended")
            data: bytes | None = b""
            with anyio.move_on_after(_SECONDS):
                data = await terminal.read()
            if data is None:
                return await events.end({"reason": "the session has ended", "record": await terminal.ended()})
            if data:
                await events.chunk({"data": base64.b64encode(data).decode()})
            quiet = 0.0 if data else quiet + _SECONDS
            if quiet >= pace.idle_seconds:
                await events.nothing_new()
                quiet = 0.0
        return None

    async def take(self, session: ConsoleSession, body: bytes) -> web.Response:
        """Type into a terminal of this session, or set its size.

        Raises:
            errors.MalformedRequestError: it is neither.
        """
        asked = _object(body, {"terminal", "data"}, {"terminal", "rows", "columns"})
        known = self._open.get(asked["terminal"]) if isinstance(asked["terminal"], str) else None
        if known is None or known.session != session.key:
            return _refusal(errors.NoRunError("this page is not attached to it", hint="attach again"))
        if "data" not in asked:
            known.terminal.resize(*_size(asked))
            return web.json_response({"taken": 0})
        if not isinstance(asked["data"], str) or len(asked["data"]) > MOST_INPUT:
            raise errors.MalformedRequestError(f"input is a text of at most {MOST_INPUT} characters")
        data = asked["data"].encode("utf-8", "replace")
        try:
            await known.terminal.write(data)
        except errors.CovenantError as e:
            return _refusal(e)
        return web.json_response({"taken": len(data)})


def _object(body: bytes, *shapes: set[str]) -> dict[str, Any]:
    asked = wire_json.read(body)
    if not isinstance(asked, dict) or asked.keys() not in shapes:
        raise errors.MalformedRequestError("the console sends no such request about a terminal")
    return asked


def _size(asked: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = asked["rows"], asked["columns"]
    if not all(type(one) is int and 1 <= one <= _MOST_ROWS for one in (rows, columns)):
        raise errors.MalformedRequestError(f"a size has 1 to {_MOST_ROWS} rows and columns")
    return rows, columns


def _refusal(error: errors.CovenantError) -> web.Response:
    return web.Response(body=responses.Error.of(error).to_bytes(), content_type=refusals.JSON)
