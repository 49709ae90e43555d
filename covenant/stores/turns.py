"""Group commit: of many that want to write at once, one writes for all that wait.

There is no task in the background. Whoever finds nobody writing leads: it takes all that queued, writes it in a worker
thread, tells each what came of it, and hands on to the first that queued meanwhile. So one sync serves as many writers
as there are, and a lone writer waits for nobody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, NoReturn, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from policy import errors

T = TypeVar("T")
R = TypeVar("R")


class _Waiting(Generic[T, R]):
    __slots__ = ("answer", "error", "event", "item", "leads", "taken")

    def __init__(self, item: T) -> None:
        self.item = item
        self.event: anyio.Event | None = None
        self.leads = False
        self.taken = False
        self.answer: R | None = None
        self.error: Exception | None = None


class Turns(Generic[T, R]):
    """Writes what tasks submit, in the order of submission and in groups of at most ``most``.

    ``write`` gets a group in a worker thread and returns one answer, or one exception, for each item. When it raises
    instead, nobody knows what is on disk: everything that waits is refused, and so is everything later.
    """

    def __init__(self, write: Callable[[Sequence[T]], Sequence[R | Exception]], *, what: str, most: int = 1024) -> None:
        self._write = write
        self._what = what
        self._most = most
        self._queue: deque[_Waiting[T, R]] = deque()
        self._led = False
        self._failure: str | None = None
        self._idle: anyio.Event | None = None
        # A thread of its own: what blocks in the shared ones must not hold up what others wait for.
        self._limiter = anyio.CapacityLimiter(1)
        self._writing = threading.Lock()
        self._broken: Exception | None = None

    async def submit(self, item: T) -> R:
        """Have the item written; what ``write`` answered for it. Cancelled, it may have been written or not.

        Raises:
            errors.StoreError: an earlier write failed in a way that left the disk's state unknown, or this one did.
        """
        # What leads is shielded: without this, whoever writes in a loop could not be cancelled at all.
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._failure is not None:
            raise self._refused()
        mine: _Waiting[T, R] = _Waiting(item)
        self._queue.append(mine)
        if self._led:
            await self._wait(mine)
        else:
            self._led = mine.leads = True
        if mine.leads:
            await self._lead()
        if mine.error is not None:
            raise mine.error
        return mine.answer  # type: ignore[return-value]  # R may be None, and each that was taken has its answer

    async def close(self, reason: str) -> None:
        """Refuse what comes from now on, after what waits has been written."""
        self._failure = self._failure or reason
        if self._led:
            self._idle = self._idle or anyio.Event()
            await self._idle.wait()

    async def _wait(self, mine: _Waiting[T, R]) -> None:
        mine.event = anyio.Event()
        try:
            await mine.event.wait()
        except BaseException:
            if not mine.taken:
                # INVARIANT: what was cancelled before anybody took it is never written.
                self._queue.remove(mine)
            if mine.leads:
                self._hand_on()
            raise

    async def _lead(self) -> None:
        with anyio.CancelScope(shield=True):
            # Whoever is ready to write gets to queue first.
            await anyio.lowlevel.checkpoint()
            group = [self._queue.popleft() for _ in range(min(self._most, len(self._queue)))]
            for one in group:
                one.taken = True
            try:
                items = [one.item for one in group]
                answers = await self._run(items)
                self._tell(group, answers)
            except Exception as e:
                self._failure = _reason(e)
                self._fail(group, self._refused, e)
                self._fail(self._queue, self._refused, e)
                self._queue.clear()
            except BaseException as e:
                # Only the loop itself breaks a shield (asyncio's own cancel). The thread goes on, and ends before the
                # next may begin; what it found nobody will hear.
                self._fail(group, self._interrupted, e)
                raise
            finally:
                self._hand_on()

    async def _run(self, items: Sequence[T]) -> Sequence[R | Exception]:
        return await anyio.to_thread.run_sync(self._one_at_a_time, items, limiter=self._limiter)

    def _one_at_a_time(self, items: Sequence[T]) -> Sequence[R | Exception]:
        with self._writing:
            if self._broken is not None:
                raise self._broken
            try:
                return self._write(items)
            except Exception as e:
                self._broken = e
                raise

    def _tell(self, group: Sequence[_Waiting[T, R]], answers: Sequence[R | Exception]) -> None:
        for one, answer in zip(group, answers, strict=True):
            if isinstance(answer, Exception):
                one.error = answer
            else:
                one.answer = answer
            if one.event is not None:
                one.event.set()

    def _fail(
        self, group: Iterable[_Waiting[T, R]], error: Callable[[], errors.StoreError], cause: BaseException
    ) -> None:
        for one in group:
            one.taken = True
            one.error = error()
            one.error.__cause__ = cause
            if one.event is not None:
                one.event.set()

    def _hand_on(self) -> None:
        if not self._queue:
            self._led = False
            if self._idle is not None:
                self._idle.set()
            return
        following = self._queue[0]
        following.leads = True
        assert following.event is not None
        following.event.set()

    def _interrupted(self) -> errors.StoreError:
        return errors.StoreError("the write was interrupted: it may be there or not", where=self._what)

    def _refused(self) -> errors.StoreError:
        return errors.StoreError(
            f"{self._what} takes no more records after: {self._failure}",
            hint="nothing that was acknowledged is lost; mend the disk and start the daemon again",
            where=self._what,
        )


class LoopTurns(Turns[T, R]):
    """Turns whose ``write`` is awaited where everything else runs: for what is decided there, a group at a time, before
    it goes to a disk. The next group is not begun before it returned."""

    def __init__(
        self, write: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]], *, what: str, most: int = 1024
    ) -> None:
        super().__init__(_in_no_thread, what=what, most=most)
        self._awaited = write

    async def _run(self, items: Sequence[T]) -> Sequence[R | Exception]:
        return await self._awaited(items)


def _in_no_thread(items: Sequence[object]) -> NoReturn:
    raise AssertionError("these are written on the loop")


def _reason(error: Exception) -> str:
    if isinstance(error, errors.CovenantError):
        return error.message
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__
