"""The daemon's socket: frames to requests, responses to frames, each connection by itself.

    bytes ──Splitter──> frame ──parse──> request ──Server.respond──> response ──> frame
              one task a connection; requests of one connection in turn, of several side by side

asyncio's own protocol and not anyio's streams: these cost a task switch and two objects a read, which is most of
what a ping takes (benchmarks/ipc.py). What stands above is anyio's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.abc

from covenant.respond import admission, connection
from covenant.respond.caller import Caller
from covenant.respond.server import Server
from covenant.wire import frames, requests, responses, streams
from policy import errors

_LOG = logging.getLogger(__name__)

# Answered without a wait, so that answers to many that came together may leave together.
_READY: Final = frozenset(connection.HANDLERS)
# How many requests of one connection are answered before others have their turn, and how many bytes are kept together.
_TURN: Final = 32
_TOGETHER_BYTES: Final = 64 * 1024
_PAUSE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may hold of the daemon.

    ``strangers`` have not authenticated yet: of more, the oldest goes. One peer has at most ``of_one_peer``
    connections, and all but the operator at most ``of_others``, so that it gets in. Of a peer's frames above
    ``small_bytes`` at most ``large_frames`` are on their way at once. A frame that has begun is whole, and an answer
    read, within ``frame_seconds``.
    """

    connections: int = 512
    of_one_peer: int = 256
    of_others: int = 384
    strangers: int = 64
    handshake_seconds: float = 10.0
    handshake_bytes: int = 64 * 1024
    small_bytes: int = 256 * 1024
    large_frames: int = 4
    frame_seconds: float = 60.0


