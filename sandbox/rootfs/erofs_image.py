"""A root as one EROFS file that gVisor reads itself: made from a tree once, checked by one inode at each start.

``mkfs.erofs`` is told a fixed UUID, owner and build time, so that equal trees give equal bytes. Modification times of
files stay: Python's byte code names the time of its source.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from policy import errors
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
_RECORD_BYTES = 1 << 20
# A program of util-linux, which every Debian has.
_SETPRIV = Path("/usr/bin/setpriv")
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
    if _SETPRIV.exists() and os.access(program, os.X_OK):
        # The kernel kills it with this process, whose next start removes the directory.
        command = [str(_SETPRIV), "--pdeathsig", "KILL", *command]
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


def written(fd: int) -> bool:
    """Whether a process has an open file open for writing, or mapped so.

    Writes to a mapped page that is dirty change no time of the inode. A read lease is refused while there is a writer
    (fcntl(2), F_SETLEASE). A file system without leases answers False.
    """
    try:
        # A process that opens the file meanwhile waits, and its signal must not be SIGIO, which would end this process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as e:
        return e.errno == errno.EAGAIN
    return False


def record(folder: Path, name: str, *, hint: str) -> bytes:
    """Read a record beside an image.

    Raises:
        errors.LayerChangedError: Raised when it is missing, or no private file.
    """
    try:
        directory = atomic_file.open_directory(folder, error=errors.LayerChangedError)
        try:
            raw = atomic_file.read(
                directory, name, max_bytes=_RECORD_BYTES, where=str(folder), error=errors.LayerChangedError
            )
        finally:
            os.close(directory)
        if raw is None:
            raise errors.LayerChangedError(f"`{folder}/{name}` is missing", where=str(folder))
    except errors.LayerChangedError as e:
        e.hint = hint
        raise
    return raw


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
        # This order: a process that opens the image after `written` changes its times, so that `now` is not its inode.
        now = identity(os.fstat(self._file.fd))
        if written(self._file.fd):
            raise changed(self._folder, "is open for writing in another process", hint=self._hint)
        if record(self._folder, TABLE, hint=self._hint) != now:
            if found := problem(self._file.fd, self._file.digest):
                raise changed(self._folder, found, hint=self._hint)
            # A copy that a backup restored has the same bytes.
            atomic_file.derive(self._folder / TABLE, now)
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
