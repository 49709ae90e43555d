"""Read a package directory once, into memory, trusting nothing about it.

Every name is opened beneath the descriptor of its directory, one component at a time, without following symlinks or
crossing mounts (openat2(2)). Only regular files are read, each once, within the bounds of ``policy.package``. Of a
symlink the text alone is read, and never followed here: ``policy.symlinks`` decides where it leads. A file that
changes during the read is refused. The returned bytes are hashed, verified, parsed and copied for the run, so that
no other process can put other bytes in between.

A hard link is read like any file. It names bytes, and a package is nothing but bytes. Later writes through the link's
other names do not matter, since the copy runs. Refusing it would break checkouts and package stores that link, and
would not prove who can write the file.

Nothing is skipped: a hidden file or a ``__pycache__`` is part of the package, and is refused later when the statement
does not list it. Empty directories hold no bytes and do not exist in the copy that runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from policy import errors
from policy import package as packages
from sandbox.kernel import libc

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a fifo that took a file's place between lstat and open must not hang us.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# The one pair of flags with which RESOLVE_NO_SYMLINKS opens a symlink itself (openat2(2)).
_LINK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_RESOLVE = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS | libc.RESOLVE_NO_XDEV
_KINDS = {
    stat.S_IFLNK: "a symlink",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
}
_REASONS = {
    errno.ELOOP: "it is a symlink",
    errno.EXDEV: "another file system is mounted there",
    errno.ENOENT: "it went away while the package was read",
    errno.ENOTDIR: "it changed while the package was read",
}


def read(path: Path | int) -> packages.Package:
    """The package in a directory, given as a path or as an open descriptor (which stays open).

    Raises:
        errors.PackageError: anything but plain files, directories and links within the package, a refused name, too
            many files or bytes, or a file that changed while it was read.
    """
    reader = _walked(open_entry(".", ".", path, _DIRECTORY) if isinstance(path, int) else _opened(path))
    return packages.Package(reader.files, reader.envelope, reader.links)


def manifest_and_envelope(path: Path) -> tuple[bytes, bytes | None]:
    """Return the manifest and the envelope of a package, None where it has none, and read no other file of it.

    Raises:
        errors.PackageError: as ``read``, about these two, or there is no manifest.
    """
    root = _opened(path)
    try:
        reader = _Reader()
        for name in (packages.MANIFEST_NAME, packages.ENVELOPE_NAME):
            try:
                seen = os.stat(name, dir_fd=root, follow_symlinks=False)
            except FileNotFoundError as e:
                if name == packages.ENVELOPE_NAME:
                    continue
                raise _refused(name, e) from e
            except OSError as e:
                raise _refused(name, e) from e
            if not stat.S_ISREG(seen.st_mode):
                kind = _KINDS.get(stat.S_IFMT(seen.st_mode), "no plain file")
                raise errors.PackageError(f"`{name}` is {kind}", hint="take it out of the package", where=name)
            reader.take(name, name, root, seen)
    finally:
        os.close(root)
    return reader.files[packages.MANIFEST_NAME], reader.envelope


def files_of(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files and links of a directory that is a part of a package and lies outside of one.

    There are none where it is absent. Where the links lead is not looked at.

    Raises:
        errors.PackageError: as ``read``.
    """
    if not os.path.lexists(path):
        return {}, {}
    reader = _walked(_opened(path))
    return reader.files, reader.links


def _opened(path: Path) -> int:
    try:
        return os.open(path, _DIRECTORY)
    except OSError as e:
        # O_NOFOLLOW with O_DIRECTORY says ENOTDIR for a symlink.
        symlink = e.errno in {errno.ELOOP, errno.ENOTDIR} and path.is_symlink()
        reason = "it is a symlink" if symlink else e.strerror
        hint = f"have uid {os.geteuid()} read it"
        if e.errno in {errno.ENOTDIR, errno.ENOENT}:
            hint = "give the directory that contains agent.toml"
        if symlink:
            hint = "give the directory that it leads to"
        raise errors.PackageError(f"package `{path}` cannot be read: {reason}", hint=hint, where=str(path)) from e


def _walked(root: int) -> _Reader:
    """Read a directory, and close it."""
    try:
        reader = _Reader()
        reader.walk(root, "", depth=1)
    finally:
        os.close(root)
    return reader


@contextlib.contextmanager
def beside(path: Path | int) -> Iterator[int | None]:
    """Open the directory that contains a package, to find its children there. Yields None where it cannot be opened."""
    try:
        place, within = ("..", path) if isinstance(path, int) else (str(path / ".."), None)
        above = os.open(place, _DIRECTORY, dir_fd=within)
    except OSError:
        yield None
        return
    try:
        yield above
    finally:
        os.close(above)


