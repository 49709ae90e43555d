"""The file system that takes the changes of a workspace: an ext4 image of its own, on a loop device.

Images of one size are copies of a template without its holes, so that none is formatted while a caller waits. The
kernel detaches the device when its last user is gone (LO_FLAGS_AUTOCLEAR), so a killed process leaves none behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from policy import errors
from sandbox.kernel import libc

UPPER, WORK, MASK = "upper", "work", "mask"


class LayerNames(NamedTuple):
    """The directories of an image that are layers of one overlay."""

    upper: str
    work: str
    mask: str


DIRECTORY: Final = LayerNames(UPPER, WORK, MASK)
# Of the common directory of git, where the workspace is a linked worktree.
REPOSITORY: Final = LayerNames("repository-upper", "repository-work", "repository-mask")
_CONTROL: Final = "/dev/loop-control"
# linux/loop.h
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR: Final = 4
# struct loop_config: descriptor, block size, then struct loop_info64 with its flags after 52 bytes.
_CONFIG: Final = struct.Struct("=II52xI176x64x")
_TRIES: Final = 16
_FORMAT: Final = (
    # Without a journal: an image that was not settled is checked before it is used again.
    *("-q", "-F", "-m", "0", "-b", "4096", "-I", "256", "-O", "^has_journal,^resize_inode"),
    *("-E", "nodiscard,lazy_itable_init=1,root_owner=0:0"),
)
_PLACES: Final = ("/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4")
_CHECKS: Final = ("/usr/sbin/e2fsck", "/sbin/e2fsck")
_SECONDS: Final = 120
_MIB: Final = 1024 * 1024


def create(path: Path, mb: int, templates: Path) -> None:
    """Make an image of ``mb`` MiB at a path that does not exist. ``templates`` is the directory of the templates.

    Raises:
        errors.WorkspaceError: it cannot be made.
    """
    template = templates / f"{mb}.ext4"
    try:
        if not template.exists():
            templates.mkdir(mode=0o700, parents=True, exist_ok=True)
            making = templates / f".{mb}.{os.getpid()}"
            with contextlib.ExitStack() as stack:
                stack.callback(lambda: making.unlink(missing_ok=True))
                _formatted(making, mb)
                os.rename(making, template)
        copy(template, path)
    except OSError as e:
        raise errors.WorkspaceError(
            f"the image of a workspace cannot be made: {e.strerror}", hint="see the free space of COVENANT_STATE"
        ) from e


def _formatted(path: Path, mb: int) -> None:
    with open(path, "xb") as file:
        file.truncate(mb * _MIB)
    _tool(_PLACES, *_FORMAT, str(path))


def check(path: Path) -> None:
    """Repair an image that was in use when the machine stopped (e2fsck(8)).

    Raises:
        errors.WorkspaceError: it cannot be repaired.
    """
    _tool(_CHECKS, "-p", "-f", str(path), accepted=(0, 1))


def _tool(places: tuple[str, ...], *arguments: str, accepted: tuple[int, ...] = (0,)) -> None:
    program = next((one for one in places if os.access(one, os.X_OK)), None)
    if program is None:
        raise errors.WorkspaceError(f"this host has no {os.path.basename(places[0])}", hint="apt-get install e2fsprogs")
    try:
        done = subprocess.run(
            [program, *arguments],
            env={"LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise errors.WorkspaceError(f"{os.path.basename(program)} took more than {_SECONDS} s") from e
    if done.returncode not in accepted:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        raise errors.WorkspaceError(f"{os.path.basename(program)} failed: {said[-1][:300] if said else 'no message'}")


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
        self._device, self.path = _attached(path)

    def __enter__(self) -> AttachedImage:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._device)

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


def _attached(path: Path) -> tuple[int, str]:
    """Return the descriptor and the name of a loop device for the image."""
    try:
        backing = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as e:
        raise errors.WorkspaceError(f"the image of a workspace cannot be opened: {e.strerror}") from e
    try:
        for _ in range(_TRIES):
            for device, name in _free():
                try:
                    fcntl.ioctl(device, _CONFIGURE, _CONFIG.pack(backing, 0, _AUTOCLEAR))
                except OSError as e:
                    os.close(device)
                    if e.errno != errno.EBUSY:  # another process took it first
                        raise
                else:
                    return device, name
    except OSError as e:
        raise errors.WorkspaceError(
            f"a loop device cannot be had: {e.strerror}", hint="modprobe loop; see /dev/loop-control"
        ) from e
    finally:
        os.close(backing)
    raise errors.WorkspaceError("a loop device cannot be had: others took each that was free")


def _free() -> Iterator[tuple[int, str]]:
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        name = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
    finally:
        os.close(control)
    yield os.open(name, os.O_RDWR | os.O_CLOEXEC), name
