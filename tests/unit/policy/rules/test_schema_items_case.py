"""Where the entry must be a file of the package, what a waiting sandbox cannot have, and cases that do not change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.package import Package
from policy.rules import enforceable, items, schema
from policy.rules.case import Case, Claimant, Owner, Unsigned
from tests import rules_kit as kit

COMMAND = ('runtime = "python3"', 'runtime = "command"')


def entered(entry: str, *, command: bool) -> Case:
    changes = [('entry = "main.py"', f'entry = "{entry}"')]
    if command:
        changes += [COMMAND, ('\n[permissions.syscalls]\nprofile = "python3"\n', "")]
    return kit.case(kit.text(*changes), files={"agent.toml": b"", "main.py": b"", "bin/tool": b"", "tool": b""})


def is_missing(made: Case) -> bool:
    try:
        schema.check(made)
    except errors.SchemaViolation as e:
        return "is not a file of the package" in str(e)
    return False


@pytest.mark.parametrize(
    ("entry", "command", "missing"),
    [
        ("main.py", False, False),
        ("other.py", False, True),
        ("bin/tool", True, False),
        ("bin/other", True, True),
        ("./tool", True, False),
        ("./other", True, True),
        ("tool", True, False),
        ("sh", True, False),
        ("/usr/bin/sh", True, False),
        ("/bin/tool", True, False),
    ],
)
def test_entry_is_a_file_of_the_package(entry: str, command: bool, missing: bool) -> None:
    """A command may be a name on PATH, or a path of the root: neither is looked for in the package."""
    assert is_missing(entered(entry, command=command)) == missing


@pytest.mark.parametrize(
    ("standby", "grants", "files", "refused"),
    [(1, True, True, True), (0, True, True, False), (1, False, True, False), (1, True, False, False)],
)
def test_standby_has_no_files_of_secrets(standby: int, grants: bool, files: bool, refused: bool) -> None:
    granted = '["db"]' if grants else "[]"
    table = f"\n[permissions.credentials]\ngrants = {granted}\nfiles = {str(files).lower()}\n"
    mode = f'filesystem = "ephemeral"\nstandby = {standby}'
    made = kit.manifest(('filesystem = "read-only-package"', mode), more=table)
    found = [one.details["grant"] for one in enforceable.findings(made, kit.HOST)]
    assert ("sandbox.standby" in found) == refused


def test_values_of_a_case_do_not_change() -> None:
    for value in (Unsigned(Package({"agent.toml": b""}), True), Owner("a", "b"), Claimant(1, frozenset(), frozenset())):
        with pytest.raises(AttributeError):
            setattr(value, value.__struct_fields__[0], None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kit.case().now_ms = 1  # type: ignore[misc]


def test_each_call_of_the_profile_has_an_item() -> None:
    made = kit.case(kit.text(('profile = "python3"\n', 'profile = "python3"\nallow = ["reboot"]\n')))
    found: dict[str, Any] = dict(items.of_domain("syscalls", made.manifest, made.requested))
    assert found["permissions.syscalls.allow[0]"].names == frozenset({"reboot"})
    rest = found["permissions.syscalls.profile"].names
    assert "read" in rest
    assert "reboot" not in rest


def test_disk_of_host_counts_for_written_paths() -> None:
    writes = kit.text(('filesystem = "read-only-package"', 'filesystem = "host"'), ('read = ["/srv', 'write = ["/srv'))
    for free, refuses in ((16, False), (15, True)):
        host = structs.replace(kit.HOST, disk_free_mb=free)
        assert (6 in kit.refusals(kit.case(writes, host=host))) == refuses
        assert 6 not in kit.refusals(kit.case(host=host))


def test_older_package_without_serial_is_another() -> None:
    """Without a claimant no serial is compared: rule 8 refuses as it did before serials."""
    old = Owner("agents/old", "aa" * 32, serial=5)
    for claimant in (None, Claimant(6, frozenset({"k"}), frozenset({"k"}))):
        made = kit.case(identities={"hello": (old,)}, package_name="agents/hello", claimant=claimant)
        refused = kit.refusals(made)
        assert set(refused) == (set() if claimant else {8})
        if not claimant:
            assert isinstance(refused[8], errors.IdentityViolation)
