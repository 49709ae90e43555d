"""The file system that takes the changes of a workspace: an ext4 image of its own, on a loop device.

Images of one size are copies of a template without its holes, so that none is formatted while a caller waits. The
kernel detaches the device when its last user is gone, so a killed process leaves none behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.fs import e2fsprogs, loop_device
from sandbox.kernel.fs.loop_device import LoopDevice

UPPER, WORK, MASK = "upper", "work", "mask"


class LayerNames(NamedTuple):
    """The directories of an image that are layers of one overlay."""

    upper: str
    work: str
    mask: str


DIRECTORY: Final = LayerNames(UPPER, WORK, MASK)
# Of the common directory of git, where the workspace is a linked worktree.
REPOSITORY: Final = LayerNames("repository-upper", "repository-work", "repository-mask")
_FORMAT: Final = (
    # Without a journal: an image that was not settled is checked before it is used again.
    *("-q", "-F", "-m", "0", "-b", "4096", "-I", "256", "-O", "^has_journal,^resize_inode"),
    *("-E", "nodiscard,lazy_itable_init=1,root_owner=0:0"),
)
# How long a program of e2fsprogs may take.
SECONDS: Final = 120
# Sizes whose templates are kept: manifests may ask for any, and a template takes up to 1 MiB.
MOST_TEMPLATES: Final = 32
_MIB: Final = 1024 * 1024


def create(path: Path, mb: int, templates: Path) -> None:
    """Make an image of ``mb`` MiB at a path that does not exist. ``templates`` is the directory of the templates.

    Raises:
        errors.WorkspaceError: it cannot be made.
    """
    template = templates / f"{mb}.ext4"
    try:
        try:
            copy(template, path)
        except FileNotFoundError:
            _make_template(template, mb)
            copy(template, path)
    except OSError as e:
        raise errors.WorkspaceError(
            f"the image of a workspace cannot be made: {e.strerror}", hint="see the free space of COVENANT_STATE"
        ) from e


def _make_template(template: Path, mb: int) -> None:
    """Make a template, which is whole also after a power cut, and remove the oldest of too many."""
    template.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = template.with_name(f".{mb}.{os.getpid()}")
    making.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: making.unlink(missing_ok=True))
        _formatted(making, mb)
        with open(making, "rb") as file:
            os.fsync(file.fileno())
        os.rename(making, template)
    others = [one for one in template.parent.glob("*.ext4") if one != template]
    for one in sorted(others, key=_made_ns, reverse=True)[MOST_TEMPLATES - 1 :]:
        one.unlink(missing_ok=True)


def tidy(templates: Path, seconds: float) -> None:
    """Remove what processes left that were killed ``seconds`` ago or earlier while they made a template."""
    until = time.time_ns() - int(seconds * 1e9)
    for one in templates.glob(".*"):
        if _made_ns(one) < until:
            one.unlink(missing_ok=True)


def _made_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except FileNotFoundError:  # another process removed it
        return 0


def _formatted(path: Path, mb: int) -> None:
    with open(path, "xb") as file:
        file.truncate(mb * _MIB)
    _tool("mkfs.ext4", *_FORMAT, str(path))


def check(path: Path) -> None:
    """Repair an image that was in use when the machine stopped (e2fsck(8)).

    Raises:
        errors.WorkspaceError: it cannot be repaired.
    """
    _tool("e2fsck", "-p", "-f", str(path), accepted=(0, 1))


def _tool(name: str, *arguments: str, accepted: tuple[int, ...] = (0,)) -> None:
    try:
        e2fsprogs.run(name, *arguments, seconds=SECONDS, accepted=accepted)
    except errors.KernelError as e:
        raise errors.WorkspaceError(e.message, hint=e.hint) from e


def copy(template: Path, path: Path) -> None:
    """Copy a sparse file: its data, and none of its holes.

    Raises:
        OSError: there is no room, or ``path`` exists.
    """
    with open(template, "rb") as source, open(path, "xb") as target:
        os.fchmod(target.fileno(), 0o600)
        size = os.fstat(source.fileno()).st_size
        os.ftruncate(target.fileno(), size)
        at = 0
        while at < size:
            try:
                begin = os.lseek(source.fileno(), at, os.SEEK_DATA)
            except OSError as e:
                if e.errno == errno.ENXIO:  # only a hole is left
                    return
                raise
            at = os.lseek(source.fileno(), begin, os.SEEK_HOLE)
            while begin < at:
                begin += os.copy_file_range(source.fileno(), target.fileno(), at - begin, begin, begin)


class AttachedImage:
    """An image on a loop device. As a context manager it is detached at the end, once no mount of it is left.

    Raises:
        errors.WorkspaceError: there is no free device, or the kernel takes none.
    """

    def __init__(self, path: Path) -> None:
        self._device = _attached(path)
        self.path = self._device.path

    def __enter__(self) -> AttachedImage:
        return self

    def __exit__(self, *exc: object) -> None:
        self._device.close()

    def mounted(self, *, writable: bool = True) -> int:
        """Return a detached mount of the file system; the caller closes it.

        Raises:
            errors.WorkspaceError: the kernel does not mount it.
        """
        return mounted(self.path, writable=writable)


def mounted(device: str, *, writable: bool = True) -> int:
    """Return a detached mount of the file system of a loop device; the caller closes it.

    Raises:
        errors.WorkspaceError: the kernel does not mount it.
    """
    options: dict[str, str | None] = {"source": device, "errors": "remount-ro", "nodiscard": None}
    if not writable:
        options["ro"] = None
    attributes = libc.MOUNT_ATTR_NOSUID | libc.MOUNT_ATTR_NODEV | (0 if writable else libc.MOUNT_ATTR_RDONLY)
    try:
        return libc.new_mount("ext4", options, attributes)
    except OSError as e:
        raise errors.WorkspaceError(f"the image of a workspace cannot be mounted: {e.strerror}") from e


def _attached(path: Path) -> LoopDevice:
    """Return a loop device for the image."""
    try:
        backing = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as e:
        raise errors.WorkspaceError(f"the image of a workspace cannot be opened: {e.strerror}") from e
    try:
        return loop_device.attach(backing)
    except OSError as e:
        raise errors.WorkspaceError(
            f"a loop device cannot be had: {e.strerror}", hint="modprobe loop; see /dev/loop-control"
        ) from e
    finally:
        os.close(backing)
