"""The command that installs an extra: the packages that pyproject.toml names for it.

The project's own name is on no index: no hint and no page tells anybody to install it from there.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def command(extra: str) -> str:
    """Return the command that a hint names for an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = project["optional-dependencies"][extra]
    return " ".join(["pip install", *(f'"{one}"' if ">" in one else one for one in needs)])
