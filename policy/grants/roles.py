"""Roles: named ceilings, and the order among them, which is computed and never listed.

A ceiling is an ``Effective`` value like any other: it bounds kinds and sizes and leaves paths and hosts open. A role
is below another when its ceiling is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Self

from msgspec import Struct, structs

from policy.grants.effective import Effective
from policy.grants.identity import Identity


class Role(Struct, frozen=True):
    """A name, the line that says what it is for, and what it bounds."""

    name: str
    reason: str
    ceiling: Effective


class Roles(Struct, frozen=True):
    """Every role that this host knows, by name. ``below`` maps a role to itself and all roles below it.

    ``version`` is that of the table, which the signed statement pins. Made by ``of``.
    """

    version: int
    by_name: Mapping[str, Role]
    below: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, version: int, roles: Iterable[Role]) -> Self:
        """Compute the order. Each ceiling's identity becomes its role with all below.

        Raises ValueError for two roles of one name.
        """
        listed = sorted(roles, key=lambda role: role.name)
        if len({role.name for role in listed}) != len(listed):
            raise ValueError("two roles have one name")
        # What a role may call itself follows from the order, so it takes no part in computing it.
        bare = {role.name: replace(role.ceiling, identity=Identity.bottom()) for role in listed}
        below = {
            name: frozenset(other for other, theirs in bare.items() if theirs.is_subset(mine))
            for name, mine in bare.items()
        }
        placed = {
            role.name: structs.replace(role, ceiling=replace(role.ceiling, identity=Identity.of(role.name, below)))
            for role in listed
        }
        return cls(version, MappingProxyType(placed), MappingProxyType(below))

    def ceiling(self, name: str) -> Effective:
        """The ceiling of a role. Raises KeyError for an unknown name."""
        return self.by_name[name].ceiling

    def adding(self, version: int, roles: Iterable[Role]) -> Self:
        """These roles and an operator's own, in one order.

        Raises ValueError for a name that is taken: an operator adds roles, and never widens a built-in one.
        """
        return self.of(version, (*self.by_name.values(), *roles))
