"""What the versioned data files hold, as frozen values: profiles, the deny list, numbers, never-grantable paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of system calls that a runtime needs, one reason a name.

    ``version`` counts up with every change of ``names``; the policy digest covers the names themselves.
    """

    name: str
    version: int
    names: frozenset[str]
    reasons: Mapping[str, str] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class DenyList:
    """The permanently denied system calls: no manifest and no profile may allow one (rule 7).

    ``reasons`` maps a call's name to the line that says why it is denied.
    """

    version: int
    reasons: Mapping[str, str] = field(repr=False)

    @property
    def names(self) -> frozenset[str]:
        """The denied names."""
        return frozenset(self.reasons)


@dataclass(frozen=True, slots=True)
class SyscallTable:
    """The system call numbers of one architecture, by the kernel's name."""

    arch: str
    version: int
    linux: str
    numbers: Mapping[str, int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class NeverGrantable:
    """Host paths that no manifest is granted, each with its reason.

    ``trees`` are granted in no way, ``write_trees`` not for writing. A grant is refused when it lies in such a tree,
    and when it contains one, since mounting `/var` would bring everything below it. Paths are absolute and normalised;
    ``/`` stands for itself alone.
    """

    version: int
    trees: Mapping[str, str] = field(repr=False)
    write_trees: Mapping[str, str] = field(repr=False)
