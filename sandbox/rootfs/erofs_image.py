"""A root as one EROFS file that gVisor reads itself: made from a tree once, checked by one inode at each start.

``mkfs.erofs`` is told a fixed UUID, owner and build time, so that equal trees give equal bytes. Modification times of
files stay: Python's byte code names the time of its source.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from policy import errors
from sandbox.kernel import small_files
from sandbox.storage import atomic_file

NAME = "image.erofs"
# The record of the inode, beside the image.
TABLE = "table"
MODE = 0o400
# What runsc 20240729 cannot map is inline data and compression.
_OPTIONS = ("--quiet", "-x-1", "--all-root", "-U", "00000000-0000-0000-0000-000000000000", "-E", "noinline_data")
# mkfs.erofs keeps every time before this one, and gives it to the superblock: 2100-01-01.
_BUILD_TIME = "4102444800"
# Of directories and links, whose times no layer records: 1980-01-01, which a zip archive can name.
_PLAIN_TIME_NS = 315_532_800 * 10**9
_SECONDS = 1800
_CHUNK_BYTES = 1 << 20
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class ImageFile(Struct, frozen=True):
    """An EROFS image that is open. ``digest`` is the hex SHA-256 that was recorded when it was made.

    ``line`` is its inode when it was opened. A change after the check of a start is therefore seen by attestation.
    """

    path: Path
    fd: int
    digest: str
    line: bytes


def make(program: Path, tree: Path, place: Path) -> str:
    """Make the image of a tree. Returns its hex SHA-256. Times of the tree's directories and links are changed.

    Raises:
        errors.LayerToolError: Raised when mkfs.erofs cannot be run or fails.
    """
    for path in _untimed(tree):
        os.utime(path, ns=(_PLAIN_TIME_NS, _PLAIN_TIME_NS), follow_symlinks=False)
    command = [str(program), *_OPTIONS, str(place), str(tree)]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": _BUILD_TIME}
    hint = f"df -h {place.parent} says whether it has room for the files; without erofs-utils roots stay directories"
    try:
        done = subprocess.run(
            command, cwd="/", env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS,
            umask=0o077, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as e:
        raise errors.LayerToolError(f"`{program}` cannot be run: {e}", hint=hint) from e
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        raise errors.LayerToolError(f"{program.name} failed: {lines[-1][:300] if lines else 'no message'}", hint=hint)
    os.chmod(place, MODE)
    return digest_of(place)


def digest(fd: int) -> str:
    """Return the hex SHA-256 of an open file. Its position does not move."""
    found, at = hashlib.sha256(), 0
    while piece := os.pread(fd, _CHUNK_BYTES, at):
        found.update(piece)
        at += len(piece)
    return found.hexdigest()


def digest_of(place: Path) -> str:
    """Return the hex SHA-256 of a file."""
    fd = os.open(place, _FILE)
    try:
        return digest(fd)
    finally:
        os.close(fd)


def identity(info: os.stat_result) -> bytes:
    """Return the line of one inode: every write, chmod or new name changes it."""
    i = info
    line = f"{i.st_dev} {i.st_ino} {i.st_mode} {i.st_uid} {i.st_size} {i.st_mtime_ns} {i.st_ctime_ns}\n"
    return line.encode()


def problem(fd: int, expected: str) -> str:
    """Read an open image whole. Returns the difference from what was made; empty if there is none."""
    before = os.fstat(fd)
    if not stat.S_ISREG(before.st_mode) or before.st_uid != os.geteuid() or stat.S_IMODE(before.st_mode) != MODE:
        return "has another owner or mode"
    if digest(fd) != expected or identity(os.fstat(fd)) != identity(before):
        return "has other bytes"
    return ""


class FileCheck:
    """The check of one image: by its inode, and by its bytes where the inode is not the recorded one."""

    def __init__(self, folder: Path, file: ImageFile, *, hint: str) -> None:
        self._folder, self._file, self._hint = folder, file, hint
        self._done = False

    def wait(self) -> None:
        """Compare. A second call returns at once.

        Raises:
            errors.LayerChangedError: Raised when the image is not as it was made.
        """
        if self._done:
            return
        recorded = self._folder / TABLE
        now = identity(os.fstat(self._file.fd))
        if small_files.whole(recorded) != now:
            if found := problem(self._file.fd, self._file.digest):
                raise changed(self._folder, found, hint=self._hint)
            # A copy that a backup restored has the same bytes.
            atomic_file.derive(recorded, now)
        self._done = True


def opened(folder: Path, expected: str, *, hint: str) -> ImageFile:
    """Open the image of a folder; the caller closes it.

    Raises:
        errors.LayerChangedError: Raised when there is no such file.
    """
    try:
        fd = os.open(folder / NAME, _FILE)
    except OSError as e:
        raise changed(folder, e.strerror or "cannot be read", hint=hint) from e
    return ImageFile(folder / NAME, fd, expected, identity(os.fstat(fd)))


def changed(folder: Path, how: str, *, hint: str) -> errors.LayerChangedError:
    """Return the error for an image that is not as it was made."""
    return errors.LayerChangedError(
        f"a root image was changed: {NAME} {how}", hint=hint, where=str(folder / NAME), differences=[f"{NAME}: {how}"]
    )


def _untimed(tree: Path) -> Iterator[str]:
    for folder, directories, files in os.walk(tree, topdown=False):
        yield from (path for path in (os.path.join(folder, n) for n in (*directories, *files)) if os.path.islink(path))
        yield folder
