"""Spawning grants: whether children may be started, how deep, how many; and what outlives a parent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from policy.grants.resources import least, within
from policy.grants.sets.domain import at_most, lower

OnParentExit = Literal["terminate", "wind-down", "adopt"]
# What lets this agent live longer after its parent stands higher.
ON_PARENT_EXIT: tuple[OnParentExit, ...] = ("terminate", "wind-down", "adopt")


@dataclass(frozen=True, slots=True)
class Spawning:
    """``max_depth`` levels below this agent, ``max_descendants`` alive at once in its whole subtree.

    None is no limit, which only a ceiling has. A limit of 0 is the same as not allowed, and is kept so.
    """

    max_depth: int | None = 0
    max_descendants: int | None = 0
    on_parent_exit: OnParentExit = "terminate"

    def __post_init__(self) -> None:
        if self.max_depth == 0 or self.max_descendants == 0:
            object.__setattr__(self, "max_depth", 0)
            object.__setattr__(self, "max_descendants", 0)

    @classmethod
    def bottom(cls) -> Self:
        """No children."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Any children."""
        return cls(None, None, "adopt")

    @property
    def allowed(self) -> bool:
        """Whether any child may be started."""
        return self.max_depth != 0

    def meet(self, other: Self, /) -> Self:
        """The lower limit of each."""
        return type(self)(
            least(self.max_depth, other.max_depth),
            least(self.max_descendants, other.max_descendants),
            lower(ON_PARENT_EXIT, self.on_parent_exit, other.on_parent_exit),
        )

    def is_subset(self, other: Self, /) -> bool:
        """Whether no limit is above ``other``'s."""
        return (
            within(self.max_depth, other.max_depth)
            and within(self.max_descendants, other.max_descendants)
            and at_most(ON_PARENT_EXIT, self.on_parent_exit, other.on_parent_exit)
        )

    def difference(self, other: Self, /) -> Self:
        """This agent's limits when one is above ``other``'s, and its own fate when that is."""
        covered = within(self.max_depth, other.max_depth) and within(self.max_descendants, other.max_descendants)
        fate = at_most(ON_PARENT_EXIT, self.on_parent_exit, other.on_parent_exit)
        return type(self)(
            0 if covered else self.max_depth,
            0 if covered else self.max_descendants,
            ON_PARENT_EXIT[0] if fate else self.on_parent_exit,
        )

    def for_child(self) -> Self:
        """Return the grant that is left for a child: one level less."""
        depth = None if self.max_depth is None else max(self.max_depth - 1, 0)
        return type(self)(depth, self.max_descendants, self.on_parent_exit)

    def describe(self) -> tuple[str, ...]:
        """Depth and number when children are allowed, and what outlives."""
        lines: list[str] = []
        if self.allowed:
            lines.append(f"spawn depth {'not limited' if self.max_depth is None else self.max_depth}")
            number = "not limited" if self.max_descendants is None else self.max_descendants
            lines.append(f"spawn descendants {number}")
        if self.on_parent_exit != ON_PARENT_EXIT[0]:
            lines.append(f"on parent exit {self.on_parent_exit}")
        return tuple(lines)

    def canonical(self) -> dict[str, Any]:
        """Limits by name."""
        return {
            "allowed": self.allowed,
            "max_depth": self.max_depth,
            "max_descendants": self.max_descendants,
            "on_parent_exit": self.on_parent_exit,
        }
