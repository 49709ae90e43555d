"""The parts of a directory whose changes a workspace does not apply, as its caller sees them before a session.

The supervisor finds them in its walk over the directory (sandbox.workspace.masks). This looks at two files alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from sandbox.kernel.fs import filesystems

_MOST: Final = 1 << 20
_PATH: Final = re.compile(r"^\s*path\s*=\s*(.+?)\s*$", re.MULTILINE)


def named(directory: Path) -> dict[str, str]:
    """Return the submodules that are checked out, and the mounts, each with its kind (changes.APART)."""
    top = os.path.realpath(directory)
    found = {path: "checkout" for path in _submodules(top) if os.path.isfile(os.path.join(top, path, ".git"))}
    points = (mount.point for mount in filesystems.mounts() if mount.point.startswith(top + "/"))
    return {**found, **{point[len(top) + 1 :]: "mount" for point in points}}


def _submodules(top: str) -> list[str]:
    try:
        fd = os.open(os.path.join(top, ".gitmodules"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(fd, _MOST).decode("utf-8", "replace")
        finally:
            os.close(fd)
    except OSError:
        return []
    paths = (one.strip('"') for one in _PATH.findall(text))
    return [one for one in paths if not os.path.isabs(one) and ".." not in one.split("/")]
