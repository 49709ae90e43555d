"""System call grants: the names that the filter lets through."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from policy.grants.sets.domain import NameSet

# What starts another program, and what makes one out of memory. The product drops the first without an
# executables grant and the others always (decisions.md, "Filesystem and execution").
EXEC_CALL = "execve"
NEVER_CALLS = frozenset({"execveat", "memfd_create"})


@dataclass(frozen=True, slots=True)
class SyscallSet(NameSet):
    """Names by the kernel's spelling.

    ``profile`` and ``profile_names`` say where they came from, for people; they grant nothing.
    """

    profile: str = field(default="", compare=False)
    profile_names: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def meet(self, other: Self, /) -> Self:
        """The names that both hold; the profile is that of the side that decides, else this one's."""
        if self.is_subset(other):
            return self
        if other.is_subset(self):
            return other
        return replace(self, names=self.names & other.names)

    def without(self, names: frozenset[str]) -> Self:
        """The set without ``names``; every name stays every name."""
        if self.any or self.names.isdisjoint(names):
            return self
        return replace(self, names=self.names - names)

    def describe(self) -> tuple[str, ...]:
        """A line a call."""
        return tuple(f"call {name}" for name in self.listing())

    def canonical(self) -> dict[str, Any]:
        """The names."""
        return {"names": self.listing()}
