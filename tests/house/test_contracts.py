"""The arrows of docs and design: import-linter's contracts hold, and each of them can break."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOMS = ("policy", "sandbox", "covenant")


def _lint(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [str(pathlib.Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    # The folder comes before the editable install, so that a copy is linted and not the clone.
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def _broken(output: str) -> set[str]:
    return set(re.findall(r"^(\S.*?) BROKEN\b", output, re.MULTILINE))


def test_contracts_hold(clone: pathlib.Path) -> None:
    done = _lint(clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r" KEPT\b", done.stdout, re.MULTILINE)) == 9


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("policy/errors/base.py", "import covenant", "three rooms"),
        ("policy/host.py", "import sandbox.shim.stdio", "three rooms"),
        ("sandbox/shim/stdio.py", "import covenant.cli.common", "three rooms"),
        ("policy/host.py", "import socket", "policy is pure"),
        ("policy/rules/__init__.py", "from os import path", "policy is pure"),
        ("policy/data/__init__.py", "import pathlib", "policy is pure"),
        ("policy/host.py", "import importlib.resources", "policy is pure"),
        ("covenant/cli/common.py", "from sandbox.kernel import libc", "covenant never reaches"),
        ("policy/grants/__init__.py", "import policy.compile", "the floors of policy"),
        ("policy/compile/__init__.py", "import policy.rules", "the floors of policy"),
        ("sandbox/kernel/libc.py", "import sandbox.shim.stdio", "the floors of sandbox"),
        ("policy/newcomer.py", "", "the floors of policy"),
        ("covenant/wire/frames.py", "import covenant.handlers.server", "the floors of covenant"),
        ("covenant/stores/journal.py", "import covenant.handlers.server", "the floors of covenant"),
        ("covenant/handlers/server.py", "import covenant.adapters.ipc.gateway", "the floors of covenant"),
        ("covenant/daemon.py", "import covenant.cli.common", "the floors of covenant"),
        ("covenant/newcomer.py", "", "the floors of covenant"),
        ("covenant/adapters/ipc/gateway.py", "import covenant.stores.journal", "adapters know"),
        ("covenant/cli/common.py", "import covenant.handlers.server", "the command line knows"),
    ],
)
def test_wrong_arrow_breaks_its_contract(
    clone: pathlib.Path, tmp_path: pathlib.Path, file: str, line: str, contract: str
) -> None:
    for room in ROOMS:
        shutil.copytree(clone / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(clone / "pyproject.toml", tmp_path)
    target = tmp_path / file
    before = target.read_text() if target.exists() else '"""New."""\n'
    target.write_text(before + f"\n{line}\n")
    done = _lint(tmp_path)
    assert done.returncode != 0, done.stdout
    assert any(name.startswith(contract) for name in _broken(done.stdout)), done.stdout + done.stderr
