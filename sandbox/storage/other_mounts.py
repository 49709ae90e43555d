"""Find the entries of a directory at or below which another file system is mounted.

The mount table says so without a request to these file systems, which may not answer (ADR 0160).
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.kernel.fs import filesystems


def names(place: Path) -> frozenset[str]:
    """Return the names in ``place`` with a mount whose device is not that of ``place``. None without ``place``.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        device = os.lstat(place).st_dev
    except FileNotFoundError:
        return frozenset()
    own = f"{os.major(device)}:{os.minor(device)}"
    # The table has paths without symlinks.
    above = os.path.join(os.path.realpath(place), "")
    return frozenset(
        mount.point.removeprefix(above).split("/", 1)[0]
        for mount in filesystems.mounts()
        if mount.device != own and mount.point.startswith(above)
    )
