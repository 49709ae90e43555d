"""The mailbox in ``a2a/events.jsonl``: a change is on disk when its call returns.

Acts that arrive during a write are done together, in order, and share the next write and sync. If the disk takes none
of it, the book returns to its earlier state, and every waiting caller gets the error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.lowlevel

from covenant.stores import group_commit, journal
from covenant.stores.mailbox import events, transitions
from covenant.stores.mailbox.in_memory import InMemoryMailbox, T
from covenant.stores.mailbox.interface import Limits

FILE = "a2a/events.jsonl"

_MOST_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class _Act:
    do: Callable[[], Any]
    anew: bool = False


class DurableMailbox(InMemoryMailbox):
    """A mailbox that outlives its process, in the journal at ``home / FILE``. Make it with ``open``.

    ``recovered`` lists irregularities of the file found at the opening.
    """

    def __init__(self, kept: journal.Journal, *, now_ms: Callable[[], int], limits: Limits | None) -> None:
        super().__init__(now_ms=now_ms, limits=limits)
        self.recovered: list[str] = list(kept.recovered)
        self._journal = kept
        self._turns: group_commit.LoopGroupCommit[_Act, Any] = group_commit.LoopGroupCommit(
            self._write, what="the mailbox", most=_MOST_AT_ONCE
        )

    @classmethod
    async def open(cls, home: Path, *, now_ms: Callable[[], int], limits: Limits | None = None) -> Self:
        """Open or create the mailbox of a home.

        Raises:
            errors.StoreError: the file cannot be used, or a line of it is no event.
        """
        mailbox = cls(await journal.Journal.open(home / FILE), now_ms=now_ms, limits=limits)
        await mailbox._journal.replay(mailbox._replay)
        if mailbox._book.strays:
            mailbox.recovered.append(f"{mailbox._book.strays} events of `{FILE}` are about no task in it")
        return mailbox

    async def compact(self) -> int:
        """Remove finished tasks, and rewrite the file.

        Raises:
            errors.StoreError: the disk took none of it; nothing changed.
        """
        return len(await self._queued(_Act(self._compaction, anew=True)))

    async def set_clock(self, now_ms: int) -> None:
        """Take times that are ahead of ``now_ms`` back to it, and rewrite the file."""
        await self._queued(_Act(lambda: transitions.set_clock(self._book, now_ms), anew=True))

    async def close(self) -> None:
        """Write the queued acts, and close the file."""
        await self._turns.close("it was closed")
        await self._journal.close()

    async def _do(self, act: Callable[[], T]) -> T:
        return await self._queued(_Act(act))  # type: ignore[no-any-return]

    async def _queued(self, act: _Act) -> Any:
        await anyio.lowlevel.checkpoint_if_cancelled()
        # INVARIANT: a caller cancelled meanwhile gets the result first: otherwise a lease could belong to a caller that
        # does not know of it.
        with anyio.CancelScope(shield=True):
            return await self._turns.submit(act)

    async def _write(self, acts: Sequence[_Act]) -> list[Any]:
        answers = []
        for anew, some in itertools.groupby(acts, key=lambda act: act.anew):
            # An act that rewrites the whole file is a group of its own.
            for together in ([one] for one in some) if anew else [list(some)]:
                answers += await self._write_together(together)
        return answers

    async def _write_together(self, acts: Sequence[_Act]) -> list[Any]:
        ended = len(self._ended)
        answers = [self._answer(act) for act in acts]
        lines = [events.encode(event) for event in self._book.fresh()]
        try:
            if acts[0].anew and not isinstance(answers[0], Exception):
                await self._journal.rewrite(self._restated())
            else:
                await self._journal.append_all(lines)
        except Exception as e:  # after any error, no part of the group is on disk
            self._book.withdraw()
            del self._ended[ended:]
            return [answer if isinstance(answer, Exception) else e for answer in answers]
        self._done()
        return answers

    def _answer(self, act: _Act) -> Any:
        try:
            return self._act(act.do)
        except Exception as e:  # the act's own error: it was refused, and emitted no event
            return e

    def _compaction(self) -> list[str]:
        return transitions.compact(self._book, self._now())

    def _replay(self, line: bytes, where: str) -> None:
        self._book.apply(events.decode(line, where=where))
        self._book.settle()

    def _restated(self) -> Iterator[bytes]:
        # Runs in the journal's thread; no act changes the book during a write.
        return (events.encode(event) for event in transitions.restate(self._book))
