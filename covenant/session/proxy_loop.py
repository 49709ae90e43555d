"""Relay lines between a client, a proxy and a server: four descriptors, one loop, no thread."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import Final

from policy import errors
from sandbox.network.tools import mcp_session
from sandbox.network.tools.proxy import Output, ToolProxy

_CHUNK: Final = 64 * 1024
# Bytes that wait for a reader. Beyond them the other side is not read.
_WAITING: Final = 2 * mcp_session.LINE_BYTES


class _Lines:
    """The whole lines of what was read so far."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > mcp_session.LINE_BYTES:
            raise errors.ToolServerError(f"a line has more than {mcp_session.LINE_BYTES} bytes")
        return lines


def relay(proxy: ToolProxy, server: tuple[int, int], client: tuple[int, int], *, seconds: float) -> int:
    """Relay until the client ends its side. ``server`` is its stdin and stdout, ``client`` what is read and written.

    Raises:
        errors.ToolServerError: the server ended, does not speak MCP, or ``seconds`` are over.
    """
    loop = _Relay(proxy, server, client, time.monotonic() + seconds)
    with contextlib.ExitStack() as stack:
        for fd in (server[0], client[1]):
            was = os.get_blocking(fd)
            os.set_blocking(fd, False)
            stack.callback(os.set_blocking, fd, was)
        try:
            loop.put(proxy.start())
            while loop.step():
                pass
        except errors.ToolServerError:
            loop.end()
            raise
    return 0


class _Relay:
    def __init__(self, proxy: ToolProxy, server: tuple[int, int], client: tuple[int, int], until: float) -> None:
        self._proxy, self._until = proxy, until
        self._to_server, self._from_server = server
        self._from_client, self._to_client = client
        self._waiting = {self._to_server: b"", self._to_client: b""}
        self._lines = {self._from_server: _Lines(), self._from_client: _Lines()}

    def put(self, out: Output) -> None:
        """Queue what the proxy says."""
        self._waiting[self._to_server] += out.server
        self._waiting[self._to_client] += out.client

    def end(self) -> None:
        """Tell the client of every open call, as far as it reads at once."""
        self.put(self._proxy.ended())
        with contextlib.suppress(OSError):
            os.write(self._to_client, self._waiting[self._to_client])

    def step(self) -> bool:
        """Wait for one event and handle it. Returns False when the client has ended its side.

        Raises:
            errors.ToolServerError: the server ended, does not speak MCP, or the time is over.
        """
        now = time.monotonic()
        if now >= self._until:
            raise errors.ToolServerError("the session has taken as long as it may")
        due = self._proxy.due()
        sources = [
            fd
            for fd, target in ((self._from_server, self._to_client), (self._from_client, self._to_server))
            if len(self._waiting[target]) < _WAITING
        ]
        targets = [fd for fd, data in self._waiting.items() if data]
        left = min(self._until, due if due is not None else self._until) - now
        can_read, can_write, _ = select.select(sources, targets, [], max(0.0, left))
        for fd in can_write:
            if not self._write(fd):
                return False
        self.put(self._proxy.tick())
        if self._from_server in can_read:
            for line in self._read(self._from_server, self._proxy.from_server):
                self.put(line)
        if self._from_client in can_read:
            data = os.read(self._from_client, _CHUNK)
            if not data:
                self._proxy.ended()
                return False
            for one in self._lines[self._from_client].take(data):
                self.put(self._proxy.from_client(one))
        return True

    def _read(self, fd: int, take: Callable[[bytes], Output]) -> Iterator[Output]:
        data = os.read(fd, _CHUNK)
        if not data:
            raise errors.ToolServerError("the server ended")
        yield from map(take, self._lines[fd].take(data))

    def _write(self, fd: int) -> bool:
        try:
            self._waiting[fd] = self._waiting[fd][os.write(fd, self._waiting[fd]) :]
        except BrokenPipeError:
            if fd == self._to_client:
                self._proxy.ended()
                return False
            raise errors.ToolServerError("the server ended") from None
        except BlockingIOError:
            pass
        return True
