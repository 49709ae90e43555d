"""The supervisor's own copies of packages, by digest: what runs is what was hashed, whatever happens to the source.

A copy is written from the bytes in memory that were verified, synced, and renamed into place whole. Files are 0444
(0555 for the entry of a rust-bin package), directories 0555, owned by root, without extended attributes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from policy.package import Package


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
        making = self._directory / f".making-{uuid.uuid4()}"
        try:
            _write_tree(making, package.files, executable)
            with contextlib.suppress(FileExistsError, OSError):
                os.rename(making, target)
            _sync(self._directory)
        finally:
            if making.exists():
                _remove(making)
        return target


def _write_tree(root: Path, files: Mapping[str, bytes], executable: str) -> None:
    root.mkdir(mode=0o700)
    directories = {root}
    for name in sorted(files):
        path = root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directories.update(p for p in path.parents if p.is_relative_to(root))
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
        with os.fdopen(fd, "wb") as stream:
            stream.write(files[name])
            stream.flush()
            os.fchmod(fd, 0o555 if name == executable else 0o444)
            os.fsync(fd)
    for path in sorted(directories, reverse=True):
        path.chmod(0o555)
        _sync(path)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(root: Path) -> None:
    for path, _, _ in os.walk(root):
        os.chmod(path, 0o700)
    shutil.rmtree(root)
