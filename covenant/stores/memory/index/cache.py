"""The matrices of a durable store: loaded ahead or at the first search, then updated by each commit."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from covenant.stores.memory.index.threads import Thread
from covenant.stores.memory.index.vectors import Block, Matrices, RecordVectors
from covenant.wire.types import Tier

T = TypeVar("T")

# Queued changes are applied before they hold more than this many vectors.
MOST_PENDING: Final = 4096


@dataclass(frozen=True, slots=True)
class Put:
    """A record was written."""

    entry: RecordVectors


@dataclass(frozen=True, slots=True)
class Gone:
    """A record was deleted, or no longer has a vector of this space."""

    id: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A record was promoted."""

    id: str
    tier: Tier


Change = Put | Gone | Moved
# Yields every vector in blocks, each with the total number of records: no matrix needs more rows than that.
Load = Callable[[], AsyncGenerator[tuple[int, Sequence[Block]], None]]


class Cache:
    """Matrices loaded by ``load`` and updated by ``add``. Only ``thread`` uses them, so one search at a time."""

    def __init__(self, load: Load, thread: Thread) -> None:
        self._load = load
        self._thread = thread
        self._matrices: Matrices | None = None
        # The loop appends and the thread pops, each in one atomic step.
        self._pending: deque[Change] = deque()
        self._recording = False
        self._filling = anyio.Lock()

    def add(self, changes: Sequence[Change]) -> None:
        """Queue committed changes, in the order of their commits."""
        if self._recording:
            self._pending.extend(changes)

    async def settle(self) -> None:
        """Apply the queued changes if there are many."""
        if len(self._pending) >= MOST_PENDING and self._matrices is not None:
            await self.use(lambda matrices: None)

    async def warm(self, most_bytes: int) -> bool:
        """Load the matrices before the first search, unless they exceed ``most_bytes``. Returns True if they are
        loaded."""
        await self._fill(most_bytes)
        return self._matrices is not None

    async def use(self, compute: Callable[[Matrices], T], whose: str | None = None) -> T:
        """Run ``compute`` on the matrices, with all earlier commits applied, in the thread's turn of ``whose``."""
        while (matrices := self._matrices) is None:
            await self._fill()
        return await self._thread.run(lambda: compute(self._taken_in(matrices)), whose)

    def _taken_in(self, matrices: Matrices) -> Matrices:
        # INVARIANT: only the thread pops, from the front: changes apply in their order, independent of the turns.
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
            # INVARIANT: record changes before reading the first row; a row that is both read and recorded is put twice.
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
