"""Directories that tests of granted paths share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """tmp_path/a/docs with a file in it, below directories that only its owner can write."""
    folder = tmp_path / "a" / "docs"
    folder.mkdir(parents=True)
    (folder / "page").write_text("text")
    for place in (tmp_path, tmp_path / "a", folder):
        place.chmod(0o755)
    (folder / "page").chmod(0o644)
    return folder
