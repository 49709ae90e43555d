"""Connect to the addresses of a name in turn, and keep the first that answers (RFC 8305, 5).

The agent's own connection is made before the gate has one: the gate must read its ClientHello first. The agent's client
therefore never sees that an address is dead, and the gate tries the others in its place.
"""

from __future__ import annotations

import errno
import itertools
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final

# The next address is tried when one has failed, or after this time. All of it may take so long.
STAGGER_SECONDS: Final = 0.25
CONNECT_SECONDS: Final = 10.0
# The most addresses that are tried for one connection of the agent.
TRIES: Final = 6
_UNREACHABLE: Final = "connect_unreachable"
_CODES: Final = {errno.ECONNREFUSED: "connect_refused", errno.ETIMEDOUT: "connect_timeout"}


def codes() -> frozenset[str]:
    """The codes of a connection that could not be made."""
    return frozenset({_UNREACHABLE, *_CODES.values()})


def in_turn(first: str, others: Sequence[str]) -> list[str]:
    """The addresses in the order of trying: the agent's choice, then the families in turn (RFC 8305, 4)."""
    distinct = [one for one in dict.fromkeys(others) if one != first]
    mine = [one for one in distinct if (":" in one) == (":" in first)]
    rest = [one for one in distinct if one not in mine]
    pairs = itertools.zip_longest(rest, mine)
    return [first, *(one for pair in pairs for one in pair if one is not None)][:TRIES]


class Race:
    """Attempts to connect to ``hosts`` on one port. Times are seconds of the caller's clock.

    ``dial`` begins a connection and does not wait for it. ``deadline`` is when ``turn`` is due without an event.

    INVARIANT: sockets that failed or lost stay open until ``close``. The caller's epoll still has them, and the number
    of a closed one could be the next attempt's.
    """

    events: Final = select.EPOLLOUT

    def __init__(
        self, hosts: Sequence[str], port: int, *, dial: Callable[[str, int], socket.socket], now: float
    ) -> None:
        self._left, self._port, self._dial = list(hosts), port, dial
        self._pending: list[socket.socket] = []
        self._over: list[socket.socket] = []
        self._code = ""
        self._ends = now + CONNECT_SECONDS
        self.deadline = now
        self._next(now)

    def fds(self) -> list[int]:
        """The descriptors of the attempts; each is writable when it is decided."""
        return [one.fileno() for one in self._pending]

    def turn(self, now: float) -> socket.socket | None:
        """Return the first connected socket, which is the caller's from then on. None while there is none yet.

        Raises:
            ConnectionError: Raised when no address is left. Its text is the code of the first failure.
        """
        for one in tuple(self._pending):
            number = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._failed(one, number)
            elif _is_connected(one):
                self._pending.remove(one)
                self._end()
                return one
        if now >= self._ends:
            self._code = self._code or "connect_timeout"
            self._end()
        elif self._left and (not self._pending or now >= self.deadline):
            self._next(now)
        if not self._pending and not self._left:
            raise ConnectionError(self._code or _UNREACHABLE)
        return None

    def close(self) -> None:
        """Give up all attempts."""
        self._end()
        while self._over:
            self._over.pop().close()

    def _end(self) -> None:
        self._over += self._pending
        self._pending.clear()
        self._left.clear()

    def _next(self, now: float) -> None:
        """Begin the next attempt, and those after it for as long as the kernel refuses at once."""
        while self._left:
            try:
                self._pending.append(self._dial(self._left.pop(0), self._port))
                break
            except OSError as e:
                self._code = self._code or _CODES.get(e.errno or 0, _UNREACHABLE)
        self.deadline = min(self._ends, now + STAGGER_SECONDS) if self._left else self._ends

    def _failed(self, one: socket.socket, number: int) -> None:
        self._code = self._code or _CODES.get(number, _UNREACHABLE)
        self._pending.remove(one)
        self._over.append(one)


def _is_connected(one: socket.socket) -> bool:
    """Whether the handshake is over. getpeername(2) fails until then, with ENOTCONN."""
    try:
        one.getpeername()
    except OSError:
        return False
    return True
