"""Names that a manifest takes from this program's tables: roles, profiles of system calls, system calls.

The tables stand above this floor (``policy.data``), so they are arguments. The rules refuse the same names at run;
``manifest check`` finds them here, all at once, with their place and what was probably meant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from policy import errors
from policy.manifest import report, text
from policy.manifest.agent import Manifest


def check(manifest: Manifest, *, profiles: Collection[str], syscalls: Collection[str]) -> None:
    """Refuse a profile or a system call that does not exist.

    Raises:
        errors.ManifestError, errors.UnknownSyscallError: with every such name; the latter if all are system calls.
    """
    found = [*_profile(manifest, profiles), *_calls(manifest, syscalls)]
    if found:
        only_calls = all(problem.path[-1] != "profile" for problem in found)
        raise report.error(found, manifest.source, errors.UnknownSyscallError if only_calls else errors.ManifestError)


def unknown_role(manifest: Manifest, roles: Collection[str]) -> str:
    """A note on a role that is not in the table, or nothing: the operator who runs it may have added it."""
    role = manifest.agent.role
    if role is None or role in roles:
        return ""
    return (
        f"role {text.quote(role)} is not one of this program's ({manifest.point('agent.role')}); {_hint(role, roles)}"
    )


def _profile(manifest: Manifest, profiles: Collection[str]) -> Iterator[report.Problem]:
    name = manifest.permissions.syscalls.profile
    if name is not None and name not in profiles:
        message = f"system call profile {text.quote(name)} is not known"
        yield report.Problem(("permissions", "syscalls", "profile"), message, _hint(name, profiles))


def _calls(manifest: Manifest, syscalls: Collection[str]) -> Iterator[report.Problem]:
    table = manifest.permissions.syscalls
    for key in ("allow", "deny"):
        for index, name in enumerate(getattr(table, key)):
            if name not in syscalls:
                near = text.nearest(name, tuple(sorted(syscalls)))
                hint = f"did you mean `{near}`?" if near else "names are those of the kernel's tables"
                message = f"system call {text.quote(name)} is not known"
                yield report.Problem(("permissions", "syscalls", key, index), message, hint)


def _hint(name: str, known: Collection[str]) -> str:
    near = text.nearest(name, tuple(sorted(known)))
    return f"did you mean `{near}`? known: {', '.join(sorted(known))}" if near else f"known: {', '.join(sorted(known))}"
