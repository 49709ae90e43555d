"""The TLS gate's side of connections by the operator's proxy: it asks its connector, and waits for none of them."""

from __future__ import annotations

import fcntl
import os
import select
import socket
from typing import Final

from sandbox.network.tls import proxy_wire

# Longer than the connector takes for all its attempts.
CONNECT_SECONDS: Final = 20.0


class ProxyAttempt:
    """One connection under way (as ``race.Race``). ``line`` is the one to the connector, which does not block.

    Raises:
        OSError: Raised when the connector takes no more now.
    """

    events: Final = select.EPOLLIN

    def __init__(self, line: socket.socket, name: str, host: str, port: int, now: float) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.deadline = now + CONNECT_SECONDS
        self._code = "connect_timeout"
        with theirs:
            try:
                fcntl.fcntl(self._ours, fcntl.F_SETFL, fcntl.fcntl(self._ours, fcntl.F_GETFL) | os.O_NONBLOCK)
                socket.send_fds(line, [proxy_wire.request(name, host, port)], [theirs.fileno()])
            except BaseException:
                self._ours.close()
                raise

    def fds(self) -> list[int]:
        """The descriptor that is readable when it is decided."""
        return [self._ours.fileno()]

    def turn(self, now: float) -> socket.socket | None:
        """Return the connection, which is the caller's from then on. None while there is none yet.

        Raises:
            ConnectionError: Raised when there is none. Its text is the code.
        """
        try:
            said, fds, _, _ = socket.recv_fds(self._ours, 2, 1)
        except BlockingIOError:
            if now >= self.deadline:
                raise ConnectionError(self._code) from None
            return None
        except OSError:
            said, fds = b"", []
        if fds:
            made = socket.socket(fileno=fds[0])
            fcntl.fcntl(made, fcntl.F_SETFL, fcntl.fcntl(made, fcntl.F_GETFL) | os.O_NONBLOCK)
            return made
        known = len(said) == 1 and 0 < said[0] <= len(proxy_wire.CODES)
        raise ConnectionError(proxy_wire.CODES[said[0] - 1] if known else "connect_unreachable")

    def close(self) -> None:
        """Give it up. A connection that the connector makes nevertheless is closed with the pair."""
        self._ours.close()
