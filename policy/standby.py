"""How many instances of which agent are kept ready: what to make next and what to end, given what there is.

An instance is an agent that was started under its policy, waits for its one intent and is frozen. It costs memory and
nothing else, so memory decides: what is asked for (``[sandbox] standby``) is a wish, and the machine comes first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct

# What one instance is taken to cost before it is there: a sandbox with a python in it has about 40 MiB.
COST_MB = 64
# This much of the machine, and at least so much of it, stays for those that run.
RESERVE_SHARE, RESERVE_MB = 0.1, 512
# Above this share of the last ten seconds in which something waited for memory, none is made; above the other, the
# instances give way (the lines `some` and `full` of /proc/pressure/memory, in percent).
STALLED_SOME, STALLED_FULL = 10.0, 5.0
# The wait after a failure to make one, in seconds: doubled each time, up to the longest; up to a day where its agent
# ran and did not come to wait for its intent, since each try lets it run with what it was granted and nothing to do.
FIRST_WAIT, LONGEST_WAIT, LONGEST_RESTLESS = 1.0, 300.0, 86_400.0
# Who asks for an instance, until an intent's issuer takes its place.
ISSUER = "standby@local"
# The reason in an instance's row `run_state`: its log has no `run_started` before its intent.
MADE_AHEAD = "standby: made ahead of its intent"


class Machine(Struct, frozen=True):
    """The memory of the machine, in MiB and percent; ``some`` and ``full`` are 0 where it does not say."""

    total_mb: int
    available_mb: int
    some: float = 0.0
    full: float = 0.0

    @property
    def reserve_mb(self) -> int:
        """Return the memory that stays for live runs; on a small machine half of it."""
        return min(max(RESERVE_MB, int(self.total_mb * RESERVE_SHARE)), self.total_mb // 2)

    @property
    def room(self) -> bool:
        """Whether one more instance may be made."""
        return not self.lacks

    @property
    def lacks(self) -> str:
        """Return why no instance may be made, in words; empty where one may."""
        if self.some > STALLED_SOME:
            return f"programs wait for memory {self.some:g} % of the time, {STALLED_SOME:g} % at most"
        if self.available_mb - COST_MB < self.reserve_mb:
            stay = f"one takes {COST_MB}, and {self.reserve_mb} stay for runs"
            return f"{self.available_mb} MiB of memory are available; {stay}"
        return ""

    @property
    def short_mb(self) -> int:
        """How much is to be given back, 0 for nothing."""
        lacking = self.reserve_mb - self.available_mb
        return max(lacking, COST_MB if self.full > STALLED_FULL else 0, 0)


class Instance(Struct, frozen=True):
    """One that there is, or that is being made: of which kind, and since when (any clock)."""

    id: int
    key: str
    since: float
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """``make`` is the kind of which one more is made, None for none; ``end`` are those that go."""

    make: str | None = None
    end: tuple[int, ...] = ()


def plan(
    wanted: Mapping[str, int], there: Collection[Instance], machine: Machine, *, waiting: Collection[str] = ()
) -> Plan:
    """The next step. ``wanted`` says how many of each kind are asked for; of those in ``waiting`` none is made now.

    (1) what is of no wanted kind, or one too many of its kind, goes
    (2) where memory is short, instances go until it is not: of the kind that has most, the oldest first
    (3) else one is made, one at a time, of the kind that has the smallest part of what it asks for
    """
    ends = list(_surplus(wanted, there))  # (1)
    left = [one for one in there if one.id not in ends]
    if machine.short_mb:  # (2)
        ends += _given_back(left, math.ceil(machine.short_mb / COST_MB))
        return Plan(None, tuple(ends))
    making = any(not one.ready for one in left)
    if making or not machine.room:
        return Plan(None, tuple(ends))
    have = Counter(one.key for one in left)  # (3)
    lacking = [key for key, count in wanted.items() if have[key] < count and key not in waiting]
    return Plan(min(lacking, key=lambda key: (have[key] / wanted[key], key), default=None), tuple(ends))


def wait_after(failures: int, *, restless: bool = False) -> float:
    """How long none of a kind is made after so many failures on end, in seconds; ``restless`` says that in the last its
    agent ran."""
    longest = LONGEST_RESTLESS if restless else LONGEST_WAIT
    return 0.0 if failures <= 0 else min(longest, FIRST_WAIT * 2.0 ** min(failures - 1, 32))


def _surplus(wanted: Mapping[str, int], there: Iterable[Instance]) -> Iterable[int]:
    kept: Counter[str] = Counter()
    # The youngest stay: what they were made of is what holds now.
    for one in sorted(there, key=lambda one: (-one.since, one.id)):
        kept[one.key] += 1
        if kept[one.key] > wanted.get(one.key, 0):
            yield one.id


def _given_back(there: Collection[Instance], count: int) -> list[int]:
    left = sorted(there, key=lambda one: (one.since, one.id))
    out: list[int] = []
    while left and len(out) < count:
        have = Counter(one.key for one in left)
        first = max(left, key=lambda one: (have[one.key], -one.since, -one.id))
        left.remove(first)
        out.append(first.id)
    return out
