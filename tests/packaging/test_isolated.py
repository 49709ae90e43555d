"""The installed command does not take code from where its caller points."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("program", ["covenant", "covenant-supervisor", "covenantd"])
@pytest.mark.parametrize("variable", ["PYTHONPATH", "cwd"])
def test_planted_module_is_not_imported(
    clone: pathlib.Path, tmp_path: pathlib.Path, variable: str, program: str
) -> None:
    for name in ("click.py", "pydantic.py"):
        (tmp_path / name).write_text("raise SystemExit('planted code ran')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)} if variable == "PYTHONPATH" else dict(os.environ)
    command = [str(clone / ".venv" / "bin" / program), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    # The control: without isolation the same plant does run.
    control = [sys.executable, "-c", "import click"]
    done = subprocess.run(control, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "planted code ran" in done.stderr
