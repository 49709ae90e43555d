"""Published ports: each a TCP port of the agent and the one place on this host that reaches it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from policy.grants.sets.domain import ANY, NameSet

_BETWEEN = " at "


@dataclass(frozen=True, slots=True)
class PublishSet(NameSet):
    """Pairs of a port and a place, each one name: a parent that publishes one allows a child no other place."""

    @classmethod
    def ports(cls, pairs: Iterable[tuple[int, str]]) -> Self:
        """The set of these pairs."""
        return cls.of(f"{port}{_BETWEEN}{to}" for port, to in pairs)

    def __bool__(self) -> bool:
        return self.any or bool(self.names)

    def pairs(self) -> list[tuple[int, str]]:
        """The pairs, by port. A ceiling that is open has none."""
        split = (name.partition(_BETWEEN) for name in self.names)
        return sorted((int(port), to) for port, _, to in split)

    def describe(self) -> tuple[str, ...]:
        """A line a port."""
        return (
            ("publish any port",)
            if self.any
            else tuple(f"publish port {port}{_BETWEEN}{to}" for port, to in self.pairs())
        )

    def canonical(self) -> dict[str, Any]:
        """The pairs, or ``*``."""
        return {"ports": [ANY] if self.any else [{"port": port, "to": to} for port, to in self.pairs()]}
