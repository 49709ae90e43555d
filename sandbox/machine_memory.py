"""What the kernel says of this machine's memory: how much there is, how much is free for somebody new, and how long
whoever asked for some had to wait."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from typing import Final

import psutil

from sandbox.kernel import files

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
        found = psutil.virtual_memory()
    except (KeyError, ValueError) as e:
        raise OSError(errno.EIO, f"{psutil.PROCFS_PATH}/meminfo has no {e}") from e
    return Memory(found.total // _MIB, found.available // _MIB)


def stalls() -> tuple[float, float]:
    """The share of the last ten seconds, in percent, in which some, and in which all who could run, waited for memory
    (Documentation/accounting/psi.rst); 0 where the kernel does not count it."""
    found = {"some": 0.0, "full": 0.0}
    # psutil has no word for it. Its own place is asked, which is another's where a container shows one.
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in files.text(f"{psutil.PROCFS_PATH}/pressure/memory").splitlines():
            words = line.split()
            found[words[0]] = float(words[1].removeprefix("avg10="))
    return found["some"], found["full"]
