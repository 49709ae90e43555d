"""Limits of a request by a user other than root, until a signature is verified.

memory     the kernel bounds the memory of parsing and reading (RLIMIT_DATA)
seconds    a directory may lie on a file system that does not answer
turns      packages of one user are read one at a time, so that many requests hold one package in memory
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from policy import errors
from policy import package as packages
from sandbox.kernel import small_files
from sandbox.kernel.fs import hanging
from sandbox.storage import atomic_file

# A request of 4 MiB as bytes, as text of four bytes a character, and as the same once more in its object.
REQUEST_MEMORY: Final = 64 << 20
# A package of the greatest size, and its largest file twice.
PACKAGE_MEMORY: Final = 2 * packages.MAX_BYTES + (64 << 20)


# The files whose locks are the turns of a user.
_TURNS: Final = {"packages": "{uid}", "workspaces": "{uid}-workspaces"}


class _OverdueError(Exception):
    """The clock of ``seconds`` ran out."""


@contextlib.contextmanager
def memory(more_bytes: int) -> Iterator[None]:
    """While the block lasts this process may have so much memory of its own more than it has now.

    Raises:
        errors.RequestError: it would have needed more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(small_files.whole("/proc/self/statm").split()[5])
    wanted = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    except MemoryError:
        raise errors.RequestError("the request is refused: it takes more memory than one may") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def seconds(most: float, what: str, place: str) -> Iterator[None]:
    """The block ends within so many seconds, also while it waits for a file system, that of ``place``.

    Raises:
        errors.RequestError: it had not ended; ``what`` is its name.
    """

    def overdue(number: int, frame: FrameType | None) -> None:
        raise _OverdueError

    before = signal.signal(signal.SIGALRM, overdue)
    try:
        signal.setitimer(signal.ITIMER_REAL, most)
        try:
            # The alarm ends no wait for an answer of FUSE's: then the main loop ends this process (overdue).
            with hanging.within(place, most):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OverdueError:
        raise errors.RequestError(f"the request is refused: {what} took longer than {most:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def turn(state: Path, uid: int, most_seconds: float, *, of: str = "packages") -> Iterator[None]:
    """One at a time of this user's: of its ``packages``, or of its ``workspaces``.

    Raises:
        errors.BusyError: another of theirs held it for so many seconds.
    """
    place = state / "callers"
    place.mkdir(mode=0o700, exist_ok=True)
    name = _TURNS[of].format(uid=uid)
    fd = os.open(place / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not atomic_file.take(fd, most_seconds):
            raise errors.BusyError(f"other {of} of this user are still being read")
        yield
    finally:
        os.close(fd)


def forget_turn(state: Path, uid: int) -> None:
    """Give the next request of this user its turn, while a process that cannot be ended still holds the lock: the file
    goes, and the next request makes another."""
    with contextlib.suppress(FileNotFoundError):
        for name in _TURNS.values():
            (state / "callers" / name.format(uid=uid)).unlink(missing_ok=True)
