"""Server-sent events: the envelopes of version 2 (covenant.wire.streams), written as events occur.

    subscribe ── then read existing items ── then new ones as they come, none twice and none left out

A stream ends with ``stream_end`` (its intent ended, or the daemon stops) or ``stream_error`` (it fell behind, or its
caller may no longer see it). Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
import uuid
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
    """How long a write to a slow client may take, and how often an idle stream sends a comment."""

    write_seconds: float = 30.0
    idle_seconds: float = 5.0


class Events:
    """One response of events. It contains a single stream, with an id of its own.

    Without ``enveloped`` it has each chunk by itself, in an event without a name, and neither a beginning nor an end.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str], pace: Pace, *, enveloped: bool = True) -> None:
        self._request = request
        self._pace = pace
        self._enveloped = enveloped
        self._sequence = 0
        self._id = str(uuid.uuid4())
        self.response = web.StreamResponse(headers={**headers, **HEADERS, "Content-Type": f"{TYPE}; charset=utf-8"})
        # A stream has no length, and a request pipelined after it would wait forever.
        self.response.force_close()

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected."""
        transport = self._request.transport
        return transport is None or transport.is_closing()

    async def begin(self, response_kind: str, *, id: str = "") -> None:  # noqa: A002 (the format's own word)
        """Write the start of the stream.

        Raises:
            ConnectionError: the client has disconnected, or does not read. The other methods raise it too.
        """
        with within(self._request, self._pace.write_seconds):
            await self.response.prepare(self._request)
        await self._say(streams.StreamBegin(stream_id=self._id, response_kind=response_kind), id)

    async def chunk(self, chunk: Any, *, id: str = "") -> None:  # noqa: A002
        """Write the next part. A client that reconnects sends the last ``id`` that it received."""
        if not self._enveloped:
            await self._write(b"%sdata: %s\n\n" % (_mark(id), json.dumps(chunk, separators=(",", ":")).encode()))
            return
        await self._say(streams.StreamChunk(stream_id=self._id, sequence=self._sequence, chunk=chunk), id)
        self._sequence += 1

    async def end(self, summary: Any = None) -> None:
        """Write the regular end of the stream."""
        await self._say(streams.StreamEnd(stream_id=self._id, summary=summary))

    async def fail(self, error: errors.CovenantError) -> None:
        """Write the end of the stream with an error."""
        await self._say(streams.StreamError(stream_id=self._id, message=error.message))

    async def nothing_new(self) -> None:
        """Write a comment, which detects a disconnected client and keeps a connected one from giving up."""
        await self._write(b": nothing new\n\n")

    async def _say(self, envelope: streams.Envelope, id: str = "") -> None:  # noqa: A002
        if self._enveloped:
            # JSON has line breaks only between tokens, and escapes them in strings: so this is one line of data.
            await self._write(b"%sevent: %s\ndata: %s\n\n" % (_mark(id), envelope.kind.encode(), envelope.to_bytes()))

    async def _write(self, data: bytes) -> None:
        with within(self._request, self._pace.write_seconds):
            await self.response.write(data)


def _mark(id: str) -> bytes:  # noqa: A002
    return f"id: {id}\n".encode() if id.isascii() and id.isprintable() and id else b""


@contextmanager
def within(request: web.BaseRequest, seconds: float) -> Iterator[None]:
    """Write within this time, or abort the connection: unread data uses the daemon's memory.

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
    """Write new items until there are no more, the client disconnects, or it may no longer see them.

    Args:
        take: writes one item if it belongs to this stream; False after the last.
        still: returns True while the caller may continue; called before each item, and while there is none.
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
