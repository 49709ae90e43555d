"""What the tests of the daemon's half share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home as the daemon makes it: its owner's alone."""
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    return made
