"""Read the caller's directory, as the caller: the paths that a workspace's changes are compared with."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import structs

from policy.workspace.entries import AppliedPath, LowerEntry, LowerKind, LowerView, UpperEntry
from sandbox.kernel import libc
from sandbox.rootfs import erofs_image
from sandbox.workspace import upper

BENEATH: Final = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_XDEV
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# What is below it is the common directory of git, where the workspace is a linked worktree.
REPOSITORY: Final = ".git"
_PERMISSIONS: Final = 0o7777


class Tops(NamedTuple):
    """The open directory of a workspace, and the common directory of git that is shown as its `.git`; -1 without."""

    directory: int
    repository: int = -1

    def of(self, path: str) -> tuple[int, str]:
        """Return the open directory that has the directory ``path``, and its path from there."""
        if self.repository >= 0 and (path + "/").startswith(f"{REPOSITORY}/"):
            return self.repository, path[len(REPOSITORY) + 1 :] or "."
        return self.directory, path or "."

    def all(self) -> list[int]:
        """Return the open directories."""
        return [fd for fd in self if fd >= 0]


class _Wanted(NamedTuple):
    """The files that are read for their digests: of the size of a new file, and those that an apply wrote."""

    sizes: Collection[int]
    applied: Mapping[str, AppliedPath]

    def has(self, base: LowerEntry, beside: UpperEntry | None) -> bool:
        """Whether a file is read that the upper layer removes (None, ``gone``), or has something else in its place."""
        own = self.applied.get(base.path)
        if own is not None and own.size == base.size:
            return True
        if beside is None or beside.kind == "gone":
            return base.size in self.sizes
        return bool(beside.sha256) and base.size == beside.size


def view(top: Tops, entries: Sequence[UpperEntry], applied: Mapping[str, AppliedPath]) -> LowerView:
    """Return what the comparison needs of the open directories ``top``. ``applied`` are paths that applies wrote.

    Raises:
        OSError: something cannot be read.
    """
    found: dict[str, LowerEntry] = {}
    names: dict[str, tuple[str, ...]] = {}
    changed: dict[str, int] = {}
    # A removed file of the size of a new one may be the same file under another name.
    wanted = _Wanted(frozenset(one.size for one in entries if one.sha256 and one.size), applied)
    for above, inside in _by_directory(entries):
        fd = opened(top, above)
        if fd is None:
            continue
        try:
            names[above] = tuple(map(upper.shown, os.listdir(fd)))
            changed[above] = os.fstat(fd).st_ctime_ns
            for one in inside:
                base = _entry(fd, one.path, one, wanted)
                if base is None:
                    continue
                found[one.path] = base
                if base.kind == "dir" and (one.kind != "dir" or one.opaque):
                    found.update((below.path, below) for below in _tree(top, one.path, wanted))
        finally:
            os.close(fd)
    return LowerView(found, names, changed)


def _by_directory(entries: Sequence[UpperEntry]) -> Iterator[tuple[str, list[UpperEntry]]]:
    by_directory: dict[str, list[UpperEntry]] = {}
    for one in entries:
        by_directory.setdefault(one.path.rpartition("/")[0], []).append(one)
    yield from by_directory.items()


def opened(top: Tops, path: str) -> int | None:
    """Open a directory below ``top``, of the same mount and through no link. None where there is none."""
    try:
        above, inside = top.of(path)
        return libc.openat2(inside, _DIRECTORY, dir_fd=above, resolve=BENEATH)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
            return None
        raise


def entry(directory: int, path: str) -> LowerEntry | None:
    """Return what the open directory of a path has under its last name, without a digest. None for nothing."""
    try:
        info = os.lstat(path.rpartition("/")[2], dir_fd=directory)
    except FileNotFoundError:
        return None
    other_mount = stat.S_ISDIR(info.st_mode) and info.st_dev != os.fstat(directory).st_dev
    kind = "other" if other_mount else _kind(info)
    mode = info.st_mode & _PERMISSIONS
    # A target that is no UTF-8 differs from each that is applied.
    target = upper.shown(os.readlink(path.rpartition("/")[2], dir_fd=directory)) if kind == "link" else ""
    times = (info.st_ctime_ns, info.st_mtime_ns)
    return LowerEntry(path, kind, mode, info.st_size, info.st_nlink, *times, info.st_dev, info.st_ino, target=target)


def _entry(directory: int, path: str, beside: UpperEntry | None, wanted: _Wanted) -> LowerEntry | None:
    """Return the entry, with its digest where the other side has a file of the same size: this one, or a new one."""
    base = entry(directory, path)
    if base is None or base.kind != "file" or not wanted.has(base, beside):
        return base
    fd = os.open(path.rpartition("/")[2], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
    try:
        return structs.replace(base, sha256=erofs_image.digest(fd))
    finally:
        os.close(fd)


def _tree(top: Tops, path: str, wanted: _Wanted) -> Iterator[LowerEntry]:
    """Yield everything below a directory."""
    fd = opened(top, path)
    if fd is None:
        return
    try:
        below: Collection[LowerEntry] = [
            one
            for name in sorted(os.listdir(fd))
            if (
                one := _entry(fd, f"{path}/{name}", None, wanted)
                if upper.is_text(name)
                else LowerEntry(upper.shown(f"{path}/{name}"), "other")
            )
        ]
    finally:
        os.close(fd)
    for one in below:
        yield one
        if one.kind == "dir":
            yield from _tree(top, one.path, wanted)


def _kind(info: os.stat_result) -> LowerKind:
    if stat.S_ISREG(info.st_mode):
        return "file"
    if stat.S_ISDIR(info.st_mode):
        return "dir"
    return "link" if stat.S_ISLNK(info.st_mode) else "other"
