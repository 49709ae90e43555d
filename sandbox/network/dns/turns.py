"""Make questions wait for their turn at the resolvers, instead of refusing those above the rate.

A crowd of questions for different names waits in a bounded queue. Names that the manifest grants as they are go first:
there are few of them, and a flood of invented names below a wildcard must not delay them.
"""

from __future__ import annotations

import collections
import time
from typing import Final

from sandbox.network.dns.loop import Future, Loop
from sandbox.rate_limit import Tokens

# The most questions that wait for a turn. At the plan's rate the last of them waits as long as libc asks again.
WAITING: Final = 256
_LEAST_SECONDS: Final = 0.001


class Turns:
    """``rate`` questions a second go to the resolvers, and ``burst`` at once."""

    def __init__(self, loop: Loop, rate: float, burst: float, *, most: int = WAITING) -> None:
        self._loop, self._most = loop, most
        self._tokens = Tokens(rate, burst, time.monotonic())
        self._pause = max(_LEAST_SECONDS, 1 / rate)
        self._first: collections.deque[Future] = collections.deque()
        self._others: collections.deque[Future] = collections.deque()

    async def mine(self, *, first: bool) -> bool:
        """Wait for a turn. Returns False at once if too many wait already."""
        if not self._first and not self._others and self._tokens.take(time.monotonic()):
            return True
        queue = self._first if first else self._others
        if len(queue) >= self._most:
            return False
        if not self._first and not self._others:
            self._loop.at(time.monotonic() + self._pause, self._next)
        future = Future()
        queue.append(future)
        return bool(await future)

    def _next(self) -> None:
        """Give turns while there are tokens, and call again while questions wait."""
        due = []
        while (self._first or self._others) and self._tokens.take(time.monotonic()):
            due.append((self._first or self._others).popleft())
        if self._first or self._others:
            self._loop.at(time.monotonic() + self._pause, self._next)
        # Last: each continues its question, which may ask for another turn.
        for future in due:
            future.set(True)
