"""The matrices of a durable store: read ahead or at the first search, then kept up by what is committed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from covenant.stores.memory.index.threads import Thread
from covenant.stores.memory.index.vectors import Block, Entry, Matrices
from covenant.wire.types import Tier

T = TypeVar("T")

# Changes that wait for a search are taken in before they hold more than this many vectors.
_MOST_PENDING: Final = 4096


@dataclass(frozen=True, slots=True)
class Put:
    """A record was written."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Gone:
    """A record was deleted, or has no vector of this space any more."""

    id: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A record was promoted."""

    id: str
    tier: Tier


Change = Put | Gone | Moved
# Every vector, a few at a time, with how many records there are in all: none has more of one number of dimensions.
Load = Callable[[], AsyncGenerator[tuple[int, Sequence[Block]], None]]


class Cache:
    """Matrices of what ``load`` reads and ``add`` tells. Used in ``thread`` alone, so by one search at a time."""

    def __init__(self, load: Load, thread: Thread) -> None:
        self._load = load
        self._thread = thread
        self._matrices: Matrices | None = None
        # The loop appends and the thread takes, each in one step.
        self._pending: deque[Change] = deque()
        self._recording = False
        self._filling = anyio.Lock()

    def add(self, changes: Sequence[Change]) -> None:
        """Take note of what was committed, in the order of its commits."""
        if self._recording:
            self._pending.extend(changes)

    async def settle(self) -> None:
        """Take in what waits, when it is much."""
        if len(self._pending) >= _MOST_PENDING and self._matrices is not None:
            await self.use(lambda matrices: None)

    async def warm(self, most_bytes: int) -> bool:
        """Read the matrices before somebody asks; whether they are there. Not when they would take more than that."""
        await self._fill(most_bytes)
        return self._matrices is not None

    async def use(self, compute: Callable[[Matrices], T], whose: str | None = None) -> T:
        """What ``compute`` finds in the matrices as of all that was committed before, in the turn of whose it is."""
        while (matrices := self._matrices) is None:
            await self._fill()
        return await self._thread.run(lambda: compute(self._taken_in(matrices)), whose)

    def _taken_in(self, matrices: Matrices) -> Matrices:
        # INVARIANT: only the thread takes, and from the front: whoever's turn it is, changes are made in their order.
        while self._pending:
            match self._pending.popleft():
                case Put(entry):
                    matrices.put(entry)
                case Gone(record_id):
                    matrices.discard(record_id)
                case Moved(record_id, tier):
                    matrices.move(record_id, tier)
        return matrices

    async def _fill(self, most_bytes: int | None = None) -> None:
        async with self._filling:
            if self._matrices is not None:
                return
            matrices = Matrices()
            # INVARIANT: changes are noted before the first row is read; what is both read and noted is put twice.
            self._pending, self._recording = deque(), True
            try:
                async with contextlib.aclosing(self._load()) as loaded:
                    async for total, blocks in loaded:
                        for block in blocks:
                            await anyio.to_thread.run_sync(matrices.add_new, block, total)
                        if most_bytes is not None and matrices.bytes_of_rows > most_bytes:
                            return
                self._matrices = matrices
            finally:
                if self._matrices is None:
                    self._pending, self._recording = deque(), False
