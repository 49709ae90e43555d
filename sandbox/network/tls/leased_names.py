"""The TLS gate's end of the line of leases (sandbox.network.tls.leases): which names a lease lets pass now."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

_MESSAGE_BYTES: Final = 256
_AT_ONCE: Final = 64


class LeasedNames:
    """``line`` does not block; None where no name needs a lease."""

    def __init__(self, line: socket.socket | None = None) -> None:
        self._line = line
        # Each name with whether it is for one connection.
        self._live: dict[str, bool] = {}
        self._ended: list[str] = []

    def fileno(self) -> int:
        """Readable when there are changes. -1 where no name needs a lease."""
        return -1 if self._line is None else self._line.fileno()

    def live(self, name: str) -> bool:
        """Whether a connection to a name may begin. What the supervisor has said by now counts."""
        self.read()
        return name in self._live

    def ended(self) -> list[str]:
        """Return the names, as far as ``read``, whose connections are to be ended, once each."""
        ended, self._ended = self._ended, []
        return ended

    def take(self, name: str) -> bool:
        """Begin a connection. Returns whether it is the only one of its lease; no other may begin then."""
        return self._live.get(name, False) and self._live.pop(name)

    def give_back(self, name: str) -> None:
        """Let another connection begin in the place of one that no server took."""
        self._live.setdefault(name, True)

    def used(self, name: str) -> None:
        """Report that the one connection was made."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(name.encode("ascii"))

    def read(self) -> None:
        """Read what the supervisor has said."""
        for _ in range(_AT_ONCE if self._line is not None else 0):
            try:
                data = self._line.recv(_MESSAGE_BYTES) if self._line is not None else b""
            except OSError:
                return
            if not data:
                self._line = None  # the supervisor is gone, and the run with it
                self._live.clear()
                return
            what, name = data[:1], data[1:].decode("ascii")
            if what == b"-":
                self._live.pop(name, None)
                self._ended.append(name)
            else:
                self._live[name] = what == b"1"
