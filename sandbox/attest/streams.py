"""Compare the files behind an agent's descriptors 0 to 2 with those that its contract has.

gVisor imports the three files of the first process under fixed numbers of its own, and reads and writes them there for
as long as the agent keeps them open. A file that the agent has closed is gone; its number may then be gVisor's own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from policy.prove.live import Layer, Standing
from sandbox.kernel import procfs, small_files
from sandbox.kernel.procfs import Process

# gvisor runsc/boot/loader.go, startingStdioFD.
_FIRST: Final = 256
# What a contract with a terminal expects before the terminal has come: nothing is equal to it.
UNKNOWN: Final = ("the terminal of the run",) * 3
# asm-generic/ioctls.h: open the other side of a pty by its master.
_TIOCGPTPEER: Final = 0x5441
# Objects that gVisor makes for itself while it runs (Go's and its own).
_OWN: Final = re.compile(r"anon_inode:.*|socket:\[\d+\]|/memfd:.*")


def pipe(fd: int) -> str:
    """Return the name of the pipe of which ``fd`` is either end."""
    return f"pipe:[{os.fstat(fd).st_ino}]"


def terminal(master: int) -> str | None:
    """Return the name of the terminal whose master is ``master``, or None once the mounts of its opener have ended."""
    try:
        slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        if e.errno == errno.ENODEV:
            return None
        raise
    try:
        return _device(os.fstat(slave))
    finally:
        os.close(slave)


def judge(sandbox: Process, gofer: Process, expected: Sequence[str]) -> Iterator[Layer]:
    """Yield drift for each descriptor of the agent that is another file than ``expected``."""
    for number, wanted in enumerate(expected):
        found = _named(sandbox.name.pid, _FIRST + number)
        if found in (None, wanted) or _is_gvisors(sandbox, gofer, _FIRST + number, str(found)):
            continue
        yield Layer("streams", Standing.WIDER, f"descriptor {number} of the agent is {wanted}", f"it is {found}")


def _named(pid: int, number: int) -> str | None:
    """Return the name of an open file, by the kernel's word alone: it asks no file system of the agent."""
    place = f"/proc/{pid}/fd/{number}"
    try:
        link = os.readlink(place)
        # Device files lie in file systems of the kernel's.
        return _device(os.stat(place)) if link.startswith("/dev/") else link
    except FileNotFoundError:
        return None


def _device(info: os.stat_result) -> str:
    if not stat.S_ISCHR(info.st_mode):
        return f"file {info.st_ino} of {info.st_dev}"
    return f"terminal {os.major(info.st_rdev)}:{os.minor(info.st_rdev)} of {info.st_dev}"


def _is_gvisors(sandbox: Process, gofer: Process, number: int, found: str) -> bool:
    """Whether gVisor may have opened this file itself: an object of its own, or a file of the agent's root."""
    if _OWN.fullmatch(found):
        return True
    if not found.startswith("/"):
        return False
    info = small_files.text(f"/proc/{sandbox.name.pid}/fdinfo/{number}")
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    return int(fields["mnt_id"]) in procfs.mount_ids(gofer.name.pid)
