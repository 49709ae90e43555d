"""Which file system an open path lies on, how large it can become, and the block device that holds it.

The mount is found by its id (/proc/self/fdinfo), not by a name or a device number: two mounts may have one device
and a name may lead somewhere else by the time that it is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from policy import errors
from sandbox.kernel import small_files

_SYS = Path("/sys/dev/block")
_SECTOR = 512  # /sys/.../size counts these, whatever the device's own blocks are
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. ``parent`` is the number of the mount that it is attached to; ``device`` is
    ``major:minor``; ``root`` the part of the file system that is mounted; ``options`` those of the mount itself, such
    as ``nosuid``."""

    number: int
    parent: int
    device: str
    root: str
    point: str
    options: frozenset[str]
    kind: str


def lines(mountinfo: str | None = None) -> list[str]:
    """The lines of the caller's mount table; ``mountinfo`` overrides it in tests.

    Whoever may mount anything, such as any user by fusermount(1), chooses names in it: bytes that are no UTF-8, and
    characters at which str.splitlines and a text file end a line. The kernel ends one with a newline and nothing else.
    """
    text = mountinfo
    if text is None:
        text = small_files.text("/proc/self/mountinfo")
    return [line for line in text.split("\n") if line]


def mounts(mountinfo: str | None = None) -> Iterator[Mount]:
    """The caller's mounts; ``mountinfo`` overrides the table in tests."""
    for line in lines(mountinfo):
        left, _, right = line.partition(" - ")
        number, parent, device, root, point, options, *_ = left.split(" ")
        kind = right.split(" ", 1)[0]
        yield Mount(int(number), int(parent), device, _plain(root), _plain(point), frozenset(options.split(",")), kind)


def _plain(text: str) -> str:
    # The kernel writes a space, tab, newline and backslash of a path as octal (seq_path).
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def mount_of(fd: int) -> Mount:
    """The mount that an open descriptor lies on.

    Raises:
        errors.KernelError: the kernel does not say, or it is not a mount of this namespace.
    """
    number = number_of(fd)
    for mount in mounts():
        if mount.number == number:
            return mount
    raise errors.KernelError(f"the mount of descriptor {fd} cannot be found")


def number_of(fd: int) -> int:
    """The number of the mount that an open descriptor lies on (proc_pid_fdinfo(5), ``mnt_id``).

    Raises:
        errors.KernelError: the kernel does not say.
    """
    try:
        info = small_files.text(f"/proc/self/fdinfo/{fd}")
        return next(int(line.split()[1]) for line in info.splitlines() if line.startswith("mnt_id:"))
    except (OSError, StopIteration, ValueError) as e:
        raise errors.KernelError(f"the mount of descriptor {fd} cannot be found") from e


def is_block_device(device: str) -> bool:
    """Whether a file system's device number is that of one block device; btrfs, overlay, tmpfs and the like have
    numbers that are no device."""
    return (_SYS / device).is_dir()


def whole_disk(device: str) -> str | None:
    """The disk of a block device ``major:minor``: a partition's is the one that it is part of. None for no device."""
    place = _SYS / device
    if not place.is_dir():
        return None
    if (place / "partition").exists():
        return (place.resolve().parent / "dev").read_text().strip()
    return device


def size_mb(device: str) -> int:
    """The size of a block device in MiB, rounded up: no file system on it can hold more."""
    sectors = int((_SYS / device / "size").read_text())
    return -(-sectors * _SECTOR // (1024 * 1024))
