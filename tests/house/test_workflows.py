"""The workflow is valid, safe by zizmor's rules, pinned by digest, and runs what everybody runs."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

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


# --- the steps as a shell runs them

# What a hosted runner has and a machine of ours may lack.
_HOSTED = {"gh"}
_BUILTINS = {"umask", "test", "printf"}
_BETWEEN = re.compile(r"&&|\|\||[|;\n]|[<$]\(")


def _steps(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    document = YAML(typ="safe").load(path)
    for job in document.get("jobs", {"action": document.get("runs")}).values():
        yield from (step for step in job["steps"] if "run" in step)


def _commands(script: str) -> Iterator[str]:
    """The program of each command; `sudo` and `env` give theirs as well."""
    for part in _BETWEEN.split(script):
        for word in part.replace('"', "").split():
            if word in ("sudo", "env"):
                yield word
            elif not word.startswith("-") and not re.fullmatch(r"\w+=.*", word):
                yield word
                break


def test_every_command_of_steps_exists(clone: pathlib.Path) -> None:
    seen = set()
    for path in [*_workflows(clone), _action(clone)]:
        for step in _steps(path):
            assert "${{" not in step["run"], path
            said = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True)
            assert said.returncode == 0, said.stderr
            for command in _commands(step["run"]):
                seen.add(command)
                if "/" in command:
                    program = clone / command.replace("$GITHUB_ACTION_PATH", str(_action(clone).parent))
                    assert program.is_file(), command
                    assert os.access(program, os.X_OK), command
                else:
                    known = {*_HOSTED, *_BUILTINS, "sudo"}
                    assert command in known or shutil.which(command), (path, command)
    # The control: what the workflows are known to call was found in them.
    assert {"make", "gh", "apt-get", "./scripts/package_on_debian", "ssh-keygen", "$GITHUB_ACTION_PATH/check"} <= seen


class _Runner:
    """The steps of a job of release.yml, each by bash as on a hosted runner; `sudo`, `gh` and long builds replaced."""

    def __init__(self, clone: pathlib.Path, base: pathlib.Path) -> None:
        self.base, self.tree = base, base / "tree"
        (self.tree / "scripts").mkdir(parents=True)
        (base / "bin").mkdir()
        self.steps = list(_steps(clone / ".github/workflows/release.yml"))
        shutil.copy(clone / "pyproject.toml", self.tree)
        make = 'mkdir -p "$1"; echo package >"$1/x.deb"; cd "$1"; sha256sum x.deb >SHA256SUMS'
        self._program(self.tree / "scripts/package_on_debian", make)
        self._program(base / "bin/sudo", '"$@"')
        self._program(base / "bin/apt-get", "true")
        self._program(base / "bin/gh", 'printf "%s\\n" "$@" >"$RUNNER_TEMP/gh"')

    def _program(self, path: pathlib.Path, text: str) -> None:
        path.write_text(f"#!/bin/bash\nset -e\n{text}\n")
        path.chmod(0o755)

    def run(self, number: int, **given: str) -> int:
        path = f"{self.base / 'bin'}:{os.environ['PATH']}"
        own = {"PATH": path, "RUNNER_TEMP": str(self.base), "GITHUB_OUTPUT": str(self.base / "output"), **given}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", self.steps[number]["run"]]
        assert set(self.steps[number].get("env", {})) <= set(own)
        return subprocess.run(command, cwd=self.tree, env=own, capture_output=True, timeout=60).returncode


def test_release_steps_make_signed_draft(clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    version = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["version"]
    tag, runner = f"v{version}", _Runner(clone, tmp_path)
    changes = runner.tree / "CHANGELOG.md"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "own")], check=True)
    # The first machine.
    assert [runner.run(n) for n in range(3)] == [0, 0, 0]
    sums = (tmp_path / "output").read_text().removeprefix("sums<<END\n").removesuffix("\nEND\n")
    # The second: the tag, the build, the comparison.
    changes.write_text("# Changelog\n\n## Unreleased\n")
    assert runner.run(3, TAG=tag) == 1
    changes.write_text(f"# Changelog\n\n## {version}\n")
    assert [runner.run(3, TAG="v9.9.9"), runner.run(3, TAG=tag)] == [1, 0]
    assert [runner.run(4), runner.run(5)] == [0, 0]
    assert [runner.run(6, SUMS=f"{sums}x"), runner.run(6, SUMS=sums)] == [1, 0]
    assert runner.run(7, KEY=(tmp_path / "own").read_text().strip()) == 0
    assert not (tmp_path / "key").exists()
    assert runner.run(8, GH_TOKEN="t", TAG=tag) == 0
    said = (tmp_path / "gh").read_text().split("\n")
    assert {"create", tag, "--draft", "dist/x.deb", "dist/SHA256SUMS", "dist/SHA256SUMS.sig"} <= set(said)
    # docs/install.md: the signature of what was drafted.
    (tmp_path / "allowed").write_text(f"covenant {(tmp_path / 'own.pub').read_text()}")
    dist = runner.tree / "dist"
    words = ["-f", str(tmp_path / "allowed"), "-I", "covenant", "-n", "covenant-release", "-s", "SHA256SUMS.sig"]
    with (dist / "SHA256SUMS").open("rb") as file:
        subprocess.run(["ssh-keygen", "-Y", "verify", *words], stdin=file, cwd=dist, check=True, capture_output=True)
