"""The lock of a run's directory: its owner holds it as long as it lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from sandbox.storage import atomic_file

# How long what a killed process was just starting may take to die with it.
DYING_SECONDS = 5.0


def free(lock: int, deadline_seconds: float = DYING_SECONDS) -> bool:
    """Take a run's lock, unless a live process has it. What a killed one was just starting holds it for a moment more:
    it was forked with it, and dies of its parent's death in its own time."""
    until = time.monotonic() + deadline_seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _owner_lives(lock) or time.monotonic() > until:
                return False
            time.sleep(0.005)
        else:
            return True


def owner_of(path: Path) -> int:
    """Read the id of the process that holds a run's lock. 0: none is written yet, or the run is gone."""
    try:
        owner = (path / "lock").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return int(owner) if owner.isdigit() else 0


def _owner_lives(lock: int) -> bool:
    """Whether the process in the lock lives and is no zombie. True where no process is written there yet."""
    owner = os.pread(lock, 32, 0)
    if not owner.isdigit():
        return True
    try:
        state = Path(f"/proc/{int(owner)}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in (b"Z", b"X")


@contextlib.contextmanager
def gate(runs: Path) -> Iterator[None]:
    """Hold the gate of all runs: no process takes a directory that is made or removed for abandoned meanwhile.

    Raises:
        errors.KeeperError: another process holds it for too long. A keeper must not wait for good: it ends its run.
    """
    fd = os.open(f"{runs}/.gate", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with atomic_file.unstopped():
        try:
            atomic_file.turn(fd, where=f"{runs}/.gate")
            yield
        finally:
            atomic_file.let_go(fd)


def open_lock(path: Path) -> int:
    return os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
