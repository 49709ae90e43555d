"""Find the file system of an open path, its largest size, and its block device.

The mount is found by its id (/proc/self/fdinfo), not by a name or a device number. Two mounts may have one device, and
a name may lead elsewhere at the time of the check.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from policy import errors
from sandbox.kernel import small_files

SYS = Path("/sys/dev/block")
_SECTOR = 512  # /sys/.../size counts these, independent of the device's own blocks
_STATFS_BYTES = 512
_libc = ctypes.CDLL(None, use_errno=True)
_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(Struct, frozen=True):
    """One line of mountinfo.

    ``parent`` is the number of the mount that it is attached to. ``device`` is ``major:minor``. ``root`` is the mounted
    part of the file system. ``options`` are those of the mount itself, such as ``nosuid``.
    """

    number: int
    parent: int
    device: str
    root: str
    point: str
    options: frozenset[str]
    kind: str


def lines(mountinfo: str | None = None) -> list[str]:
    """Return the lines of the caller's mount table. ``mountinfo`` overrides it in tests.

    A user who may mount, such as any user by fusermount(1), chooses names in it. They may contain bytes that are not
    UTF-8, and characters at which str.splitlines and text files end a line. The kernel ends a line only with a newline.
    """
    text = mountinfo
    if text is None:
        text = small_files.text("/proc/self/mountinfo")
    return [line for line in text.split("\n") if line]


def mounts(mountinfo: str | None = None) -> Iterator[Mount]:
    """Yield the caller's mounts. ``mountinfo`` overrides the table in tests."""
    for line in lines(mountinfo):
        left, _, right = line.partition(" - ")
        number, parent, device, root, point, options, *_ = left.split(" ")
        kind = right.split(" ", 1)[0]
        yield Mount(int(number), int(parent), device, _plain(root), _plain(point), frozenset(options.split(",")), kind)


def _plain(text: str) -> str:
    # The kernel writes a space, tab, newline and backslash of a path as octal (seq_path).
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def mount_of(fd: int) -> Mount:
    """Return the mount of an open descriptor.

    Raises:
        errors.KernelError: Raised when the kernel does not report it, or it is not a mount of this namespace.
    """
    number = number_of(fd)
    for mount in mounts():
        if mount.number == number:
            return mount
    raise errors.KernelError(f"the mount of descriptor {fd} cannot be found")


def number_of(fd: int) -> int:
    """Return the number of the mount of an open descriptor (proc_pid_fdinfo(5), ``mnt_id``).

    Raises:
        errors.KernelError: Raised when the kernel does not report it.
    """
    try:
        info = small_files.text(f"/proc/self/fdinfo/{fd}")
        return next(int(line.split()[1]) for line in info.splitlines() if line.startswith("mnt_id:"))
    except (OSError, StopIteration, ValueError) as e:
        raise errors.KernelError(f"the mount of descriptor {fd} cannot be found") from e


def type_of(fd: int) -> int:
    """Return the number of the type of an open descriptor's file system (statfs(2), linux/magic.h).

    Raises:
        OSError: the file system does not say.
    """
    raw = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(ctypes.c_int(fd), raw) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return ctypes.c_long.from_buffer(raw).value & 0xFFFFFFFF


def is_block_device(device: str) -> bool:
    """Whether a file system's device number is that of one block device.

    btrfs, overlay, tmpfs and the like have numbers without a device.
    """
    return (SYS / device).is_dir()


def whole_disk(device: str) -> str | None:
    """Return the disk of a block device ``major:minor``, for a partition its whole disk. None if it is no device."""
    place = SYS / device
    if not place.is_dir():
        return None
    if (place / "partition").exists():
        return (place.resolve().parent / "dev").read_text().strip()
    return device


def size_mb(device: str) -> int:
    """Return the size of a block device in MiB, rounded up: the limit of any file system on it."""
    sectors = int((SYS / device / "size").read_text())
    return -(-sectors * _SECTOR // (1024 * 1024))
