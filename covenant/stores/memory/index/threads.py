"""A worker thread of the store, for frequent calls: its round trip takes half the time of anyio's pool.

Callers take turns, so one with many requests delays only its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import anyio

from policy import errors

T = TypeVar("T")


class Thread:
    """Runs jobs one at a time, in turns by caller; each caller's jobs keep their order."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[tuple[str | None, Callable[[], None]] | None] = SimpleQueue()
        self._closed = False
        self._ended = False
        # A daemon thread: none of its jobs must finish if a process exits without closing it.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        # The waiting jobs by caller, in the order of their turns.
        waiting: dict[str | None, deque[Callable[[], None]]] = {}
        while True:
            self._take_in(waiting)
            if not waiting:
                return
            whose = next(iter(waiting))
            waiting[whose].popleft()()
            # INVARIANT: a caller that had its turn queues behind all that came meanwhile.
            self._take_in(waiting)
            if rest := waiting.pop(whose):
                waiting[whose] = rest

    def _take_in(self, waiting: dict[str | None, deque[Callable[[], None]]]) -> None:
        """Move submitted jobs to ``waiting``. Blocks while ``waiting`` is empty; it stays empty only after the end."""
        while not self._ended and not (waiting and self._given.empty()):
            given = self._given.get()
            if given is None:
                self._ended = True
            else:
                waiting.setdefault(given[0], deque()).append(given[1])

    def begin(self, act: Callable[[], T], whose: str | None = None) -> Future[T]:
        """Submit a job, to run in the turn of ``whose``.

        Raises:
            errors.MemoryStoreError: it was closed.
        """
        future: Future[T] = Future()
        self._give(whose, lambda: _do(act, future.set_result, future.set_exception))
        return future

    async def run(self, act: Callable[[], T], whose: str | None = None) -> T:
        """Run a job in the turn of ``whose``, and wait for it.

        A cancellation does not interrupt the job or the wait.

        Raises:
            errors.MemoryStoreError: it was closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(settle: Callable[[], None]) -> None:
            # A closed loop has no waiter left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None if future.done() else settle())

        self._give(
            whose,
            lambda: _do(
                act,
                lambda value: tell(lambda: future.set_result(value)),
                lambda error: tell(lambda: future.set_exception(error)),
            ),
        )
        with anyio.CancelScope(shield=True):
            await future
        return future.result()

    def _give(self, whose: str | None, act: Callable[[], None]) -> None:
        if self._closed:
            raise errors.MemoryStoreError("memory is closed")
        self._given.put((whose, act))

    def close(self) -> None:
        """Stop the thread after all its jobs are done."""
        self._closed = True
        self._given.put(None)
        self._thread.join()


def _do(act: Callable[[], T], succeed: Callable[[T], None], fail: Callable[[BaseException], None]) -> None:
    try:
        value = act()
    except BaseException as e:  # the error goes to the waiter
        fail(e)
    else:
        succeed(value)
