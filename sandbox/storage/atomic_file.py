"""Read small private files with owner and mode checked, and replace them so that a crash leaves old or new bytes.

All access goes through the descriptor of a directory that was checked at its opening, so that a path swapped later
changes nothing. Write order: temporary file, fsync, rename (or link), fsync of the directory (rename(2), fsync(2)).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from policy import errors
from sandbox.kernel import libc

LOCK_SECONDS = 10.0
# The timeout of a lock that every holder keeps only for a moment. A longer holder hangs or was stopped.
TURN_SECONDS = 30.0
_POLL_SECONDS, _TURN_POLL_SECONDS = 0.005, (0.0002, 0.01)
LOCKS = Path("/proc/locks")
_STOPPING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(path: Path, *, error: type[errors.CovenantError]) -> int:
    """Open a private directory: our uid, mode 0700, no symlink.

    Raises:
        error: Raised when the directory is missing or not private.
    """
    try:
        fd = os.open(path, _DIRECTORY)
    except OSError as e:
        reason = "it is a symlink" if e.errno in {errno.ELOOP, errno.ENOTDIR} and path.is_symlink() else e.strerror
        raise error(f"directory `{path}` cannot be used: {reason}", where=str(path)) from e
    try:
        _check_private(os.fstat(fd), str(path), "0700", error)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_subdirectory(directory: int, name: str, *, where: str, make: bool, error: type[errors.CovenantError]) -> int:
    """Open a private directory in a private directory. It is created with mode 0700 if ``make`` is set.

    Raises:
        error: Raised as by ``open_directory``.
    """
    place = f"{where}/{name}"
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=directory)
                os.fsync(directory)
        fd = os.open(name, _DIRECTORY, dir_fd=directory)
    except OSError as e:
        raise error(f"directory `{place}` cannot be used: {e.strerror}", where=place) from e
    try:
        _check_private(os.fstat(fd), place, "0700", error)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(directory: int, name: str, *, max_bytes: int, where: str, error: type[errors.CovenantError]) -> bytes | None:
    """Read a private file. Returns None if it does not exist.

    Raises:
        error: Raised for a symlink, no regular file, another owner, another mode, too many bytes, or a read error.
    """
    place = f"{where}/{name}"
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as e:
        reason = "it is a symlink" if e.errno == errno.ELOOP else e.strerror
        raise error(f"file `{place}` cannot be read: {reason}", where=place) from e
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise error(f"`{place}` is no plain file", where=place)
        _check_private(info, place, "0600", error)
        raw = b""
        while len(raw) <= max_bytes and (piece := os.read(fd, max_bytes + 1 - len(raw))):
            raw += piece
    finally:
        os.close(fd)
    if len(raw) > max_bytes:
        raise error(f"file `{place}` is larger than {max_bytes} bytes", where=place)
    return raw


def temporary_name(name: str) -> str:
    """Return the name under which ``replace`` writes before the rename."""
    return f".{name}.new"


def replace(directory: int, name: str, data: bytes | Iterable[bytes], *, mode: int = 0o600) -> None:
    """Replace the content of a file by ``data``, durably. It may be given in pieces, which are written as they come.

    The caller holds the lock of the directory. The temporary name is fixed, so the next write overwrites the remains of
    a crash, and they never pile up.

    Raises:
        OSError: Raised when a step fails. Nothing is changed, unless only the sync of the directory failed. An error
            of the pieces changes nothing either.
    """
    making = temporary_name(name)
    # Remove the remains of a crash or a planted link first: O_EXCL then creates our own file.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(making, dir_fd=directory)
    try:
        _write(directory, making, data, mode=mode)
        os.rename(making, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        # On a full disk a half-written file would take the room that is needed next.
        with contextlib.suppress(OSError):
            os.unlink(making, dir_fd=directory)
        raise
    os.fsync(directory)


def which(directory: int, name: str) -> tuple[tuple[int, int], int]:
    """Return (device, inode) and size of the file that a name in a directory is now.

    The call causes no sync between two writes (``libc.statx_which``).

    Raises:
        FileNotFoundError: Raised when there is no file of that name.
    """
    inode, size, major, minor = libc.statx_which(directory, os.fsencode(name))
    return (os.makedev(major, minor), inode), size


class OpenedFile(NamedTuple):
    """Result of ``os.fstat`` of an open file, under the same names, without times and size."""

    st_mode: int
    st_nlink: int
    st_uid: int
    st_dev: int
    st_ino: int


def opened(fd: int) -> OpenedFile:
    """Return identity, mode and owner of an open file without reading its times, as ``which`` does."""
    mode, links, uid, inode, major, minor = libc.statx_open(fd)
    return OpenedFile(mode, links, uid, os.makedev(major, minor), inode)


def derive(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write ``data`` to a file that can be derived again, whole in every visible state.

    There is no lock: several processes that need the file at once may all write it. It is not synced; after a crash it
    is derived again.
    """
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return
    making = path.with_name(f".{path.name}.{uuid.uuid4()}")
    try:
        making.write_bytes(data)
        making.chmod(mode)
        making.replace(path)
    finally:
        making.unlink(missing_ok=True)


