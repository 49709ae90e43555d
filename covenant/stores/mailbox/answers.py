"""A cache of earlier answers to idempotent tasks that finds the next one to evict without a scan.

It uses heaps that may hold outdated items. An outdated item is skipped when it reaches the top, and a heap is rebuilt
when more than half of it is outdated. So every change takes logarithmic time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, NamedTuple

from covenant.stores.mailbox.queue import Key
from covenant.wire.types import A2ATaskResult

# The number of outdated items that a heap may always hold.
_SLACK: Final = 64


class Cached(NamedTuple):
    """An earlier answer, its time, its size in bytes, and its turn: an older answer has a smaller one."""

    result: A2ATaskResult
    at_ms: int
    size: int
    turn: int


class _Held:
    """The answers of one sender: their number, their bytes, and a heap of their ages."""

    __slots__ = ("ages", "count", "size")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.ages: list[tuple[int, Key]] = []


class Answers:
    """Answers by key. Only ``put`` changes them; putting the old answer back restores the earlier state."""

    def __init__(self) -> None:
        self.size = 0
        self._kept: dict[Key, Cached] = {}
        self._of: dict[str, _Held] = {}
        # The senders with the most answers on top: (negative count, sender), and the same by bytes.
        self._by_count: list[tuple[int, str]] = []
        self._by_size: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Cached | None:
        """Return the answer under a key."""
        return self._kept.get(key)

    def items(self) -> Iterator[tuple[Key, Cached]]:
        """Yield all answers, oldest first."""
        yield from sorted(self._kept.items(), key=lambda one: one[1].turn)

    def put(self, key: Key, new: Cached | None) -> None:
        """Store an answer under the key; None removes it."""
        old = self._kept.pop(key, None)
        if new is not None:
            self._kept[key] = new
        grown = (new.size if new else 0) - (old.size if old else 0)
        self.size += grown
        held = self._of.setdefault(key.sender, _Held())
        held.count += (new is not None) - (old is not None)
        held.size += grown
        if not held.count:
            del self._of[key.sender]
            return
        if new is not None:
            heapq.heappush(held.ages, (new.turn, key))
        if len(held.ages) > 2 * held.count + _SLACK:
            held.ages = [one for one in set(held.ages) if self._is_kept(*one)]
            heapq.heapify(held.ages)
        self._rank(key.sender, held)

    def first_to_go(self, *, by_count: bool) -> Key:
        """Return the key of the oldest answer of the sender with the most, in number or in bytes. Needs at least one
        answer."""
        heap = self._by_count if by_count else self._by_size
        while True:
            less, sender = heap[0]
            held = self._of.get(sender)
            if held is not None and -less == (held.count if by_count else held.size):
                break
            heapq.heappop(heap)
        while not self._is_kept(*held.ages[0]):
            heapq.heappop(held.ages)
        return held.ages[0][1]

    def _is_kept(self, turn: int, key: Key) -> bool:
        kept = self._kept.get(key)
        return kept is not None and kept.turn == turn

    def _rank(self, sender: str, held: _Held) -> None:
        heapq.heappush(self._by_count, (-held.count, sender))
        heapq.heappush(self._by_size, (-held.size, sender))
        if len(self._by_count) > 2 * len(self._of) + _SLACK:
            self._by_count = [(-each.count, name) for name, each in self._of.items()]
            heapq.heapify(self._by_count)
        if len(self._by_size) > 2 * len(self._of) + _SLACK:
            self._by_size = [(-each.size, name) for name, each in self._of.items()]
            heapq.heapify(self._by_size)
