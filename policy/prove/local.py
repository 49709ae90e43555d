"""Shows that the filter which trusted-local is about to load refuses what was decided, and lets all else pass. Pure.

Under linux-gvisor our own compiler writes the filter; here libseccomp makes it from a list of rules. Neither the list
nor libseccomp is believed: the program is read back (policy.decompile.answers) and compared, for every architecture
tag, every number and every value of the arguments, with what manifest and data say, taken anew:

(1) A call by another architecture's entry, and on x86_64 by x32's, is refused.
(2) The permanent deny list, the manifest's own, and what holds memory beyond every limit of a process are refused.
(3) clone3 does not exist, since its flags cannot be looked at (docs/adr/0006-what-the-filter-answers.md).
(4) Of the calls with a rule for the host (policy/data/arguments.toml) exactly what the rule says is refused.
(5) With network off, sockets are made of the unix family alone; else of the families, of their types and of the
    protocols that the table of argument rules names. Pairs are always of the unix family.
(6) Every other call passes. trusted-local denies by list; a filter that refuses more breaks agents in ways that no
    message explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from policy import data, errors
from policy.decompile import answers, bpf, calls, conditions
from policy.decompile.calls import EPERM
from policy.decompile.conditions import ALWAYS, NEVER, Condition
from policy.manifest.agent import Manifest

# x32 calls are numbers of the x86_64 tag with this bit set (__X32_SYSCALL_BIT of asm/unistd.h).
_X32: Final = 0x40000000
# No call has this number: a tracer writes it to skip one, and the kernel does nothing for it. libseccomp lets it pass.
_SKIPPED: Final = 0xFFFFFFFF

_UNBOUNDED: Final = frozenset({"msgget", "semget", "shmget"})
_MISSING: Final = frozenset({"clone3"})
_SOCKETS: Final = ("socket", "socketpair")
_AF_UNIX: Final = 1
_ALL_BITS: Final = 2**64 - 1

_PASSES: Final = frozenset({bpf.ALLOW})
_REFUSED: Final = frozenset({EPERM})
_ABSENT: Final = frozenset({calls.ENOSYS})


class RefusedCalls(Struct, frozen=True):
    """The calls that must be refused, by name. Any other call passes.

    ``only``: calls of which nothing passes but this; ``refused``: calls of which nothing is refused but this;
    ``missing``: calls that answer ENOSYS.
    """

    only: Mapping[str, Condition] = msgspec.field(default_factory=dict)
    refused: Mapping[str, Condition] = msgspec.field(default_factory=dict)
    missing: frozenset[str] = frozenset()


def demanded(manifest: Manifest) -> RefusedCalls:
    """Return the calls that the filter of this manifest has to refuse under trusted-local: (2) to (5)."""
    rules = data.arguments()
    only = {name: _condition(rules.rules[name].allow) for name in rules.rest_on_host}
    only |= dict.fromkeys(_SOCKETS, conditions.any_of([[(0, _ALL_BITS, _AF_UNIX)]]))
    if not (manifest.wrote("resources.network") and manifest.resources.network == "off"):
        only["socket"] = _sockets(rules.rules["socket"].under(network=True))
    denied = data.deny().names | _UNBOUNDED | frozenset(manifest.permissions.syscalls.deny)
    refused = {name: _condition(rows) for name, rows in rules.refused_on_host.items() if name not in denied}
    return RefusedCalls({**only, **dict.fromkeys(denied - _MISSING, NEVER)}, refused, _MISSING)


def _condition(alternatives: Iterable[data.ValueCondition]) -> Condition:
    return conditions.any_of([(c.argument, c.mask, c.value) for c in each.conditions] for each in alternatives)


def _sockets(allowed: Iterable[data.ValueCondition]) -> Condition:
    """Each type with the family that the table gives it, and each protocol of the table with any of these."""
    rows = [{c.argument: c for c in alternative.conditions} for alternative in allowed]
    protocols = {(2, row[2].mask, row[2].value) for row in rows if 2 in row}
    kinds = {((0, _ALL_BITS, row[0].value), (1, row[1].mask, row[1].value)) for row in rows}
    return conditions.any_of([*kind, protocol] for kind in sorted(kinds) for protocol in sorted(protocols))


def prove(program: bytes, demand: RefusedCalls, *, arch: str) -> None:
    """Hold a program to what it must refuse, for every call that can be made on a machine of `arch`.

    Args:
        program: an array of struct sock_filter, as it will be loaded.
        arch: ``x86_64`` or ``aarch64``.

    Raises:
        errors.ProofError: a call passes that must not, or is refused that must pass; the first one found.
        errors.ArtefactError: the program cannot be read.
    """
    own = calls.TAGS[arch]
    numbers = data.syscalls(arch).numbers
    held = {numbers[name]: name for name in {*demand.only, *demand.refused, *demand.missing} if name in numbers}
    for answer in answers.answers(program, EPERM):
        first, last = answer.numbers
        rest = answer.rest
        if answer.tags != (own, own):
            if rest.actions != _REFUSED:
                tag = next(tag for tag in answer.tags if tag != own)
                raise errors.ProofError(f"the filter does not refuse call {first} of architecture {tag:#x}")
            continue
        if arch == "x86_64" and last >= _X32 and answer.numbers != (_SKIPPED, _SKIPPED):
            if rest.actions != _REFUSED:
                raise errors.ProofError(f"the filter does not refuse call {max(first, _X32)} of x32")
            last = min(last, _X32 - 1)
        ruled = [number for number in held if first <= number <= last]
        if len(ruled) <= last - first and rest.actions != _PASSES:
            free = next(number for number in range(first, last + 1) if number not in held)
            named = next((f"`{name}`" for name, number in numbers.items() if number == free), f"call {free}")
            raise errors.ProofError(f"the filter does not let {named} pass, which nothing denies")
        for number in ruled:
            _hold(held[number], rest, demand)


def _hold(name: str, rest: answers.Rest, demand: RefusedCalls) -> None:
    """(2) to (5) for one call."""
    if name in demand.missing:
        if rest.actions != _ABSENT:
            raise errors.ProofError(f"the filter does not answer `{name}` with ENOSYS")
        return
    if not rest.actions <= _PASSES | _REFUSED:
        raise errors.ProofError(f"the filter answers `{name}` with neither yes nor EPERM")
    # Together all of a call, and in common nothing: then each of the two is what the other is not.
    if name in demand.only:
        passes = demand.only[name]
        gap = conditions.beyond(ALWAYS, conditions.either(passes, rest.when))
        common = _common(passes, rest.when)
    else:
        gap = conditions.beyond(demand.refused[name], rest.when)
        common = conditions.beyond(rest.when, demand.refused[name])
    if gap is not None:
        raise errors.ProofError(f"the filter does not refuse `{name}`{_shown(gap)}")
    if common is not None:
        raise errors.ProofError(f"the filter does not let `{name}`{_shown(common)} pass")


def _common(passes: Condition, refused: Condition) -> tuple[int, ...] | None:
    """Arguments that lie in both; one cube after the other, since the sockets of both are too many at once."""
    for cube in passes:
        if (found := conditions.beyond(conditions.both((cube,), refused), NEVER)) is not None:
            return found
    return None


def _shown(arguments: tuple[int, ...]) -> str:
    return f" with arguments ({', '.join(hex(argument) for argument in arguments)})"