def create(directory: int, name: str, data: bytes | Iterable[bytes], *, mode: int = 0o600) -> None:
    """Create a file that does not exist yet, whole or not at all, durably. ``data`` is as for ``replace``.

    Raises:
        FileExistsError: Raised when there is one of that name; it is left unchanged.
        OSError: Raised when a step fails; no file is created.
    """
    making = f".{name}.{uuid.uuid4()}"
    try:
        _write(directory, making, data, mode=mode)
        # link(2) refuses an existing name, which rename(2) would replace.
        os.link(making, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(making, dir_fd=directory)
    os.fsync(directory)


def held(path: Path | str) -> bool:
    """Whether a process holds the lock file at ``path``. False if there is no file.

    It tries a shared lock, which two concurrent checks can both get.
    """
    try:
        # O_NONBLOCK: a fifo in its place must not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        let_go(fd)
    return False


def take(fd: int, seconds: float, *, poll_seconds: float = _POLL_SECONDS, shared: bool = False) -> bool:
    """Lock an open file, exclusively unless ``shared``. Returns False if another process holds it for ``seconds``.

    The lock ends with the last descriptor of the open file (flock(2)), or by ``let_go``. It polls, since the kernel's
    own wait has no timeout, and an alarm would belong to the whole process.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(poll_seconds)
        else:
            return True


@contextlib.contextmanager
def unstopped() -> Iterator[None]:
    """Block the stop signals of the terminal until the block ends; pending ones take effect then.

    Under sudo an ordinary user controls the terminal, and a process stopped with a lock makes all others wait. The mask
    is per thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def turn(fd: int, *, where: str, seconds: float | None = None, shared: bool = False) -> None:
    """Lock an open file as ``take`` does, and raise on a timeout. It is ``TURN_SECONDS`` by default.

    Raises:
        errors.KeeperError: Raised when another process holds it for that long; names the process if the kernel does.
    """
    seconds, pause = TURN_SECONDS if seconds is None else seconds, _TURN_POLL_SECONDS[0]
    until = time.monotonic() + seconds
    while not take(fd, 0.0, shared=shared):
        if time.monotonic() >= until:
            break
        # Most holders keep it for less than a millisecond. Longer pauses save CPU while many wait for one that hangs.
        time.sleep(pause)
        pause = min(2 * pause, _TURN_POLL_SECONDS[1])
    else:
        return
    pid = _holder(fd)
    raise errors.KeeperError(
        f"`{where}` is held by {'another process' if pid is None else f'process {pid}'}, and was for {seconds:g} s",
        hint="let it go on if it was stopped (`kill -CONT`), or end it by its process id; then repeat",
        where=where,
    )


def _holder(fd: int) -> int | None:
    """Return the pid that locked an open file, by proc_locks(5). None if it is not visible or not certain."""
    info = os.fstat(fd)
    exact = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    found: list[tuple[str, str]] = []
    with contextlib.suppress(OSError):
        lines = [line.split() for line in LOCKS.read_text().splitlines()]
        found = [(words[5], words[4]) for words in lines if len(words) > 5 and words[1] == "FLOCK"]
    # A file system such as btrfs reports another device in stat(2) than in that list.
    same = [pid for place, pid in found if place == exact]
    same = same or [pid for place, pid in found if place.endswith(f":{info.st_ino}")]
    return int(same[0]) if len(same) == 1 and same[0].isdigit() else None


def let_go(fd: int) -> None:
    """Unlock an open file, and close it.

    The explicit unlock matters among threads (sandbox.serve.standby_worker): a child forked by another thread may have
    a copy of the descriptor until its execve, and may take long to join a cgroup.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(directory: int, *, where: str, error: type[errors.CovenantError]) -> Iterator[None]:
    """Hold the directory's lock file, against other threads and processes that write the same state.

    Raises:
        error: Raised when another holds the lock for ``LOCK_SECONDS``, or it cannot be opened.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open("lock", flags, 0o600, dir_fd=directory)
    except OSError as e:
        raise error(f"`{where}/lock` cannot be opened: {e.strerror}", where=where) from e
    with unstopped():
        try:
            if not take(fd, LOCK_SECONDS):
                raise error(f"`{where}` is held by another process", where=where)
            yield
        finally:
            let_go(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(directory: int, name: str, data: bytes | Iterable[bytes], *, mode: int = 0o600) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        for piece in (data,) if isinstance(data, bytes) else data:
            left = memoryview(piece)
            while left:
                left = left[os.write(fd, left) :]
        if mode != 0o600:
            os.fchmod(fd, mode)
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_private(info: os.stat_result, place: str, mode: str, error: type[errors.CovenantError]) -> None:
    if info.st_uid != os.geteuid():
        raise error(f"`{place}` belongs to uid {info.st_uid}, not to uid {os.geteuid()}", where=place)
    if info.st_mode & 0o077:
        found = stat.S_IMODE(info.st_mode)
        raise error(
            f"`{place}` has mode {found:04o}",
            hint=f"chmod {mode} {place}, or for a whole home: covenant state modes --apply",
            where=place,
        )
