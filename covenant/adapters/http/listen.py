"""The gateway's listener: binds to the loopback, and limits connections and time of unauthenticated clients."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from typing import Any, Final

from aiohttp import web

from covenant.adapters.http import refusals
from policy import errors

# aiohttp's message about an unreadable head quotes it, and a head may contain a token: log only the fact.
_LOG: Final = logging.getLogger(f"{__name__}.heads")


def _say_no_more(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = record.stack_info = None
    record.msg, record.args = "a request could not be read", ()
    return True


_LOG.addFilter(_say_no_more)


def bind(address: str, port: int) -> socket.socket:
    """Return a listening socket of the loopback; port 0 for any.

    Raises:
        errors.SettingError: the address is another, or the port is taken.
    """
    try:
        where = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address.strip("[]"))
    except ValueError:
        where = None
    if where is None or not where.is_loopback:
        raise errors.SettingError(
            f"HTTP listens on the loopback alone, and not at `{address[:64]!a}`",
            hint="unset COVENANT_HTTP_BIND_ADDR, and let a proxy with TLS serve others",
        )
    family = socket.AF_INET if where.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # On Linux this does not allow two listeners; it only skips waiting for closed connections.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((str(where), port))
        sock.listen(128)
    except OSError as e:
        sock.close()
        raise errors.SettingError(f"{where} port {port}: {e.strerror}", hint="set COVENANT_HTTP_PORT") from None
    return sock


class Listener:
    """aiohttp's server behind one socket, with a limit on its connections.

    ``head_seconds`` is how long a connection may lack a complete head: at its start, and between requests. Each caller
    but the operator has at most half of the connections, and all those together at most three in four.
    """

    def __init__(self, app: web.Application, *, connections: int, head_seconds: float) -> None:
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=0.0)
        self._how: dict[str, Any] = {
            # No access log of addresses, paths or headers: the audit log has the acts of each caller.
            "access_log": None,
            "logger": _LOG,
            "keepalive_timeout": head_seconds,
            # Time to drain the rest of an unwanted body.
            "lingering_time": 2.0,
            # Against decompression bombs; the guard refuses requests that declare compression.
            "auto_decompress": False,
        }
        self._connections = connections
        self._of_one, self._of_others = max(1, connections // 2), max(1, connections * 3 // 4)
        self._by_transport: dict[asyncio.BaseTransport | None, _Connection] = {}
        # The connections of each caller that is not the operator.
        self._callers: Counter[str] = Counter()
        # Connections without a valid token so far, or in their last request, oldest first.
        self._strangers: dict[_Connection, None] = {}
        self._listening: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections from now on."""
        await self._runner.setup()
        self._listening = await asyncio.get_running_loop().create_server(self._connection, sock=sock)

    async def stop(self) -> None:
        """Accept no more, and abort open connections and their requests."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()

    def refuse_more(self) -> None:
        """Accept no more connections; open ones continue."""
        if self._listening is not None:
            self._listening.close()

    def _connection(self) -> asyncio.Protocol:
        return _Connection(self)

    def admit(self, one: _Connection) -> asyncio.Protocol | None:
        """Return aiohttp's protocol for a new connection; None at the limit of connections.

        The oldest unauthenticated connection is closed for a new one: a client without a token cannot keep others out.
        """
        server = self._runner.server
        if server is not None and self.open >= self._connections and self._strangers:
            next(iter(self._strangers)).end()
        if server is None or self.open >= self._connections:
            return None
        self._by_transport[one.transport] = one
        self._strangers[one] = None
        return refusals.protocol(server, **self._how)

    @property
    def open(self) -> int:
        """The number of connections."""
        return len(self._by_transport)

    def known(self, transport: asyncio.BaseTransport | None, caller: str | None) -> bool:
        """Mark a connection as authenticated by this caller, None for the operator.

        Returns False if the caller, or all callers together, have as many as they may. The connection then counts as
        unauthenticated.
        """
        one = self._by_transport.get(transport)
        if one is None or (one not in self._strangers and one.caller == caller):
            return True
        self._leave(one)
        if caller is not None and (self._callers[caller] >= self._of_one or self._callers.total() >= self._of_others):
            self._strangers[one] = None
            return False
        one.caller = caller
        if caller is not None:
            self._callers[caller] += 1
        return True

    def unknown(self, transport: asyncio.BaseTransport | None) -> None:
        """Mark a connection as unauthenticated after a request without a valid token: the caller's may be revoked."""
        if (one := self._by_transport.get(transport)) is not None and one not in self._strangers:
            self._leave(one)
            self._strangers[one] = None

    def forget(self, one: _Connection) -> None:
        """Release the place of a connection that ended or is about to."""
        self._by_transport.pop(one.transport, None)
        self._leave(one)

    def _leave(self, one: _Connection) -> None:
        """Count a connection for no caller."""
        self._strangers.pop(one, None)
        if one.caller is not None:
            self._callers[one.caller] -= 1
            self._callers += Counter()  # without those that have none
            one.caller = None


class _Connection(asyncio.Protocol):
    """Creates aiohttp's protocol once the connection has a place.

    Not earlier: asyncio makes the protocols of all waiting connections before it calls connection_made on any.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._inner: asyncio.Protocol | None = None
        self._counted = False
        self.transport: asyncio.BaseTransport | None = None
        # Who has authenticated over it, besides the operator.
        self.caller: str | None = None

    def end(self) -> None:
        """Abort the connection; its place is free at once."""
        self._gone()
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.abort()

    def _gone(self) -> None:
        if self._counted:
            self._counted = False
            self._listener.forget(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.BaseProtocol."""
        self.transport = transport
        self._inner = self._listener.admit(self)
        if self._inner is not None:
            self._counted = True
            self._inner.connection_made(transport)
            return
        # Abort before reading, so that it holds no memory.
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio.BaseProtocol."""
        if self._inner is not None:
            self._gone()
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """asyncio.Protocol."""
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        """asyncio.BaseProtocol."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """asyncio.BaseProtocol."""
        if self._inner is not None:
            self._inner.resume_writing()
