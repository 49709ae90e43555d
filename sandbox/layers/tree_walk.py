"""Walk a directory tree through descriptors, without following a link and without leaving its file system.

The tree may be another user's, and may change meanwhile: each name is opened below the descriptor of its directory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct

from policy import errors
from sandbox.kernel import libc

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a fifo that took a file's place between lstat and open must not hang us.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Each level keeps a descriptor open.
_MAX_DEPTH = 200
_KINDS = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket"}


class WalkedEntry(Struct, frozen=True):
    """One entry of a tree. ``path`` begins with `/` and is relative to the top; ``target`` is a link's text.

    ``directory`` is the descriptor of the directory that has the entry, valid until the walk goes on.
    """

    path: str
    name: str
    info: os.stat_result
    directory: int
    target: str = ""

    def open(self) -> int:
        """Open a regular file, the one that was seen.

        Raises:
            errors.LayerError: Raised when another file took its place, or it cannot be opened.
        """
        try:
            fd = os.open(self.name, _FILE, dir_fd=self.directory)
        except OSError as e:
            raise errors.LayerError(f"`{self.path}` cannot be read: {e.strerror}", where=self.path) from e
        if identity(os.fstat(fd)) != identity(self.info):
            os.close(fd)
            raise changed(self.path)
        return fd


def changed(path: str) -> errors.LayerError:
    """Return the error for a tree that changes while it is read."""
    return errors.LayerError(
        f"`{path}` changed while it was packed", hint="end what writes there, and repeat", where=path
    )


def identity(info: os.stat_result) -> tuple[int, ...]:
    """Return the fields of an inode that any change of it changes."""
    return info.st_dev, info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def open_top(top: Path) -> int:
    """Open the directory of a tree. No part of its path may be a link: another user could change where it leads.

    Raises:
        errors.LayerError: Raised when it is missing, no directory, or its path goes through a link.
    """
    place = os.path.abspath(top)
    resolve = libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS
    try:
        return libc.openat2(place, _DIRECTORY & ~os.O_NOFOLLOW, resolve=resolve)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise errors.LayerError(
                f"the path `{place}` goes through a link",
                hint=f"see where it leads, and name that: {os.path.realpath(place)}",
                where=place,
            ) from e
        raise errors.LayerError(f"directory `{place}` cannot be read: {os.strerror(e.errno or 0)}", where=place) from e


def walk(top: int, *, skip: Collection[str] = ()) -> Iterator[WalkedEntry]:
    """Yield the entries below an open directory, a directory before its entries, sorted by name within each.

    ``skip`` has paths that are left out with all below them.

    Raises:
        errors.LayerError: Raised for a device, a fifo, a socket, another file system, too many levels, or a directory
            that changes meanwhile.
    """
    device = os.fstat(top).st_dev
    levels = [_Level("", os.dup(top))]
    try:
        while levels:
            level = levels[-1]
            name = next(level.names, None)
            if name is None:
                levels.pop().end()
                continue
            path = f"{level.path}/{name}"
            if path in skip:
                continue
            found = _seen(level, name, path)
            yield found
            if stat.S_ISDIR(found.info.st_mode):
                if found.info.st_dev != device:
                    raise errors.LayerError(f"another file system is mounted at `{path}`", where=path)
                if len(levels) >= _MAX_DEPTH:
                    raise errors.LayerError(f"`{path}` is deeper than {_MAX_DEPTH} levels", where=path)
                levels.append(_Level.below(found))
    finally:
        for level in levels:
            os.close(level.fd)


class _Level:
    """An open directory of a walk, with the names that are still to come."""

    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd = path, fd
        self._before = os.fstat(fd)
        self.names = iter(sorted(os.listdir(fd)))

    @classmethod
    def below(cls, found: WalkedEntry) -> _Level:
        try:
            fd = os.open(found.name, _DIRECTORY, dir_fd=found.directory)
        except OSError:
            raise changed(found.path) from None
        now = os.fstat(fd)
        if (now.st_dev, now.st_ino) != (found.info.st_dev, found.info.st_ino):
            os.close(fd)
            raise changed(found.path)
        return cls(found.path, fd)

    def end(self) -> None:
        now = os.fstat(self.fd)
        os.close(self.fd)
        if identity(now) != identity(self._before):
            raise changed(self.path or "/")


def _seen(level: _Level, name: str, path: str) -> WalkedEntry:
    try:
        info = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
        target = os.readlink(name, dir_fd=level.fd) if stat.S_ISLNK(info.st_mode) else ""
    except OSError:
        raise changed(path) from None
    if (kind := _KINDS.get(stat.S_IFMT(info.st_mode))) is not None:
        raise errors.LayerError(
            f"`{path}` is {kind}, which no layer can have", hint="remove it, or leave it out", where=path
        )
    return WalkedEntry(path, name, info, level.fd, target)
