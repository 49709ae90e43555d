"""How many signers are enough, where each key says for itself among how many it counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Demanding(Protocol):
    """A key that counts only where at least ``threshold`` keys, itself among them, signed and count."""

    @property
    def threshold(self) -> int:
        """1: the key suffices alone."""


Key = TypeVar("Key", bound=Demanding)


def counting(signed: Iterable[Key]) -> tuple[Key, ...]:
    """Those of the distinct keys that signed which count: the largest set in which each key's demand is met.

    Two such sets make one together, so there is one that is largest, and a further signature never makes it
    smaller. A key that wants three signers lends nothing to one that wants two: docs/adr/0020.
    """
    kept = tuple(signed)
    while True:
        met = tuple(key for key in kept if key.threshold <= len(kept))
        if len(met) == len(kept):
            return met
        kept = met


def missing(signed: Iterable[Key], others: Iterable[Key], *, least: int = 1) -> int | None:
    """How many of ``others`` have to sign as well until ``least`` keys count; None when all of them are too few.

    The key with the lowest demand is asked first, so no smaller number would do.
    """
    made = tuple(signed)
    asked = sorted(others, key=lambda key: key.threshold)
    for more in range(len(asked) + 1):
        if len(counting((*made, *asked[:more]))) >= least:
            return more
    return None
