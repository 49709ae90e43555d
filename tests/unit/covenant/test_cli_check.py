"""``covenant manifest check``: a finding stands at its line and column, with what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from covenant.cli.main import cli
from policy import errors
from tests import signing_kit as kit

MANIFEST = kit.MANIFEST.decode()


def check(package: Path, manifest: str, *arguments: str) -> Result:
    package.mkdir(exist_ok=True)
    (package / "agent.toml").write_text(manifest)
    (package / "main.py").write_bytes(b"print('hi')\n")
    return CliRunner().invoke(cli, ["manifest", "check", str(package), *arguments])


# What the author wrote instead of what, the text at which the finding points, and the name that is suggested.
SLIPS = [
    ('network = "off"', 'netwrok = "off"', "netwrok", "network"),
    ("[sandbox]", "[sandbxo]", "sandbxo", "[sandbox]"),
    ('network = "off"', 'network = "of"', '"of"', "off"),
    ('runtime = "python3"', 'runtime = "pyhton3"', '"pyhton3"', "python3"),
    ('runtime = "python3"', 'runtime = "nodejs"', '"nodejs"', "node"),
    ('backend = "linux-gvisor"', 'backend = "linux-givsor"', '"linux-givsor"', "linux-gvisor"),
    ("[resources]", "[permissions.filesytem]\n[resources]", "filesytem", "filesystem"),
    ("[resources]", '[permissions.syscalls]\nprofile = "pythn3"\n[resources]', '"pythn3"', "python3"),
    ("[resources]", '[permissions.syscalls]\nallow = ["read",\n  "opennat"]\n[resources]', '"opennat"', "openat"),
    ("[resources]", '[permissions.skills]\nside_effects = ["read", "wirte"]\n[resources]', '"wirte"', "write"),
    ("[resources]", '[spawn]\non_parent_exit = "wind_down"\n[resources]', '"wind_down"', "wind-down"),
]


@pytest.mark.parametrize(("old", "new", "at", "meant"), SLIPS, ids=[s[2] for s in SLIPS])
def test_near_miss(tmp_path: Path, old: str, new: str, at: str, meant: str) -> None:
    assert MANIFEST.count(old) == 1
    document = MANIFEST.replace(old, new)
    error = check(tmp_path, document).exception
    assert isinstance(error, errors.ManifestError)
    assert f"did you mean `{meant}`?" in error.hint
    before = document[: document.index(at)]
    assert error.where == f"agent.toml:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def test_same_manifest_without_slip_is_acceptable(tmp_path: Path) -> None:
    assert check(tmp_path, MANIFEST).exit_code == 0


def test_first_line_counts_reasons_with_fixes(tmp_path: Path) -> None:
    document = MANIFEST.replace("[agent]\n", '[agent]\nrole = "raeder"\n')
    # --host none: this host's own lacks are no reasons.
    done = check(tmp_path, document.replace('"main.py"', '"absent.py"'), "--host", "none")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0].endswith("2 files, well formed; run refuses it on that host: 2 reasons")
    for reason, fix in (
        ("role `raeder` is not known (agent.toml:2) [rule_3_role]", "did you mean `reader`?"),
        ("entry `absent.py` is not a file of the package", "add it, or name another"),
    ):
        (note,) = (line for line in done.stderr.splitlines() if reason in line)
        assert note.startswith("note: run refuses this: ")
        assert f"{note}\n  fix: {fix}" in done.stderr
    fine = check(tmp_path, MANIFEST, "--host", "none")
    assert fine.stdout.splitlines()[0].endswith("2 files, the manifest is acceptable")


def test_path_refused_here_hides_no_rule(tmp_path: Path) -> None:
    read = '[permissions.filesystem]\nread = ["/etc/shadow"]\n[resources]'
    document = MANIFEST.replace("[agent]\n", '[agent]\nrole = "raeder"\n').replace("[resources]", read)
    done = check(tmp_path, document)
    assert "[never_grantable]" in done.stderr
    assert "[rule_3_role]" in done.stderr


def test_command_of_root_needs_no_file(tmp_path: Path) -> None:
    document = MANIFEST.replace('runtime = "python3"', 'runtime = "command"').replace('"main.py"', '"python3"')
    assert "is not a file" not in check(tmp_path, document, "--host", "none").stderr
    # Control: a relative path with a slash names a file of the package.
    relative = document.replace('"python3"', '"./absent"')
    assert "entry `./absent` is not a file" in check(tmp_path, relative, "--host", "none").stderr


def test_fault_of_grammar_has_its_column_too(tmp_path: Path) -> None:
    error = check(tmp_path, MANIFEST + "[lifetime]\nttl_seconds = off\n").exception
    assert isinstance(error, errors.ManifestSyntaxError)
    assert error.where == f"agent.toml:{MANIFEST.count(chr(10)) + 2}:15"
