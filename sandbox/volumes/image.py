"""The image of a volume: an ext4 with a journal, whose whole size is allocated on the host.

Every change that is more than a write of an agent makes a new image beside the old one, complete and synced; a rename
is then the change. So a killed process leaves the image of before or the one of after.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.fs import e2fsprogs, loop_device
from sandbox.kernel.fs.loop_device import LoopDevice
from sandbox.workspace import image as workspace_image

MIB: Final = 1024 * 1024
_LOST: Final = "lost+found"
_FORMAT: Final = ("-q", "-F", "-m", "0", "-b", "4096", "-I", "256", "-E")
_FORMATTED: Final = "nodiscard,lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0"
_SECONDS: Final = 600
_FREE_MB: Final = 64


def make(path: Path, mb: int) -> None:
    """Make an empty image of ``mb`` MiB at a path that does not exist, durably.

    Raises:
        errors.VolumeError: it cannot be made.
    """
    with _failing(f"an image of {mb} MiB cannot be made"):
        with open(path, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(mb * MIB)
        _tool("mkfs.ext4", *_FORMAT, _FORMATTED, str(path))
        allocate(path)
        _remove_lost(path)
        sync(path)


def copy(source: Path, target: Path) -> None:
    """Copy an image that no process has mounted, durably: its data, and none of its holes.

    Raises:
        errors.VolumeError: there is no room.
    """
    with _failing("the image cannot be copied"):
        workspace_image.copy(source, target)
        sync(target)


def resize(path: Path, mb: int) -> None:
    """Give a copy of an image another size.

    Raises:
        errors.VolumeError: its files take more, or there is no room.
    """
    with _failing(f"an image of {mb} MiB cannot be made"):
        larger = mb * MIB > path.stat().st_size
        if larger:
            os.truncate(path, mb * MIB)
        _tool("e2fsck", "-f", "-p", str(path), accepted=(0, 1))
        _tool("resize2fs", str(path), f"{mb}M")
        os.truncate(path, mb * MIB)
        allocate(path)
        _remove_lost(path)
        sync(path)


def _remove_lost(path: Path) -> None:
    """Remove an empty lost+found: programs such as initdb take an empty directory alone."""
    with attached(path) as device:
        fd = mount(device)
        try:
            with contextlib.suppress(OSError):
                os.rmdir(_LOST, dir_fd=fd)
        finally:
            os.close(fd)


def check(path: Path) -> None:
    """Replay the journal of an image that no process has mounted, and repair it where that is safe (e2fsck(8), -p).

    Raises:
        errors.VolumeError: it is damaged.
    """
    _tool("e2fsck", "-p", str(path), accepted=(0, 1))


def allocate(path: Path) -> None:
    """Allocate every block of an image: the kernel gives blocks of zeros back to the host while it is mounted.

    Raises:
        OSError: the host has no room for them.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def check_free(directory: Path, mb: int) -> None:
    """Refuse what would fill the file system of the state, which holds the audit log.

    Raises:
        errors.VolumeError: less than ``mb`` MiB and a rest are free.
    """
    system, needed = os.statvfs(directory), mb + _FREE_MB
    if system.f_bavail * system.f_frsize < needed * MIB:
        raise errors.VolumeError(
            f"COVENANT_STATE has less than {needed} MiB of free space", hint="make room, or take a smaller size"
        )


@contextlib.contextmanager
def attached(path: Path) -> Iterator[LoopDevice]:
    """Yield the loop device of an image: the one that it has, for all mounts of one image are of one device.

    The caller holds the lock of its mounts.

    Raises:
        OSError: there is none to be had.
    """
    backing = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        device = loop_device.find(backing) or loop_device.attach(backing)
    finally:
        os.close(backing)
    with device:
        yield device


def is_attached(path: Path) -> bool:
    """Whether a loop device has the image, and so a run may have it mounted."""
    backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        device = loop_device.find(backing)
    finally:
        os.close(backing)
    if device is None:
        return False
    with device:
        return True


def mount(device: LoopDevice) -> int:
    """Return a detached mount of the file system on a device; the caller closes it.

    Raises:
        OSError: the kernel does not mount it.
    """
    # nodiscard: blocks that an agent frees stay allocated on the host.
    options: dict[str, str | None] = {"source": device.path, "errors": "remount-ro", "nodiscard": None}
    return libc.new_mount("ext4", options, libc.MOUNT_ATTR_NOSUID | libc.MOUNT_ATTR_NODEV)


def sync(path: Path) -> None:
    """Write a file or directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _failing(message: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise errors.VolumeError(f"{message}: {e.strerror}", hint="see the free space of COVENANT_STATE") from e


def _tool(name: str, *arguments: str, accepted: tuple[int, ...] = (0,)) -> None:
    try:
        e2fsprogs.run(name, *arguments, seconds=_SECONDS, accepted=accepted)
    except errors.KernelError as e:
        raise errors.VolumeError(e.message, hint=e.hint or _MENDS.get(name, "")) from e


_MENDS: Final = {
    "e2fsck": "restore a snapshot: covenant volume restore NAME SNAPSHOT",
    "resize2fs": "remove files of the volume, or take a larger size",
}
