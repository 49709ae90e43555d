"""Answers that the DNS gate keeps: one cache a run, bounded in entries and bytes, lost with the gate's process.

An answer is kept for the least time to live of its records, and never longer than its addresses are in the firewall's
sets. The agent is told the seconds that are left.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

# A failure and a TTL of 0 are kept this long, so that a crowd behind one name is one question (RFC 9520, 3.2).
LEAST_SECONDS: Final = 1
# The longest time for "no such name" and "no such record" (RFC 2308, 5).
NEGATIVE_SECONDS: Final = 60
ENTRIES: Final = 1024
BYTES: Final = 2 << 20
# What an entry costs besides its records.
_ENTRY_BYTES: Final = 256

Key = tuple[str, int]


class Resolution(Struct, frozen=True):
    """Answer of the gate to a name and a type.

    ``rcode`` is None where the gate sends nothing. ``ttl`` is the time to live that the agent is told at first, and
    ``fresh`` the time that the gate keeps the answer, both in seconds. ``code`` is the denial that each question with
    this outcome reports.
    """

    rcode: int | None
    data: tuple[bytes, ...] = ()
    ttl: int = 0
    fresh: int = LEAST_SECONDS
    code: str | None = None


class _KeptAnswer(Struct, frozen=True):
    outcome: Resolution
    since: float
    size: int


class AnswerCache:
    """Outcomes by name and type. Times are seconds of the caller's clock."""

    def __init__(self, *, entries: int = ENTRIES, size: int = BYTES) -> None:
        self._entries, self._most = entries, size
        self._kept: dict[Key, _KeptAnswer] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key, now: float) -> Resolution | None:
        """Return a fresh outcome with the time to live that is left. None if there is none."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        age = now - kept.since
        found = kept.outcome
        if age >= found.fresh:
            self._drop(key)
            return None
        return found if age < 1 else Resolution(found.rcode, found.data, _left(found.ttl, age), found.fresh, found.code)

    def put(self, key: Key, outcome: Resolution, now: float) -> None:
        """Keep an outcome. Remove the oldest ones if there is no room."""
        size = _ENTRY_BYTES + len(key[0]) + sum(map(len, outcome.data))
        self._drop(key)
        if size > self._most:
            return
        while self._kept and (len(self._kept) >= self._entries or self._bytes + size > self._most):
            self._drop(next(iter(self._kept)))
        self._kept[key] = _KeptAnswer(outcome, now, size)
        self._bytes += size

    def clear(self) -> None:
        """Forget everything: other resolvers may know other answers."""
        self._kept.clear()
        self._bytes = 0

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= kept.size


def _left(ttl: int, age: float) -> int:
    """The seconds left of ``ttl``, at least 1: a resolver in the agent may not keep an answer with 0 at all."""
    return max(1, ttl - int(age)) if ttl else 0
