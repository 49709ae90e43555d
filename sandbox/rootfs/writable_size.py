"""Find the most bytes that can be written below a granted path: no unbounded path is granted for writing.

A path is bounded if it has its own file system, on one block device that is small enough: an image in a loop device, a
partition, a logical volume. Directories on the machine's own file system have no bound that we can read back (project
quotas are not used, docs/adr/0029).
"""

from __future__ import annotations

from msgspec import Struct

from sandbox.kernel.fs import filesystems

# Local file systems on one device that grow only by root's hand. btrfs may span devices, a tmpfs is memory.
KINDS = ("ext2", "ext3", "ext4", "xfs")
# Options that deny a program left behind by an agent any gain: the agent's rights end with the run, its files stay.
NEEDED = ("nosuid", "nodev")
MEND = "give it a file system of its own: truncate -s 32M IMAGE; mkfs.ext4 IMAGE; mount -o loop,nosuid,nodev IMAGE PATH"


class SizeLimit(Struct, frozen=True):
    """``mb`` is the size in MiB of the file system at a path. It is 0 without a bound; ``lacking`` has the reason."""

    mb: int = 0
    lacking: str = ""


def of(fd: int, path: str) -> SizeLimit:
    """Return the size limit of an open directory or file at ``path``.

    Raises:
        errors.KernelError: Raised when the kernel does not report its mount.
    """
    mount = filesystems.mount_of(fd)
    if mount.kind not in KINDS or not filesystems.is_block_device(mount.device):
        return SizeLimit(lacking=f"it lies on {mount.kind}; {', '.join(KINDS)} on a block device can be bounded")
    if mount.point != path or mount.root != "/":
        return SizeLimit(lacking=f"it is part of the file system that is mounted at `{mount.point}`")
    for other in filesystems.mounts():
        missing = [flag for flag in NEEDED if flag not in other.options]
        if other.device == mount.device and missing:
            return SizeLimit(lacking=f"its file system is mounted at `{other.point}` without {' and '.join(missing)}")
    return SizeLimit(filesystems.size_mb(mount.device))


def may_be_written(fd: int) -> bool:
    """Whether agents may be granted the file system of an open file for writing, at one of its mount points.

    Raises:
        errors.KernelError: as ``of``.
    """
    mount = filesystems.mount_of(fd)
    if mount.kind not in KINDS or not filesystems.is_block_device(mount.device):
        return False
    same = [other for other in filesystems.mounts() if other.device == mount.device]
    return all(flag in other.options for other in same for flag in NEEDED)
