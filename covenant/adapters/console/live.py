"""The stream that pages follow: the live runs, what they are held for, and how often the daemon's stores changed. A
page asks for the rest itself.

Each stream looks once a second and sends what differs, so that many rows a second are one event. All streams share the
requests to the supervisor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
from aiohttp import web

from covenant.adapters.http.streams import Events, Pace
from covenant.handlers.server import Server
from policy import errors

_SECONDS: Final = 1.0
# The supervisor asks each live run what it is held for.
_HELD_SECONDS: Final = 2.0
Ask = Callable[[], Awaitable[bytes]]


class Live:
    """The streams of one daemon. ``runs`` asks the supervisor for its live runs, ``held`` for what they wait for."""

    def __init__(self, server: Server, runs: Ask, held: Ask) -> None:
        self._server = server
        self._runs, self._held = _Shared(runs, _SECONDS), _Shared(held, _HELD_SECONDS)

    async def follow(self, events: Events, lives: Callable[[], bool], pace: Pace) -> web.StreamResponse:
        """Write changes until the client disconnects, its session ends, or the daemon stops."""
        await events.begin("console_live")
        sent: dict[str, Any] = {}
        written = time.monotonic()
        while not events.gone:
            if self._server.feed.closed:
                await events.end({"reason": "the daemon stops"})
                break
            if not lives():
                await events.fail(errors.AuthenticationError("the session of this page has ended"))
                break
            now = {
                "runs": json.loads(await self._runs.answer()),
                # Its time is another one each time.
                "held": json.loads(await self._held.answer()).get("requests", []),
                "changes": dict(self._server.feed.published),
            }
            fresh = {name: value for name, value in now.items() if sent.get(name) != value}
            if fresh:
                await events.chunk(fresh)
                sent |= fresh
                written = time.monotonic()
            elif time.monotonic() - written > pace.idle_seconds:
                await events.nothing_new()
                written = time.monotonic()
            await anyio.sleep(_SECONDS)
        return events.response


class _Shared:
    """One request for all streams, sent again after ``seconds`` at the earliest."""

    def __init__(self, ask: Ask, seconds: float) -> None:
        self._ask, self._seconds = ask, seconds
        self._lock = anyio.Lock()
        self._known = b"{}"
        self._at = -seconds

    async def answer(self) -> bytes:
        async with self._lock:
            if time.monotonic() - self._at >= self._seconds:
                self._known = await self._ask()
                self._at = time.monotonic()
            return self._known
