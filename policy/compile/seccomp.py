"""Granted system calls become a filter: OCI JSON for runsc, BPF for the kernel, a deny list for trusted-local.

What is not granted gets EPERM; nothing is killed. That holds for the wrong architecture and for x32 as well:
refused is refused, and a stray `int 0x80` in a probe must not look like a crash of the agent.

Some calls have an argument rule already, because without it a grant would be wider than it says:

* `clone` is granted without the flags that make namespaces. In a user namespace the caller would hold every
  capability.
* `clone3` keeps its flags behind a pointer, which no filter can follow, so it is on the deny list. libc falls
  back from clone3 to clone on ENOSYS only, and with EPERM no thread can be started. runsc ignores errnoRet, but
  SCMP_ACT_TRACE without a tracer is ENOSYS, in gVisor as in Linux (seccomp(2)), and a tracer cannot exist since
  ptrace is on the deny list (tests/kernel/test_seccomp.py holds both).

* `mknod` and `mknodat` are granted for fifos, sockets and files, not for device nodes.

Further argument rules (socket families, ioctl TIOCSTI, personality, prctl) have their place in `_GUARDED` and
`_denied_arguments`. runsc ORs two conditions on the same argument of one rule, so a rule never has two.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from policy import data, errors
from policy.compile import bpf

# linux/sched.h. CLONE_NEWTIME (0x80) lies in clone's exit signal and exists only for unshare and clone3.
NAMESPACE_FLAGS: Final = MappingProxyType(
    {
        "CLONE_NEWNS": 0x00020000,
        "CLONE_NEWCGROUP": 0x02000000,
        "CLONE_NEWUTS": 0x04000000,
        "CLONE_NEWIPC": 0x08000000,
        "CLONE_NEWUSER": 0x10000000,
        "CLONE_NEWPID": 0x20000000,
        "CLONE_NEWNET": 0x40000000,
    }
)
_NAMESPACE_MASK: Final = functools.reduce(int.__or__, NAMESPACE_FLAGS.values())

# Granted with a condition: name -> (argument, bits that must be clear).
# gVisor makes device nodes for a caller without CAP_MKNOD (agents/hostile, device_node_zero); S_IFCHR and S_IFBLK
# share this bit of the mode (linux/stat.h), which fifos, sockets and files have not.
_DEVICE_BIT: Final = 0x2000
_GUARDED: Final = MappingProxyType(
    {"clone": (0, _NAMESPACE_MASK), "mknod": (1, _DEVICE_BIT), "mknodat": (2, _DEVICE_BIT)}
)

_EPERM: Final = bpf.RET_ERRNO | errno.EPERM
_ENOSYS: Final = bpf.RET_ERRNO | errno.ENOSYS


@dataclass(frozen=True, slots=True)
class _Arch:
    oci: str
    audit: int  # linux/audit.h
    number_limit: int | None  # x32 calls carry bit 30 under the tag of x86_64


_ARCHES: Final = MappingProxyType(
    {
        "x86_64": _Arch("SCMP_ARCH_X86_64", 0xC000003E, 0x40000000),
        "aarch64": _Arch("SCMP_ARCH_AARCH64", 0xC00000B7, None),
    }
)


@dataclass(frozen=True, slots=True)
class SeccompArtefact:
    """One filter in two forms.

    `oci` is the value of linux.seccomp, `bpf` an array of struct sock_filter, `names` what is
    granted on `arch`, sorted.
    """

    arch: str
    names: tuple[str, ...]
    oci: dict[str, Any]
    bpf: bytes


def compile(names: Collection[str], *, arch: str) -> SeccompArtefact:
    """The filter that allows `names` and nothing else; the same bytes for any order of `names`.

    A name that only another architecture has is left out: there is no such call to refuse or to grant.

    Raises:
        errors.UnknownSyscallError: no supported architecture has a call of that name.
        errors.DenyListViolation: one of them is on the deny list.
        errors.HostError: there is no table for `arch`.
    """
    granted_names, program = _compile(frozenset(names), arch)
    # The JSON is made anew for each caller: a change to a cached one would reach every later run.
    return SeccompArtefact(arch, granted_names, _oci(granted_names, arch), program)


@functools.lru_cache(maxsize=256)
def _compile(names: frozenset[str], arch: str) -> tuple[tuple[str, ...], bytes]:
    numbers = _numbers(names, arch)
    # Rule 7 has refused them already; a filter must not be the place where one slips through.
    for name in sorted(names & data.deny().names):
        raise errors.DenyListViolation(f"system call `{name}` is permanently denied", grant=name)
    granted_names = tuple(sorted(name for name in names if name in numbers))
    return granted_names, _bpf(granted_names, arch)


def _numbers(names: Collection[str], arch: str) -> Mapping[str, int]:
    if arch not in _ARCHES:
        raise errors.HostError(f"no system call table for architecture `{arch}`")
    unknown = sorted(set(names) - data.syscall_names())
    if unknown:
        raise errors.UnknownSyscallError(
            f"unknown system call `{unknown[0]}`", hint="names are those of the kernel's tables, as strace prints them"
        )
    return data.syscalls(arch).numbers


def _oci(granted: tuple[str, ...], arch: str) -> dict[str, Any]:
    plain = [name for name in granted if name not in _GUARDED]
    rules: list[dict[str, Any]] = [{"names": plain, "action": "SCMP_ACT_ALLOW"}] if plain else []
    for name, (argument, mask) in sorted(_GUARDED.items()):
        if name in granted:
            # MASKED_EQ: value is the mask, valueTwo what must remain.
            check = {"index": argument, "value": mask, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
            rules.append({"names": [name], "action": "SCMP_ACT_ALLOW", "args": [check]})
    if "clone" in granted:
        rules.append({"names": ["clone3"], "action": "SCMP_ACT_TRACE"})
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": [_ARCHES[arch].oci],
        "syscalls": rules,
    }


def _bpf(granted: tuple[str, ...], arch: str) -> bytes:
    numbers = data.syscalls(arch).numbers
    by_number: dict[int, bpf.Decision] = {numbers[name]: bpf.Return(bpf.RET_ALLOW) for name in granted}
    for name, (argument, mask) in _GUARDED.items():
        if name in granted:
            by_number[numbers[name]] = bpf.IfAnyBit(argument, mask, hit=_EPERM, miss=bpf.RET_ALLOW)
    if "clone" in granted:
        by_number[numbers["clone3"]] = bpf.Return(_ENOSYS)
    return bpf.program(
        _segments(by_number), audit_arch=_ARCHES[arch].audit, other_arch=_EPERM, number_limit=_ARCHES[arch].number_limit
    )


def _segments(by_number: dict[int, bpf.Decision]) -> list[tuple[int, bpf.Decision]]:
    """Runs of equal decisions from 0 to the end of the number space; what is not listed is EPERM."""
    refuse = bpf.Return(_EPERM)
    segments: list[tuple[int, bpf.Decision]] = [(0, refuse)]
    for number in sorted(by_number):
        for start, decision in ((number, by_number[number]), (number + 1, refuse)):
            if segments[-1][0] == start:
                segments.pop()
            if not segments or segments[-1][1] != decision:
                segments.append((start, decision))
    return segments


# --- trusted-local: everything is allowed but what is listed ----------------------------------------


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """One comparison on all 64 bits of an argument; a masked one keeps the bits of `mask` first."""

    argument: int
    operator: Literal["==", ">=", "masked =="]
    value: int
    mask: int = 0


@dataclass(frozen=True, slots=True)
class DenyRule:
    """Refuse a call with `error`, always or when `check` holds. Rules of one name are ORed."""

    name: str
    number: int
    error: int
    check: ArgumentCheck | None = None


@dataclass(frozen=True, slots=True)
class DenyFilter:
    """What sandbox.kernel.seccomp_loader loads into a trusted-local child: default allow, these rules refused.

    `absent` are the denied names that `arch` does not have; the loader checks that libseccomp agrees.
    """

    arch: str
    rules: tuple[DenyRule, ...]
    absent: tuple[str, ...]


def compile_denylist(
    denied: Collection[str], *, arch: str, deny_socket_families_except: Collection[int] | None
) -> DenyFilter:
    """The filter of a process on the host's own kernel: all of `denied`, namespaces by clone, socket families.

    Args:
        denied: names of the deny list. Names that no supported architecture has are recorded as absent: the list
            also names calls of 32-bit kernels.
        deny_socket_families_except: families that socket and socketpair may still have; None leaves them free.

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
        DenyRule(name, numbers[name], errno.EPERM, check)
        for name, checks in _denied_arguments(deny_socket_families_except)
        if name not in named
        for check in checks
    ]
    return DenyFilter(arch, tuple(rules), tuple(sorted(set(denied) - set(numbers))))


def _denied_arguments(families: Collection[int] | None) -> list[tuple[str, list[ArgumentCheck | None]]]:
    namespaces: list[ArgumentCheck | None] = [
        ArgumentCheck(0, "masked ==", flag, mask=flag) for flag in sorted(NAMESPACE_FLAGS.values())
    ]
    rules = [("clone", namespaces)]
    if families is not None:
        rules += [("socket", _families_except(families)), ("socketpair", _families_except(families))]
    return rules


def _families_except(families: Collection[int]) -> list[ArgumentCheck | None]:
    """Every family but these. The last check is open upwards, so set upper bits of the argument are refused too."""
    if not families:
        return [None]
    top = max(families) + 1
    checks: list[ArgumentCheck | None] = [
        ArgumentCheck(0, "==", family) for family in range(top) if family not in families
    ]
    return [*checks, ArgumentCheck(0, ">=", top)]
