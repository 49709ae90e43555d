"""A module of a sample package for a test: agents/ is data, so it is loaded by file and leaves no bytecode there.

A `__pycache__` in a package would be a file that its signature does not list.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def load(path: Path) -> ModuleType:
    """Run the source at `path` as a module of its own."""
    module = ModuleType(f"agents_{path.parent.name}_{path.stem}")
    module.__file__ = str(path)
    # dataclasses look their module up by name.
    sys.modules[module.__name__] = module
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module
