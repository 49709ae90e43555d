"""Names of sockets that fit into an address: a path may be too long for one (108 bytes, unix(7))."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def within(directory: str | os.PathLike[str], name: str, *, follow: bool = False) -> Iterator[str]:
    """Yield a short address of ``name`` in ``directory``, through an open descriptor, valid inside the block.

    Args:
        directory: The directory of the socket.
        name: The socket's name there.
        follow: Whether ``directory`` may be a symlink: for a caller that checks the peer credentials of the other end.

    Raises:
        OSError: Raised when the directory cannot be opened, or is a symlink that is not followed.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        yield through(fd, name)
    finally:
        os.close(fd)


def through(fd: int, name: str, *, process: int | None = None) -> str:
    """``name`` in the directory at ``fd``, for as long as that is open: a descriptor of ours, or of ``process``."""
    return f"/proc/{'self' if process is None else process}/fd/{fd}/{name}"
