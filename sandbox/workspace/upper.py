"""Read the upper layer of a workspace: what the agent changed, as overlayfs left it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

from policy import errors
from policy.workspace.entries import UpperEntry, UpperKind
from sandbox.kernel.fs import inode_flags
from sandbox.rootfs import erofs_image

_OPAQUE, _ORIGIN = "trusted.overlay.opaque", "trusted.overlay.origin"
# The mode that the agent gave, where its owner could not read.
_MODE: Final = "trusted.covenant.mode"
# The mode of a directory that the supervisor made, and the mark of a read-only one (sandbox.workspace.nested).
_MADE, _HELD = "trusted.covenant.made", "trusted.covenant.held"
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

    The result has the modes that the agent gave. As root: overlayfs keeps its marks in attributes of root. Directories
    that the supervisor made are left out where the agent changed nothing. They are read-only no more.

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
        entry, is_made = _entry(directory, name, f"{above}{name}", reader, room)
        if not is_made:
            yield entry
        if entry.kind == "dir":
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                for one in _below(fd, f"{entry.path}/", reader, room):
                    if is_made:
                        is_made = False
                        yield entry
                    yield one
            finally:
                os.close(fd)


def _entry(directory: int, name: str, path: str, reader: tuple[int, int], room: _Room) -> tuple[UpperEntry, bool]:
    """Return the entry of a name. True: it is a directory that the supervisor made, and the agent did not change it."""
    info = os.lstat(name, dir_fd=directory)
    mode, kind = info.st_mode & _PERMISSIONS, _kind(info)
    if kind == "gone":
        return UpperEntry(path, kind), False
    if kind not in _READABLE:
        os.chown(name, *reader, dir_fd=directory, follow_symlinks=False)
        target = os.readlink(name, dir_fd=directory) if kind == "link" else ""
        return UpperEntry(path, kind, mode, target=target), False
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECTORY if kind == "dir" else 0)
    fd = os.open(name, flags, dir_fd=directory)
    try:
        marks = os.listxattr(fd)
        made = os.getxattr(fd, _MADE) if _MADE in marks else b""
        if _HELD in marks:
            inode_flags.set_immutable(fd, False)
            os.removexattr(fd, _HELD)
        mode = int(os.getxattr(fd, _MODE), 8) if _MODE in marks else mode
        _let_read(fd, mode, _READABLE[kind], reader, noted=_MODE in marks)
        copied, opaque = bool(made) or _ORIGIN in marks, _OPAQUE in marks
        if kind == "dir":
            is_made = made == f"{mode:o}".encode() and not opaque
            return UpperEntry(path, kind, mode, opaque=opaque, copied=copied), is_made
        sha256 = erofs_image.digest(fd) if room.has(info.st_size) else ""
        return UpperEntry(path, kind, mode, info.st_size, info.st_nlink, copied=copied, sha256=sha256), False
    finally:
        os.close(fd)


def mark_made(fd: int, like: os.stat_result) -> None:
    """Give an open directory of the upper layer, which the supervisor made, owner, mode and times of the lower one."""
    mode = like.st_mode & _PERMISSIONS
    os.fchown(fd, like.st_uid, like.st_gid)
    os.fchmod(fd, mode)
    os.setxattr(fd, _MADE, f"{mode:o}".encode())
    os.utime(fd, ns=(like.st_atime_ns, like.st_mtime_ns))


def hold(fd: int) -> None:
    """Make an open directory of the upper layer read-only, until the layer is read."""
    os.setxattr(fd, _HELD, b"")
    inode_flags.set_immutable(fd, True)


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