class Gateway:
    """Everything that listens at and talks over one socket."""

    def __init__(self, server: Server, group: anyio.abc.TaskGroup, *, bounds: Bounds | None = None) -> None:
        self.server = server
        self.bounds = bounds or Bounds()
        self.peers: dict[str, Peer] = {}
        self.connections: set[Connection] = set()
        # In the order in which they came.
        self.strangers: dict[Connection, None] = {}
        # Connections of whoever is not the operator.
        self.others = 0
        self.stopping = False
        self.group = group
        self._listening: anyio.CancelScope | None = None
        self._empty = anyio.Event()

    async def listen(self, sock: socket.socket) -> None:
        """Take connections, until ``stop``; ``sock`` listens and stays its owner's."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as self._listening:
            while True:
                try:
                    one, _ = await loop.sock_accept(sock)
                except OSError as e:
                    # Without a descriptor or memory to spare: those who are here go on, and who waits waits longer.
                    _LOG.error("a connection could not be taken: %s", e.strerror)
                    await anyio.sleep(_PAUSE_SECONDS)
                    continue
                # Not asyncio's Server: one that closes while somebody connects leaves that connection open.
                await loop.connect_accepted_socket(lambda: Connection(self), one)

    async def stop(self, *, grace_seconds: float) -> None:
        """Take no more; let what has begun be answered within ``grace_seconds``, and end the rest."""
        self.stopping = True
        if self._listening is not None:
            self._listening.cancel()
        for each in tuple(self.connections):
            each.wake()
        with anyio.move_on_after(grace_seconds):
            if self.connections:
                await self._empty.wait()
        for each in tuple(self.connections):
            each.abort()

    def admits(self, one: Connection) -> bool:
        """Whether there is a place for one more; the stranger that came first makes one for a new one."""
        if self.stopping or len(self.connections) >= self.bounds.connections:
            return False
        if len(self.strangers) >= self.bounds.strangers:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.abort()
        self.connections.add(one)
        self.strangers[one] = None
        return True

    def known(self, one: Connection, caller: Caller) -> Peer:
        """It has said who it is.

        Raises:
            errors.BusyError: this peer has as many connections as one may, or all of them have.
        """
        if not caller.operator and self.others >= self.bounds.of_others:
            raise errors.BusyError("there are as many connections as peers may have", hint="try again")
        peer = self.peers.setdefault(caller.agent.pubkey, Peer(self.bounds.large_frames))
        if peer.connections >= self.bounds.of_one_peer:
            raise errors.BusyError("this peer has as many connections as one may have", hint="end some")
        peer.connections += 1
        self.others += not caller.operator
        # It may have made room for another just now: then it is ended at its next wait.
        self.strangers.pop(one, None)
        return peer

    def forget(self, one: Connection, peer: Peer | None, caller: Caller | None) -> None:
        """It has gone."""
        self.connections.discard(one)
        self.strangers.pop(one, None)
        if peer is not None and caller is not None:
            peer.connections -= 1
            self.others -= not caller.operator
            if not peer.connections:
                self.peers.pop(caller.agent.pubkey, None)
        if self.stopping and not self.connections:
            self._empty.set()


class Peer:
    """What one peer holds, over all its connections."""

    def __init__(self, large_frames: int) -> None:
        self.connections = 0
        self.large = anyio.Semaphore(large_frames)


class Connection(asyncio.Protocol):
    """One client. Its task ends with it, whatever it sent."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._bounds = gateway.bounds
        self._splitter = frames.Splitter(most=gateway.bounds.handshake_bytes)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._reading = True
        self._writable = True
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._streams = 0
        self._holds_large = False
        self._scope: anyio.CancelScope | None = None
        self._caller: Caller | None = None
        self._peer: Peer | None = None

    # asyncio's side: called by the loop, never waits -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.BaseProtocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._gateway.admits(self):
            self._gateway.group.start_soon(self._run)
            return
        full = errors.BusyError("the daemon has as many connections as it takes", hint="try again")
        transport.write(frames.encode(responses.Error.of(full).to_bytes()))
        transport.close()

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        self._splitter.feed(data)
        # What waits for its turn is bounded; a large frame has its own way in (`_large`).
        if len(self._splitter) > self._bounds.small_bytes and not self._holds_large:
            self._pause()
        self.wake()

    def eof_received(self) -> bool:
        """asyncio.Protocol. True: whoever has said all that it will may still want its answers."""
        self._ended = True
        self.wake()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.BaseProtocol."""
        self._ended = True
        self._writable = True
        self.wake()

    def pause_writing(self) -> None:
        """asyncio.BaseProtocol."""
        self._writable = False

    def resume_writing(self) -> None:
        """asyncio.BaseProtocol."""
        self._writable = True
        self.wake()

    def wake(self) -> None:
        """Have the task look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """End it now, with whatever it asked."""
        if self._scope is not None:
            self._scope.cancel()
        self._transport.abort()

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

    # The task's side -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                caller = await self._admitted()
                if caller is not None:
                    await self._talk(caller)
        except Exception:
            _LOG.exception("a connection ended by a fault of the daemon")
        finally:
            self._release()
            self._gateway.forget(self, self._peer, self._caller)
            self._close()

    def _close(self) -> None:
        self._flush()
        self._transport.close()
        # Whoever does not read what it was told does not hold the descriptor for that.
        asyncio.get_running_loop().call_later(self._bounds.handshake_seconds, self._transport.abort)

    async def _talk(self, caller: Caller) -> None:
        try:
            self._peer = self._gateway.known(self, caller)
            self._caller = caller
            self._say(responses.Authenticated(display=caller.agent.display))
            self._splitter.most = frames.MAX_BYTES
            await self._converse(caller)
        except (errors.FrameError, errors.BusyError, errors.AuthenticationError) as e:
            # After a frame that is none nobody can tell where the next begins.
            self._say(responses.Error.of(e))

    async def _admitted(self) -> Caller | None:
        """Who it is; None for whoever went, or was refused, which was said and written."""
        reason = "no token came in time"
        with anyio.move_on_after(self._bounds.handshake_seconds):
            try:
                return await self._handshake()
            except errors.CovenantError as e:
                # What is no frame, or no request, is answered alike before the handshake.
                reason = e.message
        self._say(responses.AuthenticationFailed(reason=reason))
        await admission.refused(self._gateway.server, reason, "ipc")
        return None

    async def _handshake(self) -> Caller | None:
        """
        Raises:
            errors.CovenantError: whatever came is none of the two requests, or the token is nobody's.
        """
        while (raw := await self._frame()) is not None:
            request = requests.parse(raw)
            if isinstance(request, requests.Authenticate):
                return await admission.admit(self._gateway.server, request.token_b58, "ipc")
            if not isinstance(request, requests.ProtocolInfo):
                raise errors.AuthenticationError(f"the first request was `{request.kind}`")
            self._say(responses.ProtocolInfo())
        return None

    async def _converse(self, caller: Caller) -> None:
        turn = 0
        while (raw := await self._frame()) is not None:
            admission.check(self._gateway.server, caller)
            try:
                await self._answer(caller, await self._parsed(raw))
            except errors.MalformedRequestError as e:
                self._say(responses.Error.of(e))
            await self._written()
            turn += 1
            if turn % _TURN == 0:
                await asyncio.sleep(0)

    async def _answer(self, caller: Caller, request: requests.Request) -> None:
        if request.kind not in _READY:
            # What it asked before must not wait for what may take long.
            self._flush()
        answer = await self._gateway.server.respond(caller, request)
        if streams.wanted(request):
            await self._stream(answer)
        else:
            self._say(answer)

    async def _parsed(self, raw: bytes) -> requests.Request:
        if len(raw) > self._bounds.small_bytes:
            # Long enough that others would notice.
            return await anyio.to_thread.run_sync(requests.parse, raw)
        return requests.parse(raw)

    async def _frame(self) -> bytes | None:
        """The next frame; None when there will be none."""
        while True:
            raw = self._splitter.next()
            if raw is not None:
                self._release()
                return raw
            await self._drained()
            if self._ended:
                if len(self._splitter):
                    raise errors.FrameError("the last frame was cut off")
                return None
            if self._gateway.stopping:
                return None
            if len(self._splitter):
                await self._rest()
            else:
                self._resume()
                await self._woken()

    async def _rest(self) -> None:
        """Wait for more of a frame that has begun.

        Raises:
            errors.FrameError: it was not whole in time.
        """
        with anyio.move_on_after(self._bounds.frame_seconds) as limit:
            while not self._ended and not self._gateway.stopping:
                wanted = self._splitter.wanted()
                if wanted > self._bounds.small_bytes and not self._holds_large and self._peer is not None:
                    self._pause()
                    await self._peer.large.acquire()
                    self._holds_large = True
                    continue
                self._resume()
                if wanted and len(self._splitter) >= wanted:
                    return
                await self._woken()
        if limit.cancelled_caught:
            raise errors.FrameError("a frame did not come whole in time")

    def _release(self) -> None:
        if self._holds_large and self._peer is not None:
            self._holds_large = False
            self._peer.large.release()

    async def _stream(self, answer: responses.Response) -> None:
        parts = 0
        for envelope in streams.envelopes(self._streams, answer):
            parts += 1
            self._append(envelope.to_bytes())
            await self._written()
        if parts:
            self._streams += 1
        else:
            self._say(answer)

    def _say(self, response: responses.Response) -> None:
        self._append(response.to_bytes())

    def _append(self, payload: bytes) -> None:
        try:
            frame = frames.encode(payload)
        except errors.FrameError:
            large = errors.AnswerTooLargeError("the answer is longer than a frame may be", hint="ask for fewer rows")
            frame = frames.encode(responses.Error.of(large).to_bytes())
        self._out.append(frame)
        self._out_bytes += len(frame)

    def _flush(self) -> None:
        if self._out:
            if not self._transport.is_closing():
                self._transport.write(b"".join(self._out))
            self._out.clear()
            self._out_bytes = 0

    async def _written(self) -> None:
        if self._out_bytes >= _TOGETHER_BYTES:
            await self._drained()

    async def _drained(self) -> None:
        """Go on where the client reads what it is told; give up on one that does not."""
        self._flush()
        if self._taken():
            return
        with anyio.move_on_after(self._bounds.frame_seconds) as limit:
            while not self._taken():
                await self._woken()
        if limit.cancelled_caught:
            self.abort()

    def _taken(self) -> bool:
        """Whether the client has read nearly all that it was told, or never will."""
        return self._writable or self._transport.is_closing()
