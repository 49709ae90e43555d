"""Loads a deny filter into the calling process, through libseccomp (pyseccomp).

For trusted-local alone: under gVisor the filter is the sandbox's (policy.compile.seccomp). `prepare` and `export` are
for the parent, where an error still has a place to go; `load` acts on the calling thread and cannot be undone, so it
is for a forked child with one thread.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from policy import errors

if TYPE_CHECKING:
    from policy.compile import seccomp

# What seccomp_syscall_resolve_name_arch(3) gives for a name that no architecture of this libseccomp has. Other
# negative numbers stand for calls that exist, but not here.
_UNKNOWN = -1


def prepare(description: seccomp.DenyFilter) -> Any:
    """A pyseccomp.SyscallFilter that holds `description` and is not loaded yet.

    Raises:
        errors.HostError: there is no libseccomp, this is another architecture, or libseccomp and our table of
            numbers disagree: one of them would deny another call than it says.
    """
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise errors.HostError("libseccomp is not usable on this host", hint="install libseccomp2") from error
    arch = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}[description.arch]
    if pyseccomp.system_arch() != arch:
        raise errors.HostError(f"the filter is for `{description.arch}`, this process is not")
    for name in description.absent:
        if pyseccomp.resolve_syscall(arch, name) >= 0:
            raise errors.HostError(f"libseccomp knows system call `{name}`, our table does not")
    result = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    try:
        # 32-bit entry and x32 have numbers of their own, which no rule here names. libseccomp takes x32 for
        # another architecture and sends both to this action; EPERM as for everything else that is refused.
        result.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.ERRNO(errno.EPERM))
        for rule in description.rules:
            _check_number(rule, pyseccomp.resolve_syscall(arch, rule.name))
            checks = [_argument(pyseccomp, check) for check in (rule.check, rule.also) if check is not None]
            result.add_rule_exactly(pyseccomp.ERRNO(rule.error), rule.number, *checks)
    except OSError as error:
        raise errors.HostError(f"libseccomp refused a rule: {error.strerror}") from error
    return result


def _check_number(rule: seccomp.DenyRule, resolved: int) -> None:
    # A libseccomp older than the call does not know its name; the number is enough.
    if resolved not in (rule.number, _UNKNOWN):
        raise errors.HostError(f"system call `{rule.name}` is {rule.number} in our table and {resolved} for libseccomp")


def _argument(pyseccomp: Any, check: seccomp.ArgumentCheck) -> Any:
    if check.operator == "masked ==":
        return pyseccomp.Arg(check.argument, pyseccomp.MASKED_EQ, check.mask, check.value)
    operator = {"==": pyseccomp.EQ, ">=": pyseccomp.GE}[check.operator]
    return pyseccomp.Arg(check.argument, operator, check.value)


def export(prepared: Any) -> bytes:
    """The BPF that `enter` will load from this `prepare`d filter: an array of struct sock_filter.

    libseccomp makes the program anew for each export and load, from the same rules in the same order
    (tests/kernel/test_seccomp_host.py reads it back from the kernel and compares).

    Raises:
        errors.HostError: libseccomp could not write it.
    """
    with open(os.memfd_create("seccomp", os.MFD_CLOEXEC), "w+b") as file:
        try:
            prepared.export_bpf(file)
        except OSError as error:
            raise errors.HostError(f"libseccomp cannot export the filter: {error.strerror}") from error
        file.seek(0)
        return file.read()


def load(description: seccomp.DenyFilter) -> None:
    """Bind the calling thread, and all that it starts, to `description`; sets no-new-privs first.

    Raises:
        errors.HostError: as `prepare`.
        errors.KernelError: the kernel refused the filter.
    """
    enter(prepare(description))


def enter(prepared: Any) -> None:
    """The second half of `load`: two system calls in a forked child.

    Raises:
        errors.KernelError: the kernel refused the filter.
    """
    try:
        prepared.load()
    except OSError as error:
        raise errors.KernelError(f"the kernel refused the filter: {error.strerror}") from error
