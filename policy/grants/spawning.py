"""Spawning grants: whether children may be started, how deep, how many, what outlives a parent, and their rights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from msgspec import Struct, structs

from policy.grants.credentials import CredentialSet
from policy.grants.network import Network
from policy.grants.paths import PathSet
from policy.grants.resources import least, within
from policy.grants.sets.domain import at_most, lower
from policy.grants.syscalls import SyscallSet

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


class MayGrant(Struct, frozen=True):
    """Rights that an agent may give to its children and has not itself (``spawn.may_grant``).

    ``syscalls`` are those that a child needs for ``network``. Without a network there are none.
    """

    network: Network = Network()
    read: PathSet = PathSet()
    credentials: CredentialSet = CredentialSet()
    syscalls: SyscallSet = SyscallSet()

    def __post_init__(self) -> None:
        if self.network == Network.bottom() and self.syscalls != SyscallSet.bottom():
            structs.force_setattr(self, "syscalls", SyscallSet.bottom())

    @classmethod
    def bottom(cls) -> Self:
        """No right."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every right."""
        return cls(Network.top(), PathSet.top(), CredentialSet.top(), SyscallSet.top())

    def __bool__(self) -> bool:
        return self != self.bottom()

    def meet(self, other: Self, /) -> Self:
        """The rights that both hold."""
        return type(self)(
            self.network.meet(other.network),
            self.read.meet(other.read),
            self.credentials.meet(other.credentials),
            self.syscalls.meet(other.syscalls),
        )

    def union(self, other: Self, /) -> Self:
        """The rights that either holds."""
        return type(self)(
            self.network.union(other.network),
            self.read.union(other.read),
            self.credentials.union(other.credentials),
            self.syscalls.union(other.syscalls),
        )

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` holds every right of this."""
        return (
            self.network.is_subset(other.network)
            and self.read.is_subset(other.read)
            and self.credentials.is_subset(other.credentials)
            and self.syscalls.is_subset(other.syscalls)
        )

    def difference(self, other: Self, /) -> Self:
        """The rights, each whole, that ``other`` lacks: the network where ``other`` lacks calls that it needs."""
        calls = self.syscalls.difference(other.syscalls)
        return type(self)(
            self.network.difference(other.network) if calls == SyscallSet.bottom() else self.network,
            self.read.difference(other.read),
            self.credentials.difference(other.credentials),
            calls,
        )

    def describe(self) -> tuple[str, ...]:
        """A line a right."""
        calls = (f"calls {', '.join(self.syscalls.listing())}",) if self.syscalls != SyscallSet.bottom() else ()
        paths = (f"read {path}" for path in self.read)
        lines = (*self.network.describe(), *paths, *self.credentials.describe(), *calls)
        return tuple(f"give to children: {line}" for line in lines)

    def canonical(self) -> dict[str, Any]:
        """The rights by their domain."""
        return {
            "network": self.network.canonical(),
            "read": list(self.read),
            "credentials": self.credentials.listing(),
            "syscalls": self.syscalls.listing(),
        }