class _Reader:
    """One walk: what it has read so far, and what it may still read."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.envelope: bytes | None = None
        self._bytes = 0
        self._entries = 0

    def walk(self, directory: int, prefix: str, *, depth: int) -> None:
        if depth > packages.MAX_DEPTH:
            message = f"the path `{prefix[:64]}...` is deeper than {packages.MAX_DEPTH} levels"
            raise errors.PackageError(message, hint="take it out of the package")
        try:
            names = self._names(directory)
        except OSError as e:
            raise _refused(prefix or ".", e) from e
        for name in names:
            path = prefix + name
            if path != packages.ENVELOPE_NAME:
                packages.check_path(path)
            before = _lstat(name, path, directory)
            if stat.S_ISDIR(before.st_mode):
                fd = open_entry(name, path, directory, _DIRECTORY)
                try:
                    self.walk(fd, path + "/", depth=depth + 1)
                finally:
                    os.close(fd)
            elif stat.S_ISREG(before.st_mode):
                self.take(name, path, directory, before)
            elif stat.S_ISLNK(before.st_mode) and path != packages.ENVELOPE_NAME:
                self._bytes += before.st_size
                packages.check_size(files=self._count() + 1, total_bytes=self._bytes)
                self.links[path] = _text(name, path, directory, before)
            else:
                kind = _KINDS.get(stat.S_IFMT(before.st_mode), "no plain file")
                raise errors.PackageError(f"`{path}` is {kind}", hint="take it out of the package", where=path)

    def _count(self) -> int:
        return len(self.files) + len(self.links)

    def _names(self, directory: int) -> list[str]:
        """The directory's names, sorted, counted before they are kept."""
        names = []
        with os.scandir(directory) as entries:
            for entry in entries:
                self._entries += 1
                # Directories are not files of a package, but a tree of empty ones must end somewhere too.
                if self._entries > 2 * packages.MAX_FILES:
                    packages.check_size(files=self._entries, total_bytes=0)
                names.append(entry.name)
        return sorted(names)

    def take(self, name: str, path: str, directory: int, seen: os.stat_result) -> None:
        """Read the regular file that ``seen`` was told of."""
        is_envelope = path == packages.ENVELOPE_NAME
        if is_envelope:
            packages.check_envelope_size(seen.st_size)
        else:
            self._bytes += seen.st_size
            packages.check_size(files=self._count() + 1, total_bytes=self._bytes)
        fd = open_entry(name, path, directory, _FILE)
        try:
            data = _read_unchanged(fd, path, seen)
        except OSError as e:
            raise _refused(path, e) from e
        finally:
            os.close(fd)
        if is_envelope:
            self.envelope = data
        else:
            self.files[path] = data


def _read_unchanged(fd: int, path: str, seen: os.stat_result) -> bytes:
    """All bytes of an open file that is, before and after, the one that ``lstat`` saw."""
    before = os.fstat(fd)
    chunks = []
    # One byte more than was promised, so that growth shows.
    left = seen.st_size + 1
    while left > 0 and (chunk := os.read(fd, min(left, 1 << 20))):
        chunks.append(chunk)
        left -= len(chunk)
    data = b"".join(chunks)
    after = os.fstat(fd)
    if not (_identity(seen) == _identity(before) == _identity(after)) or len(data) != seen.st_size:
        raise errors.PackageError(f"`{path}` changed while it was read", hint="try again", where=path)
    return data


def _text(name: str, path: str, directory: int, seen: os.stat_result) -> str:
    """The text of the symlink that ``lstat`` saw. A symlink's text is its inode's for good."""
    fd = open_entry(name, path, directory, _LINK)
    try:
        found = os.fstat(fd)
        if _identity(found) != _identity(seen):
            raise errors.PackageError(f"`{path}` changed while it was read", hint="try again", where=path)
        return os.readlink("", dir_fd=fd)
    except OSError as e:
        raise _refused(path, e) from e
    finally:
        os.close(fd)


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return (info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _lstat(name: str, path: str, directory: int) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as e:
        raise _refused(path, e) from e


def open_entry(name: str, path: str, directory: int, flags: int) -> int:
    """Open a file or a directory of a package."""
    try:
        return libc.openat2(name, flags, dir_fd=directory, resolve=_RESOLVE)
    except OSError as e:
        raise _refused(path, e) from e


def _refused(path: str, error: OSError) -> errors.PackageError:
    reason = _REASONS.get(error.errno or 0, error.strerror)
    hint = f"have uid {os.geteuid()} read it, or take it out of the package"
    if error.errno == errno.EXDEV:
        hint = "umount it, or copy the package and sign the copy"
    elif error.errno in {errno.ENOENT, errno.ENOTDIR}:
        hint = "try again"
    return errors.PackageError(f"`{path}` cannot be read: {reason}", hint=hint, where=path)
