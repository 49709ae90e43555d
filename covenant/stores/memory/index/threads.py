"""A thread of the store's own, for what is asked often: there and back in half the time that anyio's pool takes.

Whoever asks for much at once waits for itself: those who ask have their turns one after the other.
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
    """Does one thing after the other: one for each who has given it something in turn, each one's in their order."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[tuple[str | None, Callable[[], None]] | None] = SimpleQueue()
        self._closed = False
        self._ended = False
        # Of what it does nothing has to be finished when a process ends that forgot to close it.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        # Who waits, in the order of their turns, and with what.
        waiting: dict[str | None, deque[Callable[[], None]]] = {}
        while True:
            self._take_in(waiting)
            if not waiting:
                return
            whose = next(iter(waiting))
            waiting[whose].popleft()()
            # INVARIANT: who has had a turn stands behind all who came meanwhile.
            self._take_in(waiting)
            if rest := waiting.pop(whose):
                waiting[whose] = rest

    def _take_in(self, waiting: dict[str | None, deque[Callable[[], None]]]) -> None:
        """What has been given; the next that is, where nobody waits. Nobody waits then only after the last."""
        while not self._ended and not (waiting and self._given.empty()):
            given = self._given.get()
            if given is None:
                self._ended = True
            else:
                waiting.setdefault(given[0], deque()).append(given[1])

    def begin(self, act: Callable[[], T], whose: str | None = None) -> Future[T]:
        """Have it done, when it is the turn of whose it is.

        Raises:
            errors.MemoryStoreError: it was closed.
        """
        future: Future[T] = Future()
        self._give(whose, lambda: _do(act, future.set_result, future.set_exception))
        return future

    async def run(self, act: Callable[[], T], whose: str | None = None) -> T:
        """Have it done, when it is the turn of whose it is, and wait for it.

        Nothing of it is left undone where the waiting is cancelled.

        Raises:
            errors.MemoryStoreError: it was closed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(settle: Callable[[], None]) -> None:
            # Where the loop has ended, nobody waits.
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
        """Once all that it was given is done."""
        self._closed = True
        self._given.put(None)
        self._thread.join()


def _do(act: Callable[[], T], succeed: Callable[[T], None], fail: Callable[[BaseException], None]) -> None:
    try:
        value = act()
    except BaseException as e:  # it is whose who waits for it
        fail(e)
    else:
        succeed(value)
