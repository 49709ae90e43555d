"""Freezes a run while nothing is asked of it, and thaws it for the next request: the tool servers of an agent.

The peer that sends the requests writes BUSY before the first of some and IDLE some seconds after the last answer. It
writes into a pipe of its own, so that the shim reads no request.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from typing import Final

from sandbox.run_io import IDLE, Outcome, Watches

_CHUNK: Final = 4096


class IdleSwitch:
    """Calls ``rest`` and ``wake`` as the peer of ``fd`` says. Its end wakes: the run then sees the end of its stdin."""

    def __init__(self, fd: int, *, rest: Callable[[], Outcome], wake: Callable[[], Outcome]) -> None:
        self._fd, self._rest, self._wake = fd, rest, wake
        os.set_blocking(fd, False)
        self._epoll = select.epoll()
        self._epoll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        """Stop listening. The descriptor is the caller's."""
        self._epoll.close()

    @property
    def watches(self) -> Watches:
        """Return the watch of the peer."""
        return {self._epoll.fileno(): self._heard}

    def _heard(self) -> Outcome:
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._fd, _CHUNK)
            if not said:
                # A pipe at its end of file stays readable: report it once.
                self._epoll.unregister(self._fd)
                return self._wake()
        return self._rest() if said.endswith(IDLE) else self._wake() if said else None
