"""Stores of complete directory trees, named by digests, that several processes make, hold and collect.

    DIR/<kind>/<digest>/root/...     the tree
    DIR/<kind>/<digest>/complete     the digest again, written last: without it the directory does not count

A tree is made in a fresh directory and takes its name in one rename. A shared lock on its directory keeps ``collect``
away. The lock of DIR itself closes the gap between the creation of a directory and its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from policy import errors
from sandbox.kernel import libc, small_files
from sandbox.rootfs import closure_files
from sandbox.storage import atomic_file

# The holder of the lock may be removing all unused directories.
TURN_SECONDS = 120.0


class FreshTree:
    """A directory to fill. Its maker calls ``named`` if the digest is known only afterwards."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.digest = path, digest

    @property
    def root(self) -> Path:
        """Return the directory of the tree itself."""
        return self.path / "root"

    def named(self, digest: str) -> None:
        """Set the digest under which the tree takes its place."""
        self.digest = digest


class TreeStore:
    """The store below one directory, which only its owner can reach (0700).

    Raises:
        errors.HomeError: Raised when the directory is open to others.
    """

    def __init__(self, directory: Path, kinds: Sequence[str]) -> None:
        self.directory, self.kinds = directory, tuple(kinds)
        for folder in (directory, *(directory / kind for kind in kinds)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise errors.HomeError(f"`{directory}` is open to others", hint=f"chmod 0700 {directory}")

    def place(self, kind: str, digest: str) -> Path:
        """Return where the tree of this digest is, complete or not."""
        return self.directory / kind / digest

    def is_complete(self, kind: str, digest: str) -> bool:
        """Whether the tree was made to its end."""
        return is_complete(self.place(kind, digest), digest)

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        """Lock the store, so that ``collect`` never sees a directory between its creation and its lock.

        Raises:
            errors.KeeperError: Raised when another process holds the lock for too long.
        """
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            atomic_file.turn(fd, where=str(self.directory), seconds=TURN_SECONDS)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def fresh(self, kind: str, digest: str = "", *, many_files: bool = False) -> Iterator[FreshTree]:
        """A directory to fill, locked against ``collect``; on success it takes its name in one rename.

        With ``many_files`` one sync of the file system makes all durable. Otherwise the maker syncs its files
        (``write``).

        Raises:
            errors.KernelError: Raised when the directory cannot be put in place.
        """
        parent = self.directory / kind
        fresh = parent / f".new-{secrets.token_hex(8)}"
        with self.gate():
            fresh.mkdir(mode=0o700)
            fd = _lock(fresh, fcntl.LOCK_EX)
        try:
            made = FreshTree(fresh, digest)
            made.root.mkdir()
            os.chmod(made.root, closure_files.DIRECTORY_MODE)
            yield made
            if many_files and fd is not None:
                # A sync of each file would take minutes for a large tree.
                libc.syncfs(fd)
            else:
                _sync_directories(fresh)
            write(fresh / "complete", made.digest.encode() + b"\n", 0o600)
            atomic_file.sync_directory(fresh)
            _take_name(fresh, parent / made.digest, made.digest)
            atomic_file.sync_directory(parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            if fd is not None:
                os.close(fd)

    def hold(self, kind: str, digest: str, make: Callable[[], None], stack: contextlib.ExitStack) -> Path:
        """Return the directory of a complete tree, which ``collect`` leaves alone until ``stack`` is closed.

        ``make`` is called when there is no complete tree.

        Raises:
            errors.HostError: Raised when it is removed each time before it can be held.
        """
        target = self.place(kind, digest)
        for _ in range(8):
            if not is_complete(target, digest):
                make()
            fd = share(target)
            if fd is not None:
                stack.callback(os.close, fd)
                # The directory may have been collected in between; then the name is another's.
                if same(fd, target) and is_complete(target, digest):
                    return target
        raise errors.HostError(f"`{target}` is being removed over and over")

    def collect(
        self, *, unused_seconds: float, keep: Callable[[str, Path], bool], now: float | None = None
    ) -> list[str]:
        """Remove what no process holds and none has used for that long, and what broken makers left; the digests.

        ``keep`` says of a kind and a directory whether it stays all the same. ``now`` is in seconds since the epoch.
        """
        limit = (time.time() if now is None else now) - unused_seconds
        removed = []
        with self.gate():
            for kind in self.kinds:
                for path in sorted((self.directory / kind).iterdir()):
                    # Other processes create and rename directories meanwhile: a missing one is no error.
                    with contextlib.suppress(FileNotFoundError):
                        leftover = path.name.startswith(".")
                        if not leftover and (path.stat().st_mtime > limit or keep(kind, path)):
                            continue
                        if self.remove(path) and not leftover:
                            removed.append(path.name)
        return removed

    def remove(self, path: Path) -> bool:
        """Remove a tree. Returns False if it is gone or a process holds it."""
        fd = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fd is None:
            return False
        try:
            grave = path.parent / f".gone-{secrets.token_hex(8)}"
            os.rename(path, grave)
            shutil.rmtree(grave)
        finally:
            os.close(fd)
        return True


def is_complete(target: Path, digest: str) -> bool:
    """Whether the directory was made to its end."""
    try:
        fd = small_files.open_plain(f"{target}/complete")
    except OSError:
        return False
    try:
        return small_files.to_end(fd) == digest.encode() + b"\n"
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened_record(folder: Path, name: str, *, hint: str) -> Iterator[int]:
    """Open a record beside a tree; the block's end closes it.

    Raises:
        errors.LayerChangedError: Raised when it is missing, no plain file, or cannot be read.
    """
    place = folder / name
    try:
        fd = small_files.open_plain(place)
    except OSError as e:
        raise errors.LayerChangedError(f"`{place}` cannot be read: {e.strerror}", hint=hint, where=str(place)) from e
    try:
        yield fd
    finally:
        os.close(fd)


def record(folder: Path, name: str, *, hint: str) -> bytes:
    """Read a record beside a tree.

    Raises:
        errors.LayerChangedError: As ``opened_record``.
    """
    with opened_record(folder, name, hint=hint) as fd:
        return small_files.to_end(fd)


def write(place: Path, data: bytes, mode: int) -> None:
    """Create a file of a tree, and sync it."""
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as stream:
        stream.write(data)
        stream.flush()
        # Set the mode independent of the umask, and without setuid, setgid or sticky bits of the listing.
        os.fchmod(fd, mode & 0o755)
        os.fsync(fd)


def make_directory(place: Path) -> None:
    """Create a directory of a tree, with the one mode that all have."""
    place.mkdir()
    os.chmod(place, closure_files.DIRECTORY_MODE)


def share(folder: Path) -> int | None:
    """Take a shared lock that keeps ``collect`` away. Returns None if the folder is gone.

    It waits for a process that is removing the folder: that may pause between its lock and its removal for longer than
    any number of retries.

    Raises:
        errors.KeeperError: Raised when another process holds the lock for too long.
    """
    fd = _opened(folder)
    if fd is None:
        return None
    try:
        atomic_file.turn(fd, where=str(folder), seconds=TURN_SECONDS, shared=True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def same(fd: int, path: Path) -> bool:
    """Whether the name still leads to the directory that is open."""
    try:
        now = os.lstat(path)
    except OSError:
        return False
    held = os.fstat(fd)
    return (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino)


def linked(path: Path) -> bool:
    """Whether a file of this tree has a second name, in another tree."""
    for folder, _, names in os.walk(path / "root"):
        for name in names:
            info = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(info.st_mode):
                return info.st_nlink > 1
    return False


def _sync_directories(top: Path) -> None:
    for folder, _, _ in os.walk(top):
        atomic_file.sync_directory(Path(folder))


def _take_name(fresh: Path, target: Path, digest: str) -> None:
    for _ in range(2):
        try:
            os.rename(fresh, target)
        except OSError:
            # Another process was faster, which is as good; or the directory there is not complete.
            if is_complete(target, digest):
                return
            os.rename(target, target.parent / f".broken-{secrets.token_hex(8)}")
        else:
            return
    raise errors.KernelError(f"`{target}` cannot be put in place")


def _opened(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None


def _lock(folder: Path, how: int) -> int | None:
    """Lock the folder. Returns None if it is gone or another process holds the lock."""
    fd = _opened(folder)
    if fd is None:
        return None
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        return None
    return fd
