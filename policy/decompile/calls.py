"""The calls that a filter allows: for each name the arguments that pass, and the calls that do not exist.

The common language of the two readings, `read_bpf` here and `oci_seccomp.read`: two filters that mean the same give
values that are `equal`, however they are laid out. All that is not named is refused with EPERM. Comparing is exact
(policy.decompile.conditions), and what differs comes with the arguments of a call that shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from policy import errors
from policy.decompile import answers, bpf, conditions
from policy.decompile.conditions import ALWAYS, NEVER, Condition, Match

# SECCOMP_RET_ERRNO with EPERM and with ENOSYS, as the action of a program.
EPERM: Final = 0x00050001
ENOSYS: Final = 0x00050026
# AUDIT_ARCH_ of linux/audit.h: the tag in seccomp_data of a call made the way of that architecture.
TAGS: Final[Mapping[str, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_REFUSED: Final = frozenset({EPERM})
_MISSING: Final = frozenset({ENOSYS})
_UNDERSTOOD: Final = (frozenset({bpf.ALLOW}), frozenset({bpf.ALLOW, EPERM}))


class CallTable(Struct, frozen=True):
    """``allowed``: a call's name to the arguments that pass. ``missing``: the calls that answer ENOSYS.

    A name stands in one of the two at most, and in `allowed` only with a condition that some arguments meet.
    """

    allowed: Mapping[str, Condition] = msgspec.field(default_factory=dict)
    missing: frozenset[str] = frozenset()

    def condition(self, name: str) -> Condition:
        """The arguments that pass: `conditions.ALWAYS`, `conditions.NEVER` or between."""
        return self.allowed.get(name, NEVER)

    def is_subset(self, other: CallTable) -> bool:
        """Whether every call that passes here passes there. A refusal may be EPERM here and ENOSYS there."""
        return next(excess(self, other), None) is None

    def is_equal(self, other: CallTable) -> bool:
        """Whether every call is answered alike."""
        return next(differences(self, other), None) is None


class CallDifference(Struct, frozen=True):
    """A call that two filters answer differently: its name, its six arguments, and what each says."""

    name: str
    arguments: tuple[int, ...]
    here: str
    there: str

    def describe(self, here: str, there: str) -> str:
        """The difference in words; `here` and `there` name the two filters."""
        given = ", ".join(f"{argument:#x}" if argument else "0" for argument in self.arguments)
        return f"`{self.name}` with arguments ({given}) is {self.here} by {here} and {self.there} by {there}"


def expected(
    names: Collection[str],
    rules: Mapping[str, Sequence[Sequence[Match]]] | None = None,
    missing: Collection[str] = (),
) -> CallTable:
    """The calls of a grant: `names` pass, those with a rule only under it, and those of `missing` do not exist.

    Raises:
        errors.ArtefactError: a rule is none (`conditions.any_of`).
    """
    ruled = {name: conditions.any_of(rule) for name, rule in (rules or {}).items() if name in names}
    absent = frozenset(missing)
    allowed = {name: ruled.get(name, ALWAYS) for name in names if name not in absent}
    return CallTable({name: condition for name, condition in allowed.items() if condition}, absent)


def read_bpf(program: bytes, arch: str, names: Mapping[int, str]) -> CallTable:
    """Read the calls that a program allows, over every call of a machine of `arch`.

    Args:
        program: an array of struct sock_filter, as it is loaded.
        arch: ``x86_64`` or ``aarch64``.
        names: every number of `arch` that has a name.

    Raises:
        errors.ArtefactError: it cannot be read (`answers.answers`); it does not refuse with EPERM the calls of
            another architecture (32-bit entry has a tag of its own), the numbers that have no name (x32 among
            them) and all that it does not allow or answer with ENOSYS; or a call exists for some arguments only.
    """
    own = (TAGS[arch], TAGS[arch])
    allowed: dict[str, Condition] = {}
    missing: set[str] = set()
    for answer in answers.answers(program):
        rest = answer.rest
        if rest.actions == _REFUSED:
            continue
        if answer.tags != own:
            raise errors.ArtefactError(f"the filter does not refuse calls of architecture {_outside(own, answer)}")
        if rest.actions != _MISSING and rest.actions not in _UNDERSTOOD:
            raise errors.ArtefactError(f"the filter answers calls with {_actions(rest.actions)}")
        for name in _named(answer.numbers, names):
            if rest.actions == _MISSING:
                missing.add(name)
            elif rest.when:
                allowed[name] = rest.when
    return CallTable(allowed, frozenset(missing))


def _outside(own: tuple[int, int], answer: answers.FilterAnswer) -> str:
    first, last = answer.tags
    return f"{first if first != own[0] else last:#x}"


def _actions(actions: frozenset[int]) -> str:
    return " or ".join(f"{action:#x}" for action in sorted(actions))


def _named(numbers: bpf.Range, names: Mapping[int, str]) -> Iterator[str]:
    first, last = numbers
    # A span longer than the table holds a number without a name, found within that many steps.
    for number in range(first, min(last, first + len(names)) + 1):
        if number not in names:
            raise errors.ArtefactError(f"the filter does not refuse call {number}, which has no name")
        yield names[number]


def excess(inner: CallTable, outer: CallTable) -> Iterator[CallDifference]:
    """Every call, in the order of their names, that passes by `inner` and not by `outer`.

    Raises:
        errors.ArtefactError: as `conditions.beyond`.
    """
    for name in sorted(inner.allowed):
        yield from _beyond(name, inner, outer)


def differences(left: CallTable, right: CallTable) -> Iterator[CallDifference]:
    """Every call, in the order of their names, that the two answer differently, once or once for each direction.

    Raises:
        errors.ArtefactError: as `conditions.beyond`.
    """
    names = left.allowed.keys() | right.allowed.keys() | (left.missing ^ right.missing)
    for name in sorted(names):
        found = [*_beyond(name, left, right), *(_turned(d) for d in _beyond(name, right, left))]
        if not found and (name in left.missing) != (name in right.missing):
            found = [CallDifference(name, (0,) * conditions.ARGUMENTS, _refusal(left, name), _refusal(right, name))]
        yield from found


def _beyond(name: str, inner: CallTable, outer: CallTable) -> Iterator[CallDifference]:
    here, there = inner.condition(name), outer.condition(name)
    if here is not there and here != there and (witness := conditions.beyond(here, there)) is not None:
        yield CallDifference(name, witness, "allowed", _refusal(outer, name))


def _turned(difference: CallDifference) -> CallDifference:
    return CallDifference(difference.name, difference.arguments, difference.there, difference.here)


def _refusal(calls: CallTable, name: str) -> str:
    return "answered with ENOSYS" if name in calls.missing else "refused"
