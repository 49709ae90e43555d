"""Group commit: one worker thread writes all queued items in a batch, with a single sync.

The thread takes the queued items, writes them, reports each result to its submitter, and continues with items queued
meanwhile. So one sync serves all concurrent writers, and a single writer does not wait for others. No background task
exists; the thread begins with the first write and ends with the queue.

Every row of the daemon's log passes through here. Therefore this uses the loop's own futures: an ``anyio.Event`` for
each of many writers costs three times as much (benchmarks/audit_append.py).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NoReturn, TypeVar

import anyio

from policy import errors

T = TypeVar("T")
R = TypeVar("R")

# The waiting futures and, in the same order, the items that they wait for.
_Group = tuple[list[asyncio.Future[R]], list[T]]


class GroupCommit(Generic[T, R]):
    """Writes submitted items, in the order of submission and in groups of at most ``most``.

    ``write`` gets a group in a worker thread and returns one answer, or one exception, for each item. If it raises
    instead, the state of the disk is unknown: all queued and all later items are refused.

    ``told`` gets the answers of each group on the loop, before their submitters resume. It gets every answer in the
    order of writing, including those of cancelled submitters.
    """

    def __init__(
        self,
        write: Callable[[Sequence[T]], Sequence[R | Exception]],
        *,
        what: str,
        most: int = 1024,
        told: Callable[[Sequence[R | Exception]], None] | None = None,
    ) -> None:
        self._write = write
        self._told = told
        self._what = what
        self._most = most
        # The loop appends and the thread pops, each in one atomic step.
        self._queue: deque[tuple[asyncio.Future[R], T]] = deque()
        self._busy = False
        self._failure: str | None = None
        self._idle: anyio.Event | None = None
        # A separate thread: a blocked job in the shared pool must not delay these writes.
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def submit(self, item: T) -> asyncio.Future[R]:
        """Queue the item; await the answer of ``write`` for it. After a cancellation it may have been written or not.

        Raises:
            errors.StoreError: an earlier write failed and left the disk's state unknown, or this one did.
        """
        if self._failure is not None:
            raise self._refused()
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[R] = loop.create_future()
        self._queue.append((mine, item))
        if not self._busy:
            self._busy = True
            # Tasks that are ready to write get to queue first.
            loop.call_soon(self._begin, loop)
        return mine

    async def close(self, reason: str) -> None:
        """Refuse new items, after writing the queued ones."""
        self._failure = self._failure or reason
        if self._busy:
            self._idle = self._idle or anyio.Event()
            await self._idle.wait()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    # --- on the loop ------------------------------------------------------------------------------------

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._thread.submit(self._work, loop)

    def _tell(self, waiting: Sequence[asyncio.Future[R]], answers: Sequence[R | Exception]) -> None:
        try:
            if self._told is not None:
                self._told(answers)
        finally:
            for future, answer in zip(waiting, answers, strict=True):
                if future.done():  # its waiter was cancelled
                    continue
                if isinstance(answer, Exception):
                    _refuse(future, answer)
                else:
                    future.set_result(answer)

    def _tell_last(
        self,
        loop: asyncio.AbstractEventLoop,
        waiting: Sequence[asyncio.Future[R]],
        answers: Sequence[R | Exception],
    ) -> None:
        try:
            self._tell(waiting, answers)
        finally:
            self._rest(loop)

    def _fail(
        self, loop: asyncio.AbstractEventLoop, waiting: Sequence[asyncio.Future[R]], cause: BaseException
    ) -> None:
        self._failure = _reason(cause)
        for future in [*waiting, *(future for future, _ in self._queue)]:
            if not future.done():
                error = self._refused()
                error.__cause__ = cause
                _refuse(future, error)
        self._queue.clear()
        self._rest(loop)

    def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._queue:
            self._begin(loop)
            return
        self._busy = False
        if self._idle is not None:
            self._idle.set()

    def _refused(self) -> errors.StoreError:
        return errors.StoreError(
            f"{self._what} takes no more records after: {self._failure}",
            hint="nothing that was acknowledged is lost; mend the disk and start the daemon again",
            where=self._what,
        )

    # --- in the thread ----------------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        # A closed loop has no submitter left to notify.
        with contextlib.suppress(RuntimeError):
            waiting, items = self._taken()
            while True:
                try:
                    answers = _one_each(self._write(items), items) if items else []
                except BaseException as e:
                    loop.call_soon_threadsafe(self._fail, loop, waiting, e)
                    return
                answered = waiting
                waiting, items = self._taken()
                if not items:
                    loop.call_soon_threadsafe(self._tell_last, loop, answered, answers)
                    return
                loop.call_soon_threadsafe(self._tell, answered, answers)

    def _taken(self) -> _Group[R, T]:
        queue = self._queue
        waiting, items = [], []
        for _ in range(min(self._most, len(queue))):
            future, item = queue.popleft()
            # INVARIANT: an item cancelled before it was taken is never written.
            if not future.cancelled():
                waiting.append(future)
                items.append(item)
        return waiting, items


class LoopGroupCommit(GroupCommit[T, R]):
    """Turns whose ``write`` is awaited on the loop: for items that are decided there, one group at a time, before they
    go to disk. The next group begins after it returned."""

    def __init__(
        self, write: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]], *, what: str, most: int = 1024
    ) -> None:
        super().__init__(_in_no_thread, what=what, most=most)
        self._awaited = write
        self._task: asyncio.Task[None] | None = None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        # A task of its own, for as long as items are queued: a cancelled submitter must not cancel the writes of
        # others. ``close`` waits for it.
        self._task = loop.create_task(self._work_here(loop))

    async def _work_here(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            waiting, items = self._taken()
            if not items:
                break
            try:
                answers = _one_each(await self._awaited(items), items)
            except BaseException as e:
                self._fail(loop, waiting, e)
                if not isinstance(e, Exception):
                    raise
                return
            self._tell(waiting, answers)
        self._rest(loop)


def _one_each(answers: Sequence[R | Exception], items: Sequence[object]) -> Sequence[R | Exception]:
    if len(answers) != len(items):
        raise ValueError(f"{len(answers)} answers for {len(items)} items")
    return answers


def _in_no_thread(items: Sequence[object]) -> NoReturn:
    raise AssertionError("these are written on the loop")


def _refuse(future: asyncio.Future[R], error: Exception) -> None:
    """Fail the future with the error."""
    future.set_exception(error)
    # The waiter gets the error. If the waiter was just cancelled, this stops asyncio from logging the unread error.
    future.exception()


def _reason(error: BaseException) -> str:
    """Return the cause of a failed write, for the errors of later ones."""
    if isinstance(error, errors.CovenantError):
        return error.message
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__
