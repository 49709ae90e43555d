"""Count the destinations that a run reached: which host, how many connections, how many bytes; never content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from msgspec import Struct

# The most destinations of one run that have a row each. The others are summed in one row without a target.
TARGETS: Final = 128
REST: Final = ""


class ReachedRow(Struct, frozen=True):
    """A destination, as ``covenant policy why --connect`` takes it. ``bytes`` counts both directions of the carried
    connections, without the packets' headers; None where packets were forwarded and not counted."""

    target: str
    connections: int
    bytes: int | None


class TellReached(Protocol):
    """Takes a destination with the connections and bytes since the last call."""

    def __call__(self, target: str, connections: int, carried: int | None) -> None: ...


class Reached:
    """The destinations of one run, in the order of their first connections. Bounded."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int | None]] = {}

    def add(self, target: str, connections: int, carried: int | None) -> None:
        """Count connections and bytes. ``carried`` is None where bytes are not known."""
        if target not in self._counts and len(self._counts) >= TARGETS:
            target = REST
        before, known = self._counts.get(target, (0, None))
        total = known if carried is None else (known or 0) + carried
        self._counts[target] = before + connections, total

    def rows(self) -> Iterator[ReachedRow]:
        """Return a row a destination, and forget them."""
        while self._counts:
            target = next(iter(self._counts))
            yield ReachedRow(target, *self._counts.pop(target))
