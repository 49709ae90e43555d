"""The matrices of a durable store: read at the first search, then kept up by what is committed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.to_thread

from covenant.stores.memory import vectors
from covenant.stores.memory.vectors import Entry, Matrices, Near
from covenant.wire.types import Tier

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
Load = Callable[[], AsyncIterator[tuple[Mapping[int, int], Sequence[Entry]]]]


class Cache:
    """Exact search over what ``load`` reads and ``add`` tells. Computed in a worker thread, one search at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._matrices: Matrices | None = None
        self._pending: list[Change] = []
        self._recording = False
        self._lock = anyio.Lock()

    def add(self, changes: Sequence[Change]) -> None:
        """Take note of what was committed, in the order of its commits."""
        if self._recording:
            self._pending.extend(changes)

    async def settle(self) -> None:
        """Take in what waits, when it is much."""
        if len(self._pending) >= _MOST_PENDING and self._matrices is not None:
            async with self._lock:
                await anyio.to_thread.run_sync(self._take_in)

    async def best(
        self,
        embedding: Sequence[float],
        count: int,
        *,
        tier: Tier | None,
        owner: str | None,
        floor: float,
        also: Sequence[str],
    ) -> tuple[list[Near], dict[str, float]]:
        """The best by cosine, and the cosines of ``also``."""
        query = vectors.query_vector(embedding)
        if query is None:
            return [], {}
        async with self._lock:
            if self._matrices is None:
                await self._fill()

            def compute() -> tuple[list[Near], dict[str, float]]:
                self._take_in()
                assert self._matrices is not None
                matrix = self._matrices.matrix(len(query))
                if matrix is None:
                    return [], {}
                found = matrix.best(query, count, tier=tier, owner=owner, floor=floor)
                return found, matrix.scores(query, also)

            return await anyio.to_thread.run_sync(compute)

    async def _fill(self) -> None:
        matrices = Matrices()
        # INVARIANT: changes are noted before the first row is read; what is both read and noted is put twice.
        self._pending, self._recording = [], True
        try:
            async for sizes, entries in self._load():
                for dimensions, total in sizes.items():
                    matrices.reserve(dimensions, total)
                await anyio.to_thread.run_sync(matrices.add_new, entries)
        except BaseException:
            self._pending, self._recording = [], False
            raise
        self._matrices = matrices

    def _take_in(self) -> None:
        changes, self._pending = self._pending, []
        assert self._matrices is not None
        for change in changes:
            match change:
                case Put(entry):
                    self._matrices.put(entry)
                case Gone(record_id):
                    self._matrices.discard(record_id)
                case Moved(record_id, tier):
                    self._matrices.move(record_id, tier)
