"""The TLS gate's end of the line of leases (sandbox.network.tls.leases): which names a lease lets pass now."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

# Of one message: a number, and a name of at most 253 bytes.
MESSAGE_BYTES: Final = 288
_AT_ONCE: Final = 64


class LeasedNames:
    """``line`` does not block; None where no name needs a lease."""

    def __init__(self, line: socket.socket | None = None) -> None:
        self._line = line
        # Each name with the number of its lease, and whether it is for one connection.
        self._live: dict[str, tuple[int, bool]] = {}
        self._begun: set[int] = set()
        self._ended: list[int] = []

    def fileno(self) -> int:
        """Readable when there are changes. -1 where no name needs a lease."""
        return -1 if self._line is None else self._line.fileno()

    def live(self, name: str) -> bool:
        """Whether a connection to a name may begin. What the supervisor has said by now counts."""
        self.read()
        return name in self._live

    def ended(self) -> list[int]:
        """Return the leases, as far as ``read``, whose connections are to be ended, once each."""
        ended, self._ended = self._ended, []
        return ended

    def take(self, name: str) -> tuple[int, bool]:
        """Begin a connection. Returns the number of its lease, and whether it is the only one; no other may begin then.

        The lease may have ended since ``live``: then its number is 0, which ``ended`` returns.
        """
        number, only = self._live.get(name, (0, False))
        if only:
            del self._live[name]
        if not number:
            self._ended.append(0)
        return number, only

    def give_back(self, name: str, number: int) -> None:
        """Let another connection begin in the place of one that no server took, unless its lease has ended."""
        if number in self._begun:
            self._live.setdefault(name, (number, True))

    def used(self, name: str) -> None:
        """Report that the one connection was made."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(name.encode("ascii"))

    def read(self) -> None:
        """Read what the supervisor has said."""
        for _ in range(_AT_ONCE if self._line is not None else 0):
            try:
                data = self._line.recv(MESSAGE_BYTES) if self._line is not None else b""
            except OSError:
                return
            if not data:
                self._line = None  # the supervisor is gone, and the run with it
                self._live.clear()
                return
            digits, _, name = data[1:].decode("ascii").partition(" ")
            number, what = int(digits), data[:1]
            if what == b"-":
                self._begun.discard(number)
                if self._live.get(name, (0, False))[0] == number:
                    del self._live[name]
                self._ended.append(number)
            else:
                self._begun.add(number)
                self._live[name] = number, what == b"1"
