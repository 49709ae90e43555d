"""The stream that pages follow: the live runs, and how often the daemon's stores changed. A page asks for
the rest itself.

Each stream looks once a second and sends what differs, so that many rows a second are one event. All streams share one
request to the supervisor.
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


class Live:
    """The streams of one daemon. ``runs`` asks the supervisor for its live runs."""

    def __init__(self, server: Server, runs: Callable[[], Awaitable[bytes]]) -> None:
        self._server, self._runs = server, runs
        self._lock = anyio.Lock()
        self._known = b"{}"
        self._at = 0.0

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
            now = {"runs": json.loads(await self._top()), "changes": dict(self._server.feed.published)}
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

    async def _top(self) -> bytes:
        async with self._lock:
            if time.monotonic() - self._at >= _SECONDS / 2:
                self._known = await self._runs()
                self._at = time.monotonic()
            return self._known
