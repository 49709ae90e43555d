"""Rule 1 across documents: what the manifest, the signed statement, the package and the host's tables say together.

Rules within the manifest alone are kept by the parser (policy.manifest.agent): no Manifest breaks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policy import errors
from policy.grants.syscalls import EXEC_CALL
from policy.manifest import text
from policy.rules import never
from policy.rules.case import Case

# The dotted key, the message and the hint.
Problem = tuple[str, str, str]


def check(case: Case) -> None:
    """Raise for the first constraint that is broken.

    Raises:
        errors.SchemaViolation: it is; NeverGrantableError for a path that no manifest is granted.
    """
    for constraint in _CONSTRAINTS:
        for grant, message, hint in constraint(case):
            raise errors.SchemaViolation(message, grant=grant, hint=hint, where=case.where(grant))
    _check_paths(case)


def _pins(case: Case) -> Iterator[Problem]:
    # A role means the ceiling that the signer saw, so its version is exact. The deny list only grows: this host must
    # know at least what the signer knew, and rule 7 holds the manifest to what this host knows.
    statement, role = case.statement, case.manifest.agent.role
    if statement is None:
        return
    mine, pinned = case.roles.version, statement.roles_version
    if pinned > mine or (role is not None and pinned != mine):
        message = f"the package was signed with roles version {pinned}, this host has {mine}"
        yield "agent.role", message, "sign the package again" if pinned < mine else "update covenant on this host"
    if statement.deny_version > case.deny.version:
        message = f"the package was signed with deny list version {statement.deny_version}, this host has"
        yield "permissions.syscalls", f"{message} {case.deny.version}", "update covenant on this host"


def _entry(case: Case) -> Iterator[Problem]:
    agent = case.manifest.agent
    of_package = agent.runtime != "command" or ("/" in agent.entry and not agent.entry.startswith("/"))
    of_package = of_package and agent.runtime != "hermes"
    package = case.trusted.package
    if of_package and agent.entry.removeprefix("./") not in package.files:
        file = package.file_at(agent.entry.removeprefix("./"))
        hint = "add it, or name another" if file is None else f"it is a link: write entry = {text.toml(file)}"
        yield "agent.entry", f"entry {text.quote(agent.entry)} is not a file of the package", hint


def _network(case: Case) -> Iterator[Problem]:
    if case.statement is not None and not case.manifest.wrote("resources.network"):
        hint = 'write network = "off", "outbound-https-only" or "full" below [resources]'
        yield "resources.network", "`resources.network` is missing", hint


def _unknown_sections(case: Case) -> Iterator[Problem]:
    statement, found = case.statement, case.manifest.unknown_sections
    if statement is not None and tuple(statement.unknown_sections) != found:
        odd = min(set(statement.unknown_sections) ^ set(found))
        yield (
            odd,
            f"unknown section {text.quote(odd)} is not as the signed statement lists it",
            "sign the package again",
        )


def _execve(case: Case) -> Iterator[Problem]:
    # The filter would be made without it (decisions.md), and a grant is never dropped in silence.
    allow = case.manifest.permissions.syscalls.allow
    if EXEC_CALL in allow and not case.manifest.permissions.executables.allow:
        message = f"system call `{EXEC_CALL}` is allowed while no executable is granted"
        yield f"permissions.syscalls.allow[{allow.index(EXEC_CALL)}]", message, "grant the program in executables.allow"


_CONSTRAINTS: tuple[Callable[[Case], Iterator[Problem]], ...] = (_pins, _entry, _network, _unknown_sections, _execve)


def _check_paths(case: Case) -> None:
    table = case.manifest.permissions
    paths = [(f"permissions.filesystem.write[{i}]", p, True) for i, p in table.filesystem.write_paths]
    paths += [(f"permissions.filesystem.read[{i}]", p, False) for i, p in enumerate(table.filesystem.read)]
    paths += [(f"permissions.executables.allow[{i}]", e.path, False) for i, e in table.executables.programs]
    given = enumerate(case.manifest.spawn.may_grant)
    paths += [(f"spawn.may_grant[{i}].read", one.read, False) for i, one in given if one.read]
    for grant, path, write in paths:
        error = never.refusal(path, case.never, case.extra_never, write=write)
        if error is not None:
            error.grant, error.where = grant, case.where(grant)
            raise error
