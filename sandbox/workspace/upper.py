"""Read the upper layer of a workspace: what the agent changed, as overlayfs left it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

from policy import errors
from policy.workspace.entries import UpperEntry, UpperKind
from sandbox.rootfs import erofs_image

_OPAQUE, _ORIGIN = "trusted.overlay.opaque", "trusted.overlay.origin"
# The mode that the agent gave, where its owner could not read.
_MODE: Final = "trusted.covenant.mode"
_MOST: Final = 1_000_000
# Directories in one another: each is an open descriptor and a call here. A longer path cannot be opened (PATH_MAX).
_DEEPEST: Final = 200
_LONGEST: Final = 4000
_PERMISSIONS: Final = 0o7777
_READABLE: Final = {"file": 0o400, "dir": 0o700}


class _Room:
    """The bytes that are still read for digests."""

    def __init__(self, left: int) -> None:
        self._left = left

    def has(self, size: int) -> bool:
        """Whether a file of this size is read. Its bytes are taken off."""
        if size > self._left:
            return False
        self._left -= size
        return True


def read(top: int, reader: tuple[int, int]) -> list[UpperEntry]:
    """Return every path of the upper layer below an open directory, and let ``reader`` (uid, gid) read all of it.

    The result has the modes that the agent gave. As root: overlayfs keeps its marks in attributes of root.

    Files of more than twice the size of the file system have no digest. Holes and second names take no room in it:
    to read all of them could take days.

    Raises:
        errors.WorkspaceError: it cannot be read, has too many paths, or too deep ones.
    """
    try:
        os.chown(top, *reader)
        system = os.fstatvfs(top)
        found = []
        for entry in _below(top, "", reader, _Room(2 * system.f_blocks * system.f_frsize)):
            found.append(entry)
            if len(found) > _MOST:
                raise errors.WorkspaceError(f"the workspace has more than {_MOST} changes", hint="discard it")
        return found
    except OSError as e:
        raise errors.WorkspaceError(f"the changes of the workspace cannot be read: {e.strerror}") from e


def _below(directory: int, above: str, reader: tuple[int, int], room: _Room) -> Iterator[UpperEntry]:
    if above.count("/") > _DEEPEST or len(above.encode()) > _LONGEST:
        raise errors.WorkspaceError(f"`{above[:80]}...` is too deep in the workspace", hint="discard it")
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        if not is_text(name):
            yield UpperEntry(above + shown(name), "other")
            continue
        entry = _entry(directory, name, f"{above}{name}", reader, room)
        yield entry
        if entry.kind == "dir":
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                yield from _below(fd, f"{entry.path}/", reader, room)
            finally:
                os.close(fd)


def _entry(directory: int, name: str, path: str, reader: tuple[int, int], room: _Room) -> UpperEntry:
    info = os.lstat(name, dir_fd=directory)
    mode, kind = info.st_mode & _PERMISSIONS, _kind(info)
    if kind == "gone":
        return UpperEntry(path, kind)
    if kind not in _READABLE:
        os.chown(name, *reader, dir_fd=directory, follow_symlinks=False)
        return UpperEntry(path, kind, mode, target=os.readlink(name, dir_fd=directory) if kind == "link" else "")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECTORY if kind == "dir" else 0)
    fd = os.open(name, flags, dir_fd=directory)
    try:
        marks = os.listxattr(fd)
        mode = int(os.getxattr(fd, _MODE), 8) if _MODE in marks else mode
        _let_read(fd, mode, _READABLE[kind], reader, noted=_MODE in marks)
        if kind == "dir":
            return UpperEntry(path, kind, mode, opaque=_OPAQUE in marks, copied=_ORIGIN in marks)
        copied, sha256 = _ORIGIN in marks, erofs_image.digest(fd) if room.has(info.st_size) else ""
        return UpperEntry(path, kind, mode, info.st_size, info.st_nlink, copied=copied, sha256=sha256)
    finally:
        os.close(fd)


def _let_read(fd: int, mode: int, needed: int, reader: tuple[int, int], *, noted: bool) -> None:
    """Let the reader read an open file or directory; its own mode is noted in an attribute of root's."""
    os.fchown(fd, *reader)
    if mode & needed != needed and not noted:
        os.setxattr(fd, _MODE, f"{mode:o}".encode())
        os.fchmod(fd, (mode | needed) & 0o777)


def _kind(info: os.stat_result) -> UpperKind:
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
        return "gone"
    if stat.S_ISREG(info.st_mode):
        return "file"
    if stat.S_ISDIR(info.st_mode):
        return "dir"
    return "link" if stat.S_ISLNK(info.st_mode) else "other"


def is_text(name: str) -> bool:
    """Whether a name is UTF-8. No other name is applied."""
    return name.isascii() or not any("\ud800" <= ch <= "\udfff" for ch in name)


def shown(name: str) -> str:
    """Return a name that is no UTF-8 with its bytes written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
