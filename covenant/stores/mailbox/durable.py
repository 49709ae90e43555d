"""The mailbox in ``a2a/events.jsonl``: what a call returned for is on the disk.

Acts that come while the disk writes are done together, in their order, and share one write and one sync. When the
disk takes none of it, the book is as it was before, and everybody who waited is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel

from covenant.stores import journal
from covenant.stores.mailbox import events, transitions
from covenant.stores.mailbox.in_memory import InMemoryMailbox, T
from covenant.stores.mailbox.interface import Limits

FILE = "a2a/events.jsonl"

_MOST_AT_ONCE = 256


@dataclass(slots=True)
class _Act:
    do: Callable[[], Any]
    done: anyio.Event
    anew: bool = False
    answer: Any = None
    error: Exception | None = None


class DurableMailbox(InMemoryMailbox):
    """A mailbox that outlives its process, in the journal at ``home / FILE``. Make it with ``open``.

    ``recovered`` says what was odd about the file when it was opened.
    """

    def __init__(self, kept: journal.Journal, *, now_ms: Callable[[], int], limits: Limits | None) -> None:
        super().__init__(now_ms=now_ms, limits=limits)
        self.recovered: list[str] = list(kept.recovered)
        self._journal = kept
        self._queue: deque[_Act] = deque()
        self._writing = False
        self._idle: anyio.Event | None = None

    @classmethod
    async def open(cls, home: Path, *, now_ms: Callable[[], int], limits: Limits | None = None) -> Self:
        """Open or make the mailbox of a home.

        Raises:
            errors.StoreError: the file cannot be used, or a line of it is no event.
        """
        path = home / FILE
        mailbox = cls(await journal.Journal.open(path), now_ms=now_ms, limits=limits)
        number = 0
        try:
            async for line in mailbox._journal.lines():
                number += 1
                mailbox._book.apply(events.decode(line, where=f"{path}:{number}"))
                mailbox._book.settle()
        except BaseException:
            await mailbox.close()
            raise
        if mailbox._book.strays:
            mailbox.recovered.append(f"{mailbox._book.strays} events of `{FILE}` are about no task in it")
        return mailbox

    async def compact(self) -> int:
        """Forget what is done with, and write the file anew.

        Raises:
            errors.StoreError: the disk took nothing of it; everything is as before.
        """
        return len(await self._queued(_Act(self._compaction, anyio.Event(), anew=True)))

    async def close(self) -> None:
        """Write what waits, and let go of the file."""
        if self._writing:
            self._idle = anyio.Event()
            await self._idle.wait()
        await self._journal.close()

    async def _do(self, act: Callable[[], T]) -> T:
        return await self._queued(_Act(act, anyio.Event()))  # type: ignore[no-any-return]

    async def _queued(self, mine: _Act) -> Any:
        self._queue.append(mine)
        # INVARIANT: what was begun is carried through. A caller that goes away must not leave the book ahead of the
        # file, nor those who queued behind it without somebody who writes.
        with anyio.CancelScope(shield=True):
            if self._writing:
                await mine.done.wait()
            else:
                self._writing = True
                # Whoever is ready to act gets to queue first.
                await anyio.lowlevel.checkpoint()
                await self._write_queued()
        if mine.error is not None:
            raise mine.error
        return mine.answer

    async def _write_queued(self) -> None:
        try:
            while self._queue:
                await self._write(self._group())
        finally:
            self._writing = False
            if self._idle is not None:
                self._idle.set()

    def _group(self) -> list[_Act]:
        """The acts that are written next; one that writes the whole file anew is alone."""
        group = [self._queue.popleft()]
        while self._queue and not (group[0].anew or self._queue[0].anew) and len(group) < _MOST_AT_ONCE:
            group.append(self._queue.popleft())
        return group

    async def _write(self, acts: Sequence[_Act]) -> None:
        ended = len(self._ended)
        for act in acts:
            try:
                act.answer = self._act(act.do)
            except Exception as e:  # the act's own: it was refused, and emitted nothing
                act.error = e
        lines = [events.encode(event) for event in self._book.fresh()]
        try:
            if acts[0].anew and acts[0].error is None:
                await self._journal.rewrite(self._restated())
            else:
                await self._journal.append_all(lines)
            self._done()
        except Exception as e:  # whatever it was, nothing of it is there
            self._book.withdraw()
            del self._ended[ended:]
            for act in acts:
                act.error = act.error or e
        finally:
            for act in acts:
                act.done.set()

    def _compaction(self) -> list[str]:
        return transitions.compact(self._book, self._now())

    def _restated(self) -> Iterator[bytes]:
        # Read in the journal's thread; nothing changes the book while somebody writes.
        return (events.encode(event) for event in transitions.restate(self._book))
