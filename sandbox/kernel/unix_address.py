"""Names of sockets that fit into an address: a path may be too long for one (108 bytes, unix(7))."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def within(directory: Path, name: str) -> Iterator[str]:
    """``name`` in ``directory``, through a descriptor of ours, for as long as the block lasts.

    Raises:
        OSError: the directory cannot be opened, or is a symlink.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
