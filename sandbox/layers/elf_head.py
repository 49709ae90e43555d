"""Read the name of the loader from the head of a program, without reading the program."""

from __future__ import annotations

import mmap
import os

from policy import errors
from sandbox.rootfs import elf

_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def interpreter(path: str) -> str:
    """Return PT_INTERP of a file. Empty for a script, a static program, or a file that is no sound ELF program."""
    try:
        fd = os.open(path, _FILE)
    except OSError:
        return ""
    try:
        if os.pread(fd, 4, 0) != b"\x7fELF":
            return ""
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as data:
            return elf.parse(data, name=path).interpreter
    except (errors.NotElfError, OSError, ValueError):
        # What gVisor's loader cannot read either is not started by any loader.
        return ""
    finally:
        os.close(fd)
