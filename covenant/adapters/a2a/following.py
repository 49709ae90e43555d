"""Follow a task over HTTP: wait for its end, or write its events as server-sent events.

    follow ── then read the task ── then its changes as they come: none is lost between the two

Only the newest state waits for a slow client, so a client that does not read costs no memory; its connection is aborted
after a time. A stream ends with its task, with its caller's token, or with the daemon.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
from aiohttp import web

from covenant.adapters.http import streams
from covenant.handlers.caller import Caller
from covenant.handlers.mailbox import a2a
from covenant.handlers.server import Server
from covenant.wire.a2a import shapes
from covenant.wire.a2a.calls import Dialect
from covenant.wire.a2a.shapes import TaskView
from policy import errors


class Followed:
    """A task that is followed: its newest state, and whether the daemon stops."""

    def __init__(self, look: Callable[[], TaskView]) -> None:
        self._look = look
        self._changed = anyio.Event()
        self.stopped = False

    def look(self) -> TaskView:
        """Return the task as it is now."""
        return self._look()

    def wake(self, view: TaskView | None = None) -> None:
        """Note a change."""
        self._changed.set()

    def stop(self) -> None:
        """Note that the daemon stops."""
        self.stopped = True
        self._changed.set()

    async def change(self, seconds: float) -> bool:
        """Wait for a change for at most so long; False if there was none."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()
        changed, self._changed = self._changed.is_set(), anyio.Event()
        return changed


class Following:
    """The tasks that clients of one daemon follow."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._all: set[Followed] = set()
        self._stopped = False

    def stop(self) -> None:
        """End all streams and waits, now and from now on."""
        self._stopped = True
        for one in self._all:
            one.stop()

    @contextmanager
    def task(self, caller: Caller, agent_id: str, task_id: str) -> Iterator[Followed]:
        """Follow a task of this caller.

        Raises:
            errors.NoTaskError: it has no such task.
        """
        server = self._server
        name = a2a.find(server, caller, agent_id, task_id).task.id
        one = Followed(lambda: a2a.view(a2a.find(server, caller, agent_id, task_id)))
        one.stopped = self._stopped
        forget = a2a.follow(server, name, one.wake)
        self._all.add(one)
        try:
            yield one
        finally:
            self._all.discard(one)
            forget()


async def end_of(one: Followed, seconds: float) -> TaskView:
    """Wait until the task has ended, for at most so long. Returns it as it is then."""
    with anyio.move_on_after(seconds):
        while not (view := one.look()).ended and not one.stopped:
            await one.change(seconds)
        return view
    return one.look()


class TaskEvents:
    """One response of server-sent events of a task. ``wrap`` makes an event's document."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        pace: streams.Pace,
        wrap: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._request, self._pace, self._wrap = request, pace, wrap
        self.response = web.StreamResponse(
            headers={**headers, **streams.HEADERS, "Content-Type": f"{streams.TYPE}; charset=utf-8"}
        )
        # A stream has no length, and a request pipelined after it would wait forever.
        self.response.force_close()

    async def write(self, one: Followed, dialect: Dialect, still: Callable[[], Awaitable[bool]]) -> None:
        """Write the task, and its events until it has ended.

        Args:
            still: returns True while the token admits the caller.

        Raises:
            ConnectionError: the client has disconnected, or does not read.
        """
        view = one.look()
        with streams.within(self._request, self._pace.write_seconds):
            await self.response.prepare(self._request)
        await self._say(view, dialect, first=True)
        while not view.ended and not one.stopped:
            changed = await one.change(self._pace.idle_seconds)
            if not await still():
                return
            try:
                now = one.look()
            except errors.NoTaskError:
                return  # a compaction ended it
            if now.state != view.state:
                view = now
                await self._say(view, dialect, first=False)
            elif not changed:
                # Detects a disconnected client, and keeps a connected one from giving up.
                await self._write(b": nothing new\n\n")

    async def _say(self, view: TaskView, dialect: Dialect, *, first: bool) -> None:
        for event in shapes.events(view, dialect, first=first):
            document = json.dumps(self._wrap(event), separators=(",", ":"))
            await self._write(f"data: {document}\n\n".encode())

    async def _write(self, data: bytes) -> None:
        with streams.within(self._request, self._pace.write_seconds):
            await self.response.write(data)
