"""The immutable flag of files and directories (ioctl_iflags(2)): also root cannot change one that has it."""

from __future__ import annotations

import fcntl
import struct
from typing import Final

# linux/fs.h, for 64-bit machines. The kernel reads and writes an int.
_GET: Final = 0x80086601
_SET: Final = 0x40086602
_IMMUTABLE: Final = 0x10
_INT: Final = struct.Struct("i")


def is_immutable(fd: int) -> bool:
    """Whether an open file or directory has the flag.

    Raises:
        OSError: its file system has no flags.
    """
    return bool(_read(fd) & _IMMUTABLE)


def set_immutable(fd: int, on: bool) -> None:
    """Set or clear the flag of an open file or directory. Takes CAP_LINUX_IMMUTABLE.

    Raises:
        OSError: the kernel refuses, or the file system has no such flag.
    """
    held = _read(fd)
    wanted = held | _IMMUTABLE if on else held & ~_IMMUTABLE
    if wanted != held:
        fcntl.ioctl(fd, _SET, _INT.pack(wanted))


def _read(fd: int) -> int:
    found: int = _INT.unpack(fcntl.ioctl(fd, _GET, _INT.pack(0)))[0]
    return found
