"""Write one tree into the store, entry by entry, and list what was written.

Bytes are copied in pieces and hashed on the way. Modification times are kept, since Python's byte code names its
source's time; owners, setuid bits and extended attributes are not.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from policy import errors, layers
from policy.layers import LayerEntry
from sandbox.layers import tree_walk
from sandbox.rootfs import closure_files, tree_store

_CHUNK_BYTES = 1 << 20
_SPECIAL = stat.S_ISUID | stat.S_ISGID


class Packing:
    """The entries of a layer that is being made below ``root``.

    ``dropped`` are the files that lost a setuid bit. ``notes`` tell what else the operator should know. ``search`` are
    the directories of its programs, if they are there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._entries: dict[str, LayerEntry] = {}
        self.dropped: list[str] = []
        self.notes: list[str] = []
        self.search: list[str] = []

    def directory(self, path: str) -> None:
        """Make a directory, with those above it. It may be there already.

        Raises:
            errors.LayerError: Raised when the path is refused, or is another kind of entry.
        """
        known = self._entries.get(path)
        if path in ("", "/") or (known is not None and known.kind == "dir"):
            return
        self._new(path, LayerEntry(path, "dir"))
        tree_store.make_directory(Path(f"{self._root}{path}"))

    def link(self, path: str, target: str) -> None:
        """Make a link, with the directories above it. Its target is kept as it is.

        Raises:
            errors.LayerError: Raised when the path is refused or taken.
        """
        known = self._entries.get(path)
        if known is not None and (known.kind, known.target) == ("link", target):
            return
        self._new(path, LayerEntry(path, "link", target=target))
        os.symlink(target, f"{self._root}{path}")

    def file(self, path: str, source: int) -> None:
        """Copy an open regular file, with the directories above it.

        Raises:
            errors.LayerError: Raised when the path is refused or taken, or the file changes meanwhile.
        """
        before = os.fstat(source)
        if not stat.S_ISREG(before.st_mode):
            raise errors.LayerError(f"`{path}` is no plain file", where=path)
        executable = bool(before.st_mode & 0o111)
        self._new(path, LayerEntry(path, "file", executable))
        size, digest = copy(source, Path(f"{self._root}{path}"), executable=executable, mtime_ns=before.st_mtime_ns)
        if tree_walk.identity(os.fstat(source)) != tree_walk.identity(before) or size != before.st_size:
            raise tree_walk.changed(path)
        self._entries[path] = LayerEntry(path, "file", executable, size, digest)
        if before.st_mode & _SPECIAL:
            self.dropped.append(path)

    def tree(self, top: int, prefix: str = "", *, skip: frozenset[str] = frozenset()) -> None:
        """Copy a whole tree to ``prefix``, which is empty or a path.

        Raises:
            errors.LayerError: As ``walk``, or a path is refused or taken.
        """
        self.directory(prefix)
        for found in tree_walk.walk(top, skip=skip):
            path = prefix + found.path
            if stat.S_ISDIR(found.info.st_mode):
                self.directory(path)
            elif stat.S_ISLNK(found.info.st_mode):
                self.link(path, found.target)
            else:
                fd = found.open()
                try:
                    self.file(path, fd)
                finally:
                    os.close(fd)

    def bytes(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Make a file of these bytes.

        Raises:
            errors.LayerError: Raised when the path is refused or taken.
        """
        digest = hashlib.sha256(data).hexdigest()
        self._new(path, LayerEntry(path, "file", executable, len(data), digest))
        mode = closure_files.PROGRAM_MODE if executable else closure_files.DATA_MODE
        tree_store.write(Path(f"{self._root}{path}"), data, mode)

    def has(self, path: str) -> bool:
        """Whether the layer has this path, which is not resolved."""
        return path in self._entries

    def kind(self, path: str) -> str:
        """Return the kind of an entry; empty if there is none."""
        return self._entries[path].kind if path in self._entries else ""

    def entries(self) -> list[LayerEntry]:
        """Return the listing of what was written.

        Raises:
            errors.LayerError: Raised when it has no entry.
        """
        if not self._entries:
            raise errors.LayerError("the tree is empty", hint="name a directory that has files")
        found = sorted(self._entries.values())
        layers.check(found)
        return found

    def _new(self, path: str, entry: LayerEntry) -> None:
        layers.check_path(path)
        if path in self._entries:
            raise errors.LayerError(f"`{path}` comes twice, and its parts differ", where=path)
        self.directory(path.rpartition("/")[0])
        self._entries[path] = entry


def copy(source: int, place: Path, *, executable: bool, mtime_ns: int) -> tuple[int, str]:
    """Copy an open file to a new one with mode and time. Returns size and hex SHA-256."""
    digest, size = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(place, flags, 0o600)
    try:
        while piece := os.read(source, _CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
            left = memoryview(piece)
            while left:
                left = left[os.write(fd, left) :]
        os.fchmod(fd, closure_files.PROGRAM_MODE if executable else closure_files.DATA_MODE)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(fd)
    return size, digest.hexdigest()


def hash_open(source: int) -> tuple[int, str]:
    """Return size and hex SHA-256 of an open file."""
    digest, size = hashlib.sha256(), 0
    while piece := os.read(source, _CHUNK_BYTES):
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()
