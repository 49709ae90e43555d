"""The contents of the versioned data files, as frozen values: profiles, deny list, numbers, argument rules, paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of system calls that a runtime needs, one reason a name.

    ``version`` counts up with every change; the policy digest covers the names themselves. ``kept`` are
    those that no trace of ours shows; their reason says which code path needs them.
    """

    name: str
    version: int
    names: frozenset[str]
    reasons: Mapping[str, str] = field(compare=False, repr=False)
    kept: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


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


class Condition(Struct, frozen=True):
    """``arguments[argument] & mask == value``, on all 64 bits."""

    argument: int
    mask: int
    value: int


@dataclass(frozen=True, slots=True)
class ValueCondition:
    """Conditions that must all hold, each on another argument; ``when`` names a grant that it hangs on, or is None."""

    conditions: tuple[Condition, ...]
    when: str | None = None
    reason: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """The argument rules of a granted ``call``: one of ``allow`` must hold."""

    call: str
    reason: str = field(compare=False, repr=False)
    allow: tuple[ValueCondition, ...]

    def under(self, *, network: bool, session: bool = False) -> tuple[ValueCondition, ...]:
        """The alternatives that hold under these grants; none of them means that the call is refused."""
        held = {name for name, granted in (("network", network), ("session", session)) if granted}
        return tuple(one for one in self.allow if one.when is None or held & set(one.when.split(" or ")))


# Marks the grants of a whole system's programs, which have sessions and terminals of their own.
SESSION_CALL: Final = "setsid"


class ArgumentRules(Struct, frozen=True):
    """The rules over arguments by call; a call that is not among ``rules`` has none.

    ``refused_on_host`` and ``rest_on_host`` are trusted-local's: alternatives that are refused although the call is
    allowed, and the calls of which all is refused that their rule does not allow.
    """

    version: int
    rules: Mapping[str, ArgumentRule]
    refused_on_host: Mapping[str, tuple[ValueCondition, ...]]
    rest_on_host: tuple[str, ...]

    def alternatives(self, call: str, *, network: bool, session: bool = False) -> tuple[ValueCondition, ...] | None:
        """The alternatives of ``call`` under these grants; None when it has no rule, empty when none holds.

        ``session``: the call that is its mark, ``SESSION_CALL``, is granted.
        """
        rule = self.rules.get(call)
        return None if rule is None else rule.under(network=network, session=session)


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


@dataclass(frozen=True, slots=True)
class WorkspaceFiles:
    """Patterns of a workspace's files, each with its reason. ``mask`` are shown empty, ``protect`` never applied.

    ``git_shared`` and ``git_own`` are the files of git that may change: of a repository, and of one checkout of it.
    """

    version: int
    mask: Mapping[str, str] = field(repr=False)
    protect: Mapping[str, str] = field(repr=False)
    git_shared: Mapping[str, str] = field(repr=False)
    git_own: Mapping[str, str] = field(repr=False)


class Preset(Struct, frozen=True):
    """The hosts of one service, and what it has."""

    reason: str
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Learning:
    """Knowledge for manifests that are learnt.

    ``sensitive`` paths are never proposed, ``units`` are directories that are taken as a whole. Each has a reason.
    """

    version: int
    sensitive: Mapping[str, str] = field(repr=False)
    units: Mapping[str, str] = field(repr=False)
    presets: Mapping[str, Preset] = field(repr=False)
