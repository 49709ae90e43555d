"""The supervisor's own copies of packages, by digest: an agent runs the hashed bytes, even if the source changes.

A copy is written from the bytes in memory that were verified, synced, and renamed into place whole. Files are 0444
(0555 for the entry of a rust-bin package), directories 0555, owned by root, without extended attributes. Links are
made with their signed text.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from policy.package import Package
from sandbox import progress
from sandbox.storage import atomic_file

_MAKING = ".making-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class PackageStore:
    """A directory of package copies below COVENANT_STATE."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory

    def put(self, package: Package, *, executable: str = "") -> Path:
        """The directory that holds exactly the package's files; ``executable`` names the one file made 0555."""
        target = self._directory / (f"{package.digest}-x" if executable else package.digest)
        if target.exists():
            return target
        making = self._directory / f"{_MAKING}{uuid.uuid4()}"
        with self._gate():
            making.mkdir(mode=0o700)
            lock = os.open(making, _DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with progress.step("copying the package"):
                _write_tree(making, package, executable)
            with contextlib.suppress(FileExistsError, OSError):
                os.rename(making, target)
            atomic_file.sync_directory(self._directory)
        finally:
            # A sweep of another process takes an unlocked copy for a dead maker's, so the copy goes before its lock.
            if making.exists():
                _remove(making)
            os.close(lock)
        return target

    def sweep(self) -> None:
        """Remove the copies whose makers died while they made them."""
        with self._gate():
            for path in self._directory.glob(f"{_MAKING}*"):
                # A live maker holds the lock, or has just given the copy its name.
                with contextlib.suppress(FileNotFoundError, BlockingIOError), _opened(path) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path)

    @contextlib.contextmanager
    def _gate(self) -> Iterator[None]:
        """Lock the store, so that ``sweep`` never sees a copy between its creation and its lock.

        Raises:
            errors.KeeperError: Raised when another process holds the lock for too long.
        """
        with _opened(self._directory) as fd:
            atomic_file.turn(fd, where=str(self._directory))
            yield


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, _DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_tree(root: Path, package: Package, executable: str) -> None:
    files, directories = package.files, {root}
    for name in package.digests:
        path = root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directories.update(p for p in path.parents if p.is_relative_to(root))
    # INVARIANT: no path of a package has a link in front of its last part (policy.package.check_paths), so nothing is
    # written through a link.
    for name, text in package.links.items():
        os.symlink(text, root / name)
    for name in files:
        path = root / name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
        with os.fdopen(fd, "wb") as stream:
            stream.write(files[name])
            stream.flush()
            os.fchmod(fd, 0o555 if name == executable else 0o444)
            os.fsync(fd)
    for path in sorted(directories, reverse=True):
        path.chmod(0o555)
        atomic_file.sync_directory(path)


def _remove(root: Path) -> None:
    for path, _, _ in os.walk(root):
        os.chmod(path, 0o700)
    shutil.rmtree(root)
