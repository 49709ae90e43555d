"""The workflow is valid, safe by zizmor's rules, pinned by digest, and runs what everybody runs."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

BIN = pathlib.Path(sys.executable).parent


def _workflows(clone: pathlib.Path) -> list[pathlib.Path]:
    found = sorted((clone / ".github/workflows").glob("*.y*ml"))
    assert found
    return found


def _action(clone: pathlib.Path) -> pathlib.Path:
    return clone / ".github/actions/covenant/action.yml"


def _zizmor(*paths: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "zizmor"), "--offline", "--no-progress", "--persona=pedantic", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _schema(*paths: pathlib.Path, of: str = "workflows") -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", f"vendor.github-{of}", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_zizmor_finds_nothing(clone: pathlib.Path) -> None:
    done = _zizmor(*_workflows(clone), _action(clone))
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflow_schema_holds(clone: pathlib.Path) -> None:
    done = _schema(*_workflows(clone))
    assert done.returncode == 0, done.stdout + done.stderr


def test_schema_of_actions_holds(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The control: an action of no known kind is found."""
    done = _schema(_action(clone), of="actions")
    assert done.returncode == 0, done.stdout + done.stderr
    bad = tmp_path / "action.yml"
    bad.write_text(_action(clone).read_text().replace("using: composite", "using: compost"))
    assert _schema(bad, of="actions").returncode != 0


def test_linters_see(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The control: an action by tag is found by zizmor, a misspelt key by the schema."""
    text = _workflows(clone)[0].read_text()
    bad = tmp_path / ".github/workflows/bad.yml"
    bad.parent.mkdir(parents=True)
    bad.write_text(re.sub(r"@[0-9a-f]{40}[^\n]*", "@v6", text))
    assert _zizmor(bad).returncode != 0
    bad.write_text(text.replace("runs-on:", "run-on:"))
    assert _schema(bad).returncode != 0


def test_no_permissions_and_only_digests(clone: pathlib.Path) -> None:
    for path in _workflows(clone):
        text = path.read_text()
        assert re.search(r"^permissions: \{\}$", text, re.MULTILINE), path
        for use in re.findall(r"uses:\s*(.*)", text):
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", use), use


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (".github/workflows/ci.yml", "make test"),
        ("Makefile", "./scripts/test"),
        ("Makefile", "./scripts/demo"),
        ("Makefile", "./scripts/vm"),
        (".ci/run", "./scripts/test"),
        (".ci/run", "./scripts/vm"),
    ],
)
def test_everybody_runs_same_scripts(clone: pathlib.Path, file: str, text: str) -> None:
    assert text in (clone / file).read_text()
