"""Rule 7: nothing permanently denied in the allow set, and no name that no kernel has."""

from __future__ import annotations

from policy import data, errors
from policy.manifest import text
from policy.rules.case import Case


def check(case: Case) -> None:
    """(7) Nothing denied in what is allowed, however it came there: by name, by profile, or by another grant.

    Raises:
        errors.UnknownSyscallError: a name is in no table.
        errors.DenyListViolation: a denied call is allowed.
    """
    table = case.manifest.permissions.syscalls
    known = data.syscall_names()
    for key in ("allow", "deny"):
        for i, name in enumerate(getattr(table, key)):
            grant = f"permissions.syscalls.{key}[{i}]"
            if key == "allow" and name in case.deny.reasons:
                _refuse_call(case, name, grant)
            if name not in known:
                near = text.nearest(name, tuple(sorted(known)))
                hint = f"did you mean `{near}`?" if near else "names are those of the kernel's tables"
                raise errors.UnknownSyscallError(
                    f"system call {text.quote(name)} is not known", hint=hint, where=case.where(grant)
                )
    calls = case.requested.syscalls
    for name in sorted((calls.names | calls.profile_names) & case.deny.names):
        _refuse_call(case, name, "permissions.syscalls.profile")


def _refuse_call(case: Case, name: str, grant: str) -> None:
    raise errors.DenyListViolation(
        f"system call `{name}` is permanently denied: {case.deny.reasons[name]}",
        grant=grant,
        hint="take it out: no manifest, role or parent can grant it",
        where=case.where(grant),
    )
