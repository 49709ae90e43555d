"""The loop of the DNS gate: coroutines that wait for a descriptor, for each other or for a time, in one thread.

asyncio would do, at 60 ms and 10 MiB more for each run; the gate needs three things of it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import select
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
# The number of timers above which those that no coroutine waits for are removed.
_TIMERS = 1024


class Future:
    """A future value, awaited by one coroutine."""

    def __init__(self) -> None:
        self.done = False
        self._value: Any = None
        self._resume: Callable[[Any], None] | None = None

    def set(self, value: Any) -> None:
        """Set the value. A second one is ignored, such as a timeout after the answer."""
        if self.done:
            return
        self.done, self._value = True, value
        if self._resume is not None:
            self._resume(value)

    def __await__(self) -> Generator[Future, Any, Any]:
        if not self.done:
            yield self
        return self._value

    def then(self, resume: Callable[[Any], None]) -> None:
        """Set the function to call with the value once it is set."""
        self._resume = resume


class Loop:
    """Runs coroutines. An error that escapes one ends the loop, and the gate with it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._actions: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None], Future | None]] = []
        self._most_timers = _TIMERS
        self._numbers = itertools.count()

    def on_readable(self, fd: int, action: Callable[[], None]) -> None:
        """Call ``action`` whenever ``fd`` has something, until ``forget``."""
        self._actions[fd] = action
        self._epoll.register(fd, READ)

    def forget(self, fd: int) -> None:
        """Wait for it no more. To be called before it is closed."""
        if self._actions.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call ``action`` at a time of ``time.monotonic``."""
        self._at(when, action, None)

    def _at(self, when: float, action: Callable[[], None], future: Future | None) -> None:
        """``future`` is what the time is for, and makes it pointless when it is done: an agent that sends byte by byte
        would have the gate keep a time for each byte."""
        if len(self._timers) >= self._most_timers:
            self._timers = [one for one in self._timers if one[3] is None or not one[3].done]
            heapq.heapify(self._timers)
            self._most_timers = max(_TIMERS, 2 * len(self._timers))
        heapq.heappush(self._timers, (when, next(self._numbers), action, future))

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it until it first waits, and on from there."""
        self._step(coroutine, None)

    def _step(self, coroutine: Coroutine[Any, Any, None], value: Any) -> None:
        try:
            awaited = coroutine.send(value)
        except StopIteration:
            return
        awaited.then(functools.partial(self._step, coroutine))

    async def ready(self, fd: int, events: int, until: float) -> bool:
        """Wait until ``fd`` is readable or writable; False when it is not by ``until``."""
        future = Future()
        self._actions[fd] = functools.partial(future.set, True)
        self._epoll.register(fd, events)
        self._at(until, functools.partial(future.set, False), future)
        try:
            return bool(await future)
        finally:
            self.forget(fd)

    async def result(self, future: Future, until: float) -> Any:
        """The value of ``future``; None when it has none by ``until``."""
        self._at(until, functools.partial(future.set, None), future)
        return await future

    def run(self) -> None:
        """Turn until there is nothing left to wait for."""
        while self._actions or self._timers:
            self.turn(None)

    def turn(self, most_seconds: float | None) -> None:
        """Do what is due, waiting for it at most so long (None: without end)."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        if self._timers:
            next_seconds = max(0.0, self._timers[0][0] - time.monotonic())
            most_seconds = next_seconds if most_seconds is None else min(next_seconds, most_seconds)
        if not self._actions and most_seconds is None:
            return
        for fd, _ in self._epoll.poll(most_seconds):
            action = self._actions.get(fd)
            if action is not None:
                action()
