"""The interface of each domain of grants, and the two shapes that most of them are made of.

A domain is a bounded meet-semilattice: ``meet`` is what two parties both allow, ``is_subset`` is its order
(``a.is_subset(b) == (a.meet(b) == a)``), each class has a ``bottom()`` that allows nothing and a ``top()`` that
allows everything. Values are frozen and canonical: two that allow the same are equal. tests/property/policy
holds the laws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

ANY = "*"


class Domain(Protocol):
    """One of the ten domains."""

    @classmethod
    def bottom(cls) -> Self:
        """Return the value that allows nothing."""

    @classmethod
    def top(cls) -> Self:
        """Return the value that allows everything: a ceiling that leaves the domain open."""

    def meet(self, other: Self, /) -> Self:
        """Return the value that both allow."""

    def is_subset(self, other: Self, /) -> bool:
        """Whether everything that this allows, ``other`` allows too."""

    def difference(self, other: Self, /) -> Self:
        """The grants of this, each whole, that ``other`` does not cover; bottom exactly when a subset."""

    def describe(self) -> tuple[str, ...]:
        """One line a grant, sorted; nothing for bottom."""

    def canonical(self) -> dict[str, Any]:
        """The value as JSON would hold it: sorted, stable, equal exactly for equal grants."""


@dataclass(frozen=True, slots=True)
class NameSet:
    """A set of exact names, or every name (``any``, which only a ceiling has: a manifest lists)."""

    names: frozenset[str] = frozenset()
    any: bool = False

    def __post_init__(self) -> None:
        if self.any and self.names:
            # Canonical form: every name already holds these, and a reader that overlooks `any` then allows less.
            object.__setattr__(self, "names", frozenset())

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """The set of these names."""
        return cls(frozenset(names))

    @classmethod
    def bottom(cls) -> Self:
        """No name."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every name."""
        return cls(any=True)

    def holds(self, name: str) -> bool:
        """Whether ``name`` is in the set."""
        return self.any or name in self.names

    def meet(self, other: Self, /) -> Self:
        """The names that both hold."""
        if self.any:
            return other
        return self if other.any else type(self)(self.names & other.names)

    def union(self, other: Self, /) -> Self:
        """The names that either holds."""
        return type(self)(self.names | other.names, self.any or other.any)

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` holds every name of this."""
        return other.any or (not self.any and self.names <= other.names)

    def difference(self, other: Self, /) -> Self:
        """The names of this that ``other`` lacks."""
        if self.is_subset(other):
            return self.bottom()
        return self if self.any else type(self)(self.names - other.names)

    def listing(self) -> list[str]:
        """The names, sorted, ``*`` for every name."""
        return [ANY] if self.any else sorted(self.names)


T = TypeVar("T", bound=str)
EMPTY = NameSet()


def lower(order: Sequence[T], a: T, b: T) -> T:
    """The lower of two values of an ordered table (lowest first)."""
    return a if order.index(a) <= order.index(b) else b


def at_most(order: Sequence[T], a: T, b: T) -> bool:
    """Whether ``a`` stands no higher than ``b`` in an ordered table (lowest first)."""
    return order.index(a) <= order.index(b)
