"""Fixtures that the daemon's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home as the daemon makes it, readable by its owner alone."""
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    return made
