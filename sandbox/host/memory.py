"""What the kernel says of this machine's memory: how much there is, how much is free for somebody new, and how long
whoever asked for some had to wait."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from typing import Final

import psutil

from sandbox.kernel import small_files

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """In MiB."""

    total_mb: int
    available_mb: int


def read() -> Memory:
    """All of the machine's, and what a new process may have of it without swapping (``free(1)``).

    Raises:
        OSError: /proc does not say.
    """
    try:
        found, said = psutil.virtual_memory(), _available()
    except (KeyError, ValueError, IndexError) as e:
        raise OSError(errno.EIO, f"{psutil.PROCFS_PATH}/meminfo has no {e}") from e
    # psutil has an estimate for a kernel that says 0 or nothing, and at worst counts all that is cached, tmpfs with it:
    # what a run is let in by is never more than what is said to be there.
    least = min(found.available, found.free if said is None else said)
    return Memory(found.total // _MIB, least // _MIB)


def _available() -> int | None:
    """The kernel's own word for what is available, in bytes; None where it has none."""
    for line in small_files.text(f"{psutil.PROCFS_PATH}/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def stalls() -> tuple[float, float]:
    """The share of the last ten seconds, in percent, in which some, and in which all who could run, waited for memory
    (Documentation/accounting/psi.rst); 0 where the kernel does not count it."""
    found = {"some": 0.0, "full": 0.0}
    # psutil has no word for it. Its own place is asked, which is another's where a container shows one.
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in small_files.text(f"{psutil.PROCFS_PATH}/pressure/memory").splitlines():
            words = line.split()
            found[words[0]] = float(words[1].removeprefix("avg10="))
    return found["some"], found["full"]
