"""Copy the modules that hostile sample agents share into the packages that import them.

A package is signed file by file and may hold no link to outside, so each package needs its own copy. The one source is
agents/hostile/common; git ignores the copies.
"""

from __future__ import annotations

import pathlib

COMMON = "agents/hostile/common"
SHARED = {
    "bombs": ("gate", "harness"),
    "exec": ("elf", "gate", "harness", "raw", "start"),
    "network": ("gate", "harness"),
    "python": ("elf", "gate", "harness", "raw", "start"),
}


def copies() -> dict[str, str]:
    """Return each copy with its source, both as paths below the clone."""
    return {
        f"agents/hostile/{package}/{module}.py": f"{COMMON}/{module}.py"
        for package, modules in SHARED.items()
        for module in modules
    }


def copy(clone: pathlib.Path) -> None:
    """Make every copy equal to its source; print each file that changes."""
    for target, source in copies().items():
        wanted = (clone / source).read_bytes()
        if not (clone / target).exists() or (clone / target).read_bytes() != wanted:
            (clone / target).write_bytes(wanted)
            print(f"copied {source} to {target}")
