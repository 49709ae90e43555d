"""Two weeks of the simulated year (docs/year.md), so that ``make year`` works when it is wanted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kernel.world import ROOT


def test_two_weeks_leave_nothing_wrong(tmp_path: Path) -> None:
    page = tmp_path / "year.md"
    length = ("--days", "14", "--intents", "300", "--real", "8")
    command = [sys.executable, "-m", "tests.year", *length, "--report", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert "0 findings" in page.read_text()
