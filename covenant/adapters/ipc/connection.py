"""One client of the socket: authenticates it and answers its requests in order."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import anyio.to_thread

from covenant.adapters.ipc.framing import Channel
from covenant.handlers import handshake
from covenant.handlers.access import authentication
from covenant.handlers.caller import Caller
from covenant.wire import requests, responses, streams
from policy import errors

if TYPE_CHECKING:
    from covenant.adapters.ipc.limits import IpcBounds, Peer
    from covenant.handlers.access.auth_failures import Refusals
    from covenant.handlers.server import Server

_LOG = logging.getLogger(__name__)

# Answered without a wait, so that responses to requests that came together can be written together.
_READY: Final = frozenset(handshake.HANDLERS)
# The most requests of a connection that are answered before others have their turn.
_TURN: Final = 32


class ConnectionOwner(Protocol):
    """The gateway from the view of a connection: its server, limits and connection count."""

    server: Server
    group: anyio.abc.TaskGroup
    bounds: IpcBounds
    refusals: Refusals

    def admits(self, one: Connection) -> bool:
        """Whether there is a place for this connection."""
        ...

    def known(self, one: Connection, caller: Caller) -> Peer:
        """Count the connection for its peer.

        Raises:
            errors.BusyError: the peer has too many connections.
        """
        ...

    def forget(self, one: Connection, peer: Peer | None, caller: Caller | None) -> None:
        """Release the place of an ended connection."""
        ...


class Connection(Channel):
    """One client. Its task ends with the connection."""

    def __init__(self, gateway: ConnectionOwner) -> None:
        super().__init__(gateway.bounds)
        self._gateway = gateway
        self._scope: anyio.CancelScope | None = None
        self._caller: Caller | None = None
        self._peer: Peer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.BaseProtocol."""
        super().connection_made(transport)
        if self._gateway.admits(self):
            self._gateway.group.start_soon(self._run)
            return
        full = errors.BusyError("the daemon has as many connections as it takes", hint="try again")
        self._say(responses.Error.of(full))
        self.close()

    def abort(self) -> None:
        """Abort the connection and its request now."""
        if self._scope is not None:
            self._scope.cancel()
        super().abort()

    def end_revoked(self) -> None:
        """End the connection if its peer's token is not valid any more; its place is free at once."""
        if self._caller is None:
            return
        try:
            authentication.check(self._gateway.server, self._caller)
        except errors.AuthenticationError as e:
            self._gateway.forget(self, self._peer, self._caller)
            self._peer = self._caller = None
            self._say(responses.Error.of(e))
            self.flush()
            self.abort()

    def displace(self) -> None:
        """End an unauthenticated connection for a newer one, after an answer that says so."""
        self._say(responses.Error.of(errors.BusyError("too many connections have sent no token yet", hint="try again")))
        # The kernel takes it before the end, so that the client still reads it.
        self.flush()
        self.abort()

    async def _run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                caller = await self._admitted()
                if caller is not None:
                    await self._talk(caller)
        except Exception:
            _LOG.exception("a connection ended by a fault of the daemon")
        finally:
            self._gateway.forget(self, self._peer, self._caller)
            self.close()

    async def _talk(self, caller: Caller) -> None:
        try:
            self._peer = self._gateway.known(self, caller)
            self._caller = caller
            self._say(responses.Authenticated(display=caller.agent.display))
            self.widen(self._peer.large)
            await self._converse(caller)
        except (errors.FrameError, errors.BusyError, errors.AuthenticationError) as e:
            # After an invalid frame the start of the next is unknown.
            self._say(responses.Error.of(e))

    async def _admitted(self) -> Caller | None:
        """Return the caller; None if the client disconnected or was refused, which is answered and logged."""
        reason = "missing token: none came in time"
        with anyio.move_on_after(self._bounds.handshake_seconds):
            try:
                return await self._handshake()
            except errors.CovenantError as e:
                # An invalid frame or request gets the same answer before the handshake.
                reason = e.message if isinstance(e, errors.AuthenticationError) else f"malformed: {e.message}"
        self._say(responses.AuthenticationFailed(reason=reason))
        await self._gateway.refusals.write(reason)
        return None

    async def _handshake(self) -> Caller | None:
        """Read requests until the client authenticates. Returns None if it disconnects before.

        Raises:
            errors.CovenantError: another request came, or the token is unknown.
        """
        while (raw := await self.frame()) is not None:
            request = requests.parse(raw)
            if isinstance(request, requests.Authenticate):
                return await authentication.admit(self._gateway.server, request.token_b58, "ipc")
            if not isinstance(request, requests.ProtocolInfo):
                raise errors.AuthenticationError(f"missing token: the first request was `{request.kind}`")
            self._say(responses.ProtocolDescription())
        return None

    async def _converse(self, caller: Caller) -> None:
        turn = 0
        while (raw := await self.frame()) is not None:
            authentication.check(self._gateway.server, caller)
            try:
                await self._answer(caller, await self._parsed(raw))
            except errors.MalformedRequestError as e:
                self._say(responses.Error.of(e))
            await self.written()
            turn += 1
            if turn % _TURN == 0:
                await asyncio.sleep(0)

    async def _answer(self, caller: Caller, request: requests.Request) -> None:
        if request.kind not in _READY:
            # Earlier responses must not wait for a request that may take long.
            self.flush()
        answer = await authentication.respond(self._gateway.server, caller, request)
        if streams.wanted(request):
            await self._stream(answer)
        else:
            self._say(answer)

    async def _parsed(self, raw: bytes) -> requests.Request:
        if len(raw) > self._bounds.small_bytes:
            # Parsing a large request would block other clients noticeably.
            return await anyio.to_thread.run_sync(requests.parse, raw)
        return requests.parse(raw)

    async def _stream(self, answer: responses.Response) -> None:
        parts = 0
        for envelope in streams.envelopes(str(uuid.uuid4()), answer):
            parts += 1
            self.append(envelope.to_bytes())
            await self.written()
        if not parts:
            self._say(answer)

    def _say(self, response: responses.Response) -> None:
        self.append(response.to_bytes())
