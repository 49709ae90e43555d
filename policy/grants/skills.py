"""Skill grants: tool URIs and the classes of side effects that a tool may have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from msgspec import Struct

from policy.grants.sets.domain import EMPTY, NameSet

SIDE_EFFECTS = ("chain", "network", "read", "shell", "write")


class SkillSet(Struct, frozen=True):
    """``allow`` holds tool URIs with their version, ``side_effects`` classes of ``SIDE_EFFECTS``.

    An empty list of classes allows no side effect (reference: Matrix allows all, which we do not).
    """

    allow: NameSet = EMPTY
    side_effects: NameSet = EMPTY

    @classmethod
    def of(cls, allow: Iterable[str] = (), side_effects: Iterable[str] = ()) -> Self:
        """The grants of a manifest."""
        return cls(NameSet.of(allow), NameSet.of(side_effects))

    @classmethod
    def bottom(cls) -> Self:
        """No tool, no side effect."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every tool and class."""
        return cls(NameSet.top(), NameSet.top())

    def meet(self, other: Self, /) -> Self:
        """Tools and classes that both allow."""
        return type(self)(self.allow.meet(other.allow), self.side_effects.meet(other.side_effects))

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows all of this."""
        return self.allow.is_subset(other.allow) and self.side_effects.is_subset(other.side_effects)

    def difference(self, other: Self, /) -> Self:
        """Tools and classes that ``other`` lacks."""
        return type(self)(self.allow.difference(other.allow), self.side_effects.difference(other.side_effects))

    def describe(self) -> tuple[str, ...]:
        """A line a tool and a line a class."""
        tools = (f"skill {uri}" for uri in self.allow.listing())
        return (*tools, *(f"side effect {name}" for name in self.side_effects.listing()))

    def canonical(self) -> dict[str, Any]:
        """Tools and classes."""
        return {"allow": self.allow.listing(), "side_effects": self.side_effects.listing()}
