"""docs/lifecycle.md is the table of states and transitions.

Regenerate with: .venv/bin/python tests/golden/test_lifecycle_page.py
"""

from __future__ import annotations

import pathlib

from policy import lifecycle

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "lifecycle.md"


def test_page_is_table() -> None:
    assert PAGE.read_text() == lifecycle.page(), "regenerate docs/lifecycle.md (see above)"


if __name__ == "__main__":
    PAGE.write_text(lifecycle.page())
