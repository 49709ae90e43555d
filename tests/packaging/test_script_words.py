"""The scripts of a clone do nothing for `--help`, and nothing for a word that they do not know."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernel.world import ROOT


@pytest.mark.parametrize("script", ["setup", "undo", "demo"])
@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("-h", 0), ("--hlep", 2), ("agents/hello", 2)])
def test_script_with_word_changes_nothing(tmp_path: Path, script: str, word: str, status: int) -> None:
    # A copy: a script that began after all would do its work there.
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [tmp_path / "scripts" / script, word], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("takes no words" in done.stderr) == (status == 2)
    assert bool(done.stdout) == (status == 0)
    assert sorted(tmp_path.rglob("*")) == before
