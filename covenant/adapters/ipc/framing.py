"""Frames of one connection: split incoming bytes into frames, and queue outgoing ones.

It uses asyncio's protocol instead of anyio's streams: these cost a task switch and two objects for each read, which is
most of the time of a ping (benchmarks/ipc.py). The layers above use anyio.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import anyio

from covenant.wire import frames, responses
from policy import errors

if TYPE_CHECKING:
    from covenant.adapters.ipc.limits import IpcBounds

# The most bytes that are queued and written together.
_TOGETHER_BYTES: Final = 64 * 1024


class Channel(asyncio.Protocol):
    """One client's frames in both directions. Until ``widen`` a frame is limited to the length of a handshake."""

    def __init__(self, bounds: IpcBounds) -> None:
        self._bounds = bounds
        self._splitter = frames.Splitter(most=bounds.handshake_bytes)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._stopping = False
        self._reading = True
        self._writable = True
        self._out: list[bytes] = []
        self._out_bytes = 0
        # The semaphore for large frames, set once the client is authenticated.
        self._large: anyio.Semaphore | None = None
        self._holds_large = False

    # asyncio's side: called by the loop, never waits -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.BaseProtocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        self._splitter.feed(data)
        # The buffer is limited while frames wait; a large frame is read separately (`_rest`).
        if len(self._splitter) > self._bounds.small_bytes and not self._holds_large:
            self._pause()
        self._wake()

    def eof_received(self) -> bool:
        """Handle EOF (asyncio.Protocol). Returns True: a client that sends no more may still read responses."""
        self._ended = True
        self._wake()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.BaseProtocol."""
        self._ended = True
        self._writable = True
        self._wake()

    def pause_writing(self) -> None:
        """asyncio.BaseProtocol."""
        self._writable = False

    def resume_writing(self) -> None:
        """asyncio.BaseProtocol."""
        self._writable = True
        self._wake()

    # Called by the connection's task ----------------------------------------------------------------------------

    def stop(self) -> None:
        """Read no further frame."""
        self._stopping = True
        self._wake()

    def widen(self, large: anyio.Semaphore) -> None:
        """Accept frames of any size; a large frame holds one of these places."""
        self._large = large
        self._splitter.most = frames.MAX_BYTES

    def abort(self) -> None:
        """Abort the connection now, without writing the queue."""
        self._transport.abort()

    def close(self) -> None:
        """Close the connection after the queue is written, or after a time limit."""
        self._let_go()
        self.flush()
        self._transport.close()
        # A client that does not read must not keep the descriptor open.
        asyncio.get_running_loop().call_later(self._bounds.handshake_seconds, self._transport.abort)

    async def frame(self) -> bytes | None:
        """Return the next frame; None at the end.

        Raises:
            errors.FrameError: it is invalid, or incomplete after the time limit: the start of the next is unknown.
        """
        while True:
            raw = self._splitter.next()
            if raw is not None:
                self._let_go()
                return raw
            await self._drained()
            if self._ended:
                if len(self._splitter):
                    raise errors.FrameError("the last frame was cut off")
                return None
            if self._stopping:
                return None
            if len(self._splitter):
                await self._rest()
            else:
                self._resume()
                await self._woken()

    def append(self, payload: bytes) -> None:
        """Queue a payload, to be written with others; a payload too large for a frame is replaced by an error."""
        try:
            frame = frames.encode(payload)
        except errors.FrameError:
            large = errors.AnswerTooLargeError("the answer is longer than a frame may be", hint="ask for fewer rows")
            frame = frames.encode(responses.Error.of(large).to_bytes())
        self._out.append(frame)
        self._out_bytes += len(frame)

    def flush(self) -> None:
        """Write the queue to the socket."""
        if self._out:
            if not self._transport.is_closing():
                self._transport.write(b"".join(self._out))
            self._out.clear()
            self._out_bytes = 0

    async def written(self) -> None:
        """Wait while the client is slow to read."""
        if self._out_bytes >= _TOGETHER_BYTES:
            await self._drained()

    # Inside --------------------------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Wait for more of a frame that has begun.

        Raises:
            errors.FrameError: it was not complete in time.
        """
        with anyio.move_on_after(self._bounds.frame_seconds) as limit:
            while not self._ended and not self._stopping:
                wanted = self._splitter.wanted()
                if wanted > self._bounds.small_bytes and not self._holds_large and self._large is not None:
                    self._pause()
                    await self._large.acquire()
                    self._holds_large = True
                    continue
                self._resume()
                if wanted and len(self._splitter) >= wanted:
                    return
                await self._woken()
        if limit.cancelled_caught:
            raise errors.FrameError("a frame did not come whole in time")

    def _let_go(self) -> None:
        if self._holds_large and self._large is not None:
            self._holds_large = False
            self._large.release()

    async def _drained(self) -> None:
        """Wait until the client has read its data; abort the connection of one that does not."""
        self.flush()
        if self._taken():
            return
        with anyio.move_on_after(self._bounds.frame_seconds) as limit:
            while not self._taken():
                await self._woken()
        if limit.cancelled_caught:
            self.abort()

    def _taken(self) -> bool:
        """Whether the client has read nearly all its data, or never will."""
        return self._writable or self._transport.is_closing()

    def _wake(self) -> None:
        """Wake the task."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause(self) -> None:
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def _resume(self) -> None:
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
