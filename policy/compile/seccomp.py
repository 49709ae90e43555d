"""Granted system calls become a filter: OCI JSON for runsc, BPF for the kernel, a deny list for trusted-local.

What is not granted gets EPERM; nothing is killed. That holds for the wrong architecture and for x32 as well:
refused is refused, and a stray `int 0x80` in a probe must not look like a crash of the agent.

Over the arguments of some calls there are rules (policy/data/arguments.toml, docs/adr/0018-argument-rules.md),
because without them a grant would be wider than it says. A rule is a list of alternatives: each becomes one entry of
the JSON, and one path of the BPF. runsc ORs two conditions on the same argument of one entry, so an alternative never
has two.

`clone3` keeps its flags behind a pointer, which no filter can follow, so it is on the deny list. libc falls back from
clone3 to clone on ENOSYS only, and with EPERM no thread can be started. runsc ignores errnoRet, but SCMP_ACT_TRACE
without a tracer is ENOSYS, in gVisor as in Linux (seccomp(2)), and a tracer cannot exist since ptrace is on the deny
list (tests/kernel/test_seccomp.py holds both).
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

from msgspec import Struct

from policy import data, errors
from policy.compile import bpf
from policy.data.types import SESSION_CALL

_ALL_BITS: Final = 2**64 - 1
_EPERM: Final = bpf.RET_ERRNO | errno.EPERM
_REFUSED: Final = bpf.Return(_EPERM)
_ENOSYS: Final = bpf.RET_ERRNO | errno.ENOSYS


class _Arch(Struct, frozen=True):
    oci: str
    audit: int  # linux/audit.h
    number_limit: int | None  # x32 calls carry bit 30 under the tag of x86_64


_ARCHES: Final = MappingProxyType(
    {
        "x86_64": _Arch("SCMP_ARCH_X86_64", 0xC000003E, 0x40000000),
        "aarch64": _Arch("SCMP_ARCH_AARCH64", 0xC00000B7, None),
    }
)


class SeccompArtefact(Struct, frozen=True):
    """One filter in two forms.

    `oci` is the value of linux.seccomp, `bpf` an array of struct sock_filter, `names` what is
    granted on `arch`, sorted.
    """

    arch: str
    names: tuple[str, ...]
    oci: dict[str, Any]
    bpf: bytes


def compile(names: Collection[str], *, arch: str, network: bool = False) -> SeccompArtefact:
    """The filter that allows `names` and nothing else; the same bytes for any order of `names`.

    A name that only another architecture has is left out: there is no such call to refuse or to grant. `network`
    says whether `resources.network` is not off, on which some alternatives of the argument rules hang.

    Raises:
        errors.UnknownSyscallError: no supported architecture has a call of that name.
        errors.DenyListViolation: one of them is on the deny list.
        errors.HostError: there is no table for `arch`.
    """
    granted_names, program = compile_rules(frozenset(names), arch, network)
    # The JSON is made anew for each caller: a change to a cached one would reach every later run.
    return SeccompArtefact(arch, granted_names, _oci(granted_names, arch, network), program)


@functools.lru_cache(maxsize=256)
def compile_rules(names: frozenset[str], arch: str, network: bool) -> tuple[tuple[str, ...], bytes]:
    """Return the granted calls that this architecture has, and their filter.

    Raises:
        errors.DenyListViolation: a granted call is permanently denied.
    """
    numbers = _numbers(names, arch)
    # Rule 7 has refused them already; a filter must not be the place where one slips through.
    for name in sorted(names & data.deny().names):
        raise errors.DenyListViolation(f"system call `{name}` is permanently denied", grant=name)
    granted_names = tuple(sorted(name for name in names if name in numbers))
    return granted_names, _bpf(granted_names, arch, network)


def compile_own(names: Collection[str], *, arch: str, where: Mapping[str, Sequence[tuple[bpf.Masked, ...]]]) -> bytes:
    """The BPF of a process of ours that serves an agent: `names` as in `compile`, with a network.

    A call of `where` is allowed only when all tests of one of its alternatives hold.

    Raises:
        As `compile`.
    """
    granted_names, _ = compile_rules(frozenset(names), arch, True)
    return _bpf(granted_names, arch, True, where)


def compile_without(
    names: Collection[str],
    *,
    arch: str,
    where: Mapping[str, Sequence[tuple[bpf.Masked, ...]]] = MappingProxyType({}),
    error: int = errno.EPERM,
) -> bytes:
    """The BPF of a process of ours that starts others: everything but `names`, of which `arch` may lack some.

    These are answered with `error`; ENOSYS is what a kernel says that has no such call. A call of `where` is allowed
    only when all tests of one of its alternatives hold.

    Raises:
        errors.HostError: there is no table for `arch`.
    """
    numbers, allow = _numbers((), arch), bpf.Return(bpf.RET_ALLOW)
    by_number: dict[int, bpf.Decision] = {
        numbers[name]: bpf.Return(bpf.RET_ERRNO | error) for name in names if name in numbers
    }
    for name, alternatives in where.items():
        by_number[numbers[name]] = bpf.IfAny(tuple(alternatives), hit=bpf.RET_ALLOW, miss=_EPERM)
    return bpf.program(
        _segments(by_number, rest=allow),
        audit_arch=_ARCHES[arch].audit,
        other_arch=_EPERM,
        number_limit=_ARCHES[arch].number_limit,
    )


def _numbers(names: Collection[str], arch: str) -> Mapping[str, int]:
    if arch not in _ARCHES:
        raise errors.HostError(f"no system call table for architecture `{arch}`")
    unknown = sorted(set(names) - data.syscall_names())
    if unknown:
        raise errors.UnknownSyscallError(
            f"unknown system call `{unknown[0]}`", hint="names are those of the kernel's tables, as strace prints them"
        )
    return data.syscalls(arch).numbers


def _oci(granted: tuple[str, ...], arch: str, network: bool) -> dict[str, Any]:
    ruled = data.arguments().rules
    plain = [name for name in granted if name not in ruled]
    rules: list[dict[str, Any]] = [{"names": plain, "action": "SCMP_ACT_ALLOW"}] if plain else []
    for name in granted:
        if name in ruled:
            rules += [
                {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [_oci_check(c) for c in alternative.conditions]}
                for alternative in ruled[name].under(network=network, session=SESSION_CALL in granted)
            ]
    if "clone" in granted:
        rules.append({"names": ["clone3"], "action": "SCMP_ACT_TRACE"})
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": [_ARCHES[arch].oci],
        "syscalls": rules,
    }


def _oci_check(condition: data.Condition) -> dict[str, Any]:
    if condition.mask == _ALL_BITS:
        return {"index": condition.argument, "value": condition.value, "op": "SCMP_CMP_EQ"}
    # MASKED_EQ: value is the mask, valueTwo what must remain.
    return {
        "index": condition.argument,
        "value": condition.mask,
        "valueTwo": condition.value,
        "op": "SCMP_CMP_MASKED_EQ",
    }


def _bpf(
    granted: tuple[str, ...],
    arch: str,
    network: bool,
    where: Mapping[str, Sequence[tuple[bpf.Masked, ...]]] = MappingProxyType({}),
) -> bytes:
    numbers, ruled = data.syscalls(arch).numbers, data.arguments().rules
    allow = bpf.Return(bpf.RET_ALLOW)
    by_number: dict[int, bpf.Decision] = {numbers[name]: allow for name in granted}
    for name in ruled:
        if name in granted:
            by_number[numbers[name]] = _any_of(ruled[name].under(network=network, session=SESSION_CALL in granted))
    for name in granted:
        if name in where:
            by_number[numbers[name]] = bpf.IfAny(tuple(where[name]), hit=bpf.RET_ALLOW, miss=_EPERM)
    if "clone" in granted:
        by_number[numbers["clone3"]] = bpf.Return(_ENOSYS)
    return bpf.program(
        _segments(by_number), audit_arch=_ARCHES[arch].audit, other_arch=_EPERM, number_limit=_ARCHES[arch].number_limit
    )


@functools.lru_cache(maxsize=64)
def _any_of(alternatives: tuple[data.ValueCondition, ...]) -> bpf.Decision:
    masked = (tuple(bpf.Masked(c.argument, c.mask, c.value) for c in a.conditions) for a in alternatives)
    return bpf.IfAny(tuple(masked), hit=bpf.RET_ALLOW, miss=_EPERM)


def _segments(by_number: dict[int, bpf.Decision], rest: bpf.Decision = _REFUSED) -> list[tuple[int, bpf.Decision]]:
    """Runs of equal decisions from 0 to the end of the number space; what is not listed is `rest`."""
    segments: list[tuple[int, bpf.Decision]] = [(0, rest)]
    for number in sorted(by_number):
        for start, decision in ((number, by_number[number]), (number + 1, rest)):
            if segments[-1][0] == start:
                segments.pop()
            if not segments or segments[-1][1] != decision:
                segments.append((start, decision))
    return segments


# --- trusted-local: everything is allowed but what is listed ----------------------------------------


class ArgumentCheck(Struct, frozen=True):
    """One comparison on all 64 bits of an argument; a masked one keeps the bits of `mask` first."""

    argument: int
    operator: Literal["==", ">=", "masked =="]
    value: int
    mask: int = 0


class DenyRule(Struct, frozen=True):
    """Refuse a call with `error`, always or when `check` holds. Rules of one name are ORed.

    With `also`, a check of another argument, both have to hold.
    """

    name: str
    number: int
    error: int
    check: ArgumentCheck | None = None
    also: ArgumentCheck | None = None


class DenyFilter(Struct, frozen=True):
    """The filter that sandbox.kernel.seccomp.load loads into a trusted-local child: default allow, these rules refused.

    `absent` are the denied names that `arch` does not have; the loader checks that libseccomp agrees.
    """

    arch: str
    rules: tuple[DenyRule, ...]
    absent: tuple[str, ...]


def compile_denylist(denied: Collection[str], *, arch: str, network: bool) -> DenyFilter:
    """The filter of a process on the host's own kernel: `denied`, what arguments.toml refuses there, and sockets.

    Args:
        denied: names of the deny list. Names that no supported architecture has are recorded as absent: the list
            also names calls of 32-bit kernels.
        network: allow TCP and UDP sockets beside unix sockets (docs/adr/0063-sockets-of-trusted-local.md).

    Raises:
        errors.HostError: there is no table for `arch`.
    """
    numbers = _numbers((), arch)
    rules = [
        # ENOSYS for clone3 alone: with EPERM libc does not fall back to clone and no thread starts.
        DenyRule(name, numbers[name], errno.ENOSYS if name == "clone3" else errno.EPERM)
        for name in sorted(set(denied))
        if name in numbers
    ]
    named = {rule.name for rule in rules}
    rules += [
        DenyRule(name, numbers[name], errno.EPERM, *checks)
        for name, rows in [*_denied_arguments(), *_denied_sockets(network)]
        if name in numbers and name not in named
        for checks in rows
    ]
    return DenyFilter(arch, tuple(rules), tuple(sorted(set(denied) - set(numbers))))


# One row is one rule: its checks are on different arguments, and all hold.
_Rows = list[tuple[ArgumentCheck, ...]]


def _denied_arguments() -> list[tuple[str, _Rows]]:
    rules = data.arguments()
    refused: list[tuple[str, _Rows]] = []
    for call, alternatives in rules.refused_on_host.items():
        conditions = (condition for alternative in alternatives for condition in alternative.conditions)
        refused.append((call, [(_masked(c.argument, c.value, c.mask),) for c in conditions]))
    for call in rules.rest_on_host:
        allowed = [condition for alternative in rules.rules[call].allow for condition in alternative.conditions]
        refused.append((call, [(check,) for check in _all_but(allowed)]))
    return refused


def _denied_sockets(network: bool) -> list[tuple[str, _Rows]]:
    """Refuse sockets that the table of argument rules never allows; pairs of the unix family alone.

    Without a network the family decides. With one, a family, a type, a protocol, and a type of a family are each
    refused where no alternative of the table has them.
    """
    unix = data.arguments().rules["socket"].under(network=False)
    unix_family = {alternative.conditions[0].value for alternative in unix}
    pairs: _Rows = [(check,) for check in _families_except(unix_family)]
    if not network:
        return [("socket", pairs), ("socketpair", pairs)]
    allowed = [alternative.conditions for alternative in data.arguments().rules["socket"].under(network=True)]
    families = {family.value for family, *_ in allowed}
    types = {kind for _, kind, *_ in allowed}
    protocols = {protocol for _, _, *rest in allowed for protocol in rest}
    typed = {(family.value, kind) for family, kind, *_ in allowed}
    rows: _Rows = [(check,) for check in _families_except(families)]
    rows += [(check,) for named in (types, protocols) for check in _all_but(sorted(named, key=lambda c: c.value))]
    rows += [
        (ArgumentCheck(0, "==", family), _masked(kind.argument, kind.value, kind.mask))
        for family in sorted(families)
        for kind in sorted(types, key=lambda c: c.value)
        if (family, kind) not in typed
    ]
    return [("socket", rows), ("socketpair", pairs)]


def _masked(argument: int, value: int, mask: int) -> ArgumentCheck:
    return ArgumentCheck(argument, "masked ==", value, mask=mask)


def _all_but(allowed: Sequence[data.Condition]) -> list[ArgumentCheck]:
    """Checks of which one holds exactly when no condition of `allowed` does.

    The conditions are one, or several values of the same argument and mask (policy.data.argument_table sees to it).
    A value that is not allowed leaves the allowed ones at some bit of the mask: above it, it is as one of them, and
    with it as none. So there is one check for each such prefix, as in the complement of a list of network prefixes.
    """
    argument, mask = allowed[0].argument, allowed[0].mask
    bits = [1 << at for at in reversed(range(64)) if mask >> at & 1]
    checks: list[ArgumentCheck] = []
    above = 0
    for bit in bits:
        seen = above | bit
        taken = {condition.value & seen for condition in allowed}
        checks += [_masked(argument, value, seen) for value in sorted({value ^ bit for value in taken} - taken)]
        above = seen
    return checks


def _families_except(families: Collection[int]) -> list[ArgumentCheck]:
    """Every family but these. The last check is open upwards, so set upper bits of the argument are refused too."""
    top = max(families) + 1
    checks = [ArgumentCheck(0, "==", family) for family in range(top) if family not in families]
    return [*checks, ArgumentCheck(0, ">=", top)]
