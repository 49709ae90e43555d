"""Identity grants: the roles that an agent may act under. A role may only narrow along the computed order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from policy.grants.sets.domain import EMPTY, NameSet


@dataclass(frozen=True, slots=True)
class Identity:
    """``roles`` is the role with every role below it, so that meet and order are those of sets.

    An agent that names no role is under no role's ceiling: that is every role, the top, and a child of an agent
    with a role must name one that is no higher. ``role`` is the name as it was written, for people.
    """

    roles: NameSet = EMPTY
    role: str = field(default="", compare=False)

    @classmethod
    def of(cls, role: str | None, below: Mapping[str, frozenset[str]]) -> Self:
        """The identity of ``role``; ``below`` maps a role to itself and all below it.

        A role that ``below`` does not know stands alone: it is below nothing but itself.
        """
        if role is None:
            return cls.top()
        return cls(NameSet(below.get(role, frozenset()) | {role}), role)

    @classmethod
    def bottom(cls) -> Self:
        """No role at all."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Under no role's ceiling."""
        return cls(NameSet.top())

    def meet(self, other: Self, /) -> Self:
        """The roles that both may act under."""
        if self.is_subset(other):
            return self
        if other.is_subset(self):
            return other
        return type(self)(self.roles.meet(other.roles))

    def is_subset(self, other: Self, /) -> bool:
        """Whether this role is ``other``'s or below it."""
        return self.roles.is_subset(other.roles)

    def difference(self, other: Self, /) -> Self:
        """The roles that ``other`` may not act under."""
        if self.is_subset(other):
            return self.bottom()
        return type(self)(self.roles.difference(other.roles), self.role)

    def describe(self) -> tuple[str, ...]:
        """The role and those below it."""
        return ("any role",) if self.roles.any else tuple(f"role {name}" for name in self.roles.listing())

    def canonical(self) -> dict[str, Any]:
        """The roles."""
        return {"roles": self.roles.listing()}
