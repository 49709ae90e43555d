"""Server-sent events: the envelopes of version 2 (covenant.wire.streams), written while things happen.

    subscribe ── then ask for what was ── then what comes, each as it comes, nothing twice and nothing left out

A stream ends with ``stream_end`` (its intent ended, or the daemon stops) or ``stream_error`` (it fell behind, or its
caller may not see it any more). Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
from aiohttp import web

from covenant.handlers.state.event_feed import Item, Subscription
from covenant.wire import streams
from policy import errors

TYPE: Final = "text/event-stream"
HEADERS: Final[Mapping[str, str]] = {"Cache-Control": "no-cache, no-store", "X-Accel-Buffering": "no"}


def wanted(accept: Iterable[str]) -> bool:
    """Whether one of the values of ``Accept`` names event streams."""
    kinds = (part.split(";")[0].strip().lower() for value in accept for part in value.split(","))
    return TYPE in kinds


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a client that reads nothing is borne with, and how often one that hears nothing is told so."""

    write_seconds: float = 30.0
    idle_seconds: float = 5.0


class Events:
    """One response of events. What it writes is one stream, so that its number is always 0."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], pace: Pace) -> None:
        self._request = request
        self._pace = pace
        self._sequence = 0
        self.response = web.StreamResponse(headers={**headers, **HEADERS, "Content-Type": f"{TYPE}; charset=utf-8"})
        # A stream has no length, and whatever was pipelined behind it would wait for ever.
        self.response.force_close()

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        transport = self._request.transport
        return transport is None or transport.is_closing()

    async def begin(self, response_kind: str, *, id: str = "") -> None:  # noqa: A002 (the format's own word)
        """Say what comes.

        Raises:
            ConnectionError: the client has left, or reads nothing. So do the others.
        """
        with within(self._request, self._pace.write_seconds):
            await self.response.prepare(self._request)
        await self._say(streams.StreamBegin(stream_id=0, response_kind=response_kind), id)

    async def chunk(self, chunk: Any, *, id: str = "") -> None:  # noqa: A002
        """The next part. ``id`` is what a client that comes again says that it has seen."""
        await self._say(streams.StreamChunk(stream_id=0, sequence=self._sequence, chunk=chunk), id)
        self._sequence += 1

    async def end(self, summary: Any = None) -> None:
        """That was all."""
        await self._say(streams.StreamEnd(stream_id=0, summary=summary))

    async def fail(self, error: errors.CovenantError) -> None:
        """There is no more, and why."""
        await self._say(streams.StreamError(stream_id=0, message=error.message))

    async def nothing_new(self) -> None:
        """A comment, so that a client that has left is noticed and one that stays does not give up."""
        await self._write(b": nothing new\n\n")

    async def _say(self, envelope: streams.Envelope, id: str = "") -> None:  # noqa: A002
        # JSON has no line break outside of strings, and inside it is escaped: one line of data.
        mark = f"id: {id}\n" if id.isascii() and id.isprintable() and id else ""
        await self._write(b"%sevent: %s\ndata: %s\n\n" % (mark.encode(), envelope.kind.encode(), envelope.to_bytes()))

    async def _write(self, data: bytes) -> None:
        with within(self._request, self._pace.write_seconds):
            await self.response.write(data)


@contextmanager
def within(request: web.BaseRequest, seconds: float) -> Iterator[None]:
    """Write within this time, or end the connection: what a client does not read is the daemon's memory.

    Raises:
        ConnectionError: it took longer.
    """
    with anyio.move_on_after(seconds) as limit:
        yield
    if limit.cancelled_caught:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client reads nothing")


async def follow(
    events: Events,
    subscription: Subscription,
    pace: Pace,
    *,
    take: Callable[[Item], Awaitable[bool]],
    still: Callable[[], Awaitable[bool]],
) -> None:
    """Write what comes until there is no more, the client has left, or it may not see it any more.

    Args:
        take: writes one item if it is for this stream; False when that was the last.
        still: whether whoever asked may go on; asked before each item, and while there is none.
    """
    try:
        while not events.gone:
            item, waited = None, False
            with anyio.move_on_after(pace.idle_seconds) as limit:
                item = await subscription.receive()
            waited = limit.cancelled_caught
            if not await still():
                raise errors.AuthenticationError("this stream's caller may not see it any more")
            if waited:
                await events.nothing_new()
            elif item is None:
                return await events.end({"reason": "the daemon stops"})
            elif not await take(item):
                return None
    except (errors.SlowSubscriberError, errors.AuthenticationError) as e:
        await events.fail(e)
