"""Read this machine's memory from the kernel: total, available to a new process, and the stalls (PSI)."""

from __future__ import annotations

import contextlib
import errno
from typing import Final

import psutil
from msgspec import Struct

from policy import standby
from sandbox.kernel import small_files

_MIB: Final = 1 << 20


class Memory(Struct, frozen=True):
    """Memory of the machine in MiB."""

    total_mb: int
    available_mb: int


def read() -> Memory:
    """Return the machine's memory, and the part available to a new process without swapping (``free(1)``).

    Raises:
        OSError: Raised when /proc lacks the numbers.
    """
    try:
        found, said = psutil.virtual_memory(), _available()
    except (KeyError, ValueError, IndexError) as e:
        raise OSError(errno.EIO, f"{psutil.PROCFS_PATH}/meminfo has no {e}") from e
    # psutil estimates if the kernel reports 0 or nothing, and may count all cached pages, tmpfs included. Admission
    # must never use more than the kernel reports.
    least = min(found.available, found.free if said is None else said)
    return Memory(found.total // _MIB, least // _MIB)


def _available() -> int | None:
    """Return MemAvailable of the kernel in bytes, or None if it has none."""
    for line in small_files.text(f"{psutil.PROCFS_PATH}/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def stalls() -> tuple[float, float]:
    """Return ``some`` and ``full`` of memory pressure: the percentages of the last ten seconds spent in stalls.

    In ``some`` at least one task waited for memory, in ``full`` all tasks did (Documentation/accounting/psi.rst). Both
    are 0 if the kernel does not count them.
    """
    found = {"some": 0.0, "full": 0.0}
    # psutil has no function for it. PROCFS_PATH is used, since a container may show another /proc.
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in small_files.text(f"{psutil.PROCFS_PATH}/pressure/memory").splitlines():
            words = line.split()
            found[words[0]] = float(words[1].removeprefix("avg10="))
    return found["some"], found["full"]


def machine() -> standby.Machine:
    """Return the machine's memory and its stalls, as the plan of instances takes them.

    Raises:
        OSError: Raised when /proc lacks the numbers.
    """
    found = read()
    return standby.Machine(found.total_mb, found.available_mb, *stalls())
