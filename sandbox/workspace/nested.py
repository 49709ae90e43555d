"""The parts of a directory that a workspace does not apply: submodules, other checkouts of git, and mounts below it.

``named`` tells a caller of them before a session; it looks at two files alone. The supervisor finds them in its walk
over the directory (sandbox.workspace.masks), and ``hold`` makes them read-only in the overlay: an immutable directory
of the upper layer keeps everything below it as it is, since each copy-up would make a name there (ADR 0104).
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.fs import filesystems, inode_flags
from sandbox.workspace import lower, upper

_MOST: Final = 1 << 20
_PATH: Final = re.compile(r"^\s*path\s*=\s*(.+?)\s*$", re.MULTILINE)
_TEXT: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_LEADS: Final = "gitdir: "
# The repositories of submodules, in that of the directory.
_MODULES: Final = ".git/modules/"


def named(directory: Path) -> dict[str, str]:
    """Return the submodules that are checked out, and the mounts, each with its kind (changes.APART)."""
    top = os.path.realpath(directory)
    found = {path: "checkout" for path in _submodules(top) if os.path.isfile(os.path.join(top, path, ".git"))}
    points = (mount.point for mount in filesystems.mounts() if mount.point.startswith(top + "/"))
    return {**found, **{point[len(top) + 1 :]: "mount" for point in points}}


def _submodules(top: str) -> list[str]:
    try:
        text = _text(os.open(os.path.join(top, ".gitmodules"), _TEXT | os.O_CLOEXEC))
    except OSError:
        return []
    paths = (one.strip('"') for one in _PATH.findall(text))
    return [one for one in paths if not os.path.isabs(one) and ".." not in one.split("/")]


def _text(fd: int) -> str:
    """Read an open file, and close it."""
    try:
        return os.read(fd, _MOST).decode("utf-8", "surrogateescape")
    finally:
        os.close(fd)


def hold(directory: int, layer: int, paths: Iterable[str]) -> tuple[str, ...]:
    """Make directories read-only in an overlay that is not mounted yet, with the repositories of submodules.

    ``directory`` is the lower directory, ``layer`` the upper layer, both open. Returns the held directories that lie in
    no other one. A path is left out when the agent of an earlier run has something else in its place.

    Raises:
        errors.WorkspaceError: there is no room for them, or they are moved meanwhile.
    """
    wanted = frozenset(paths)
    if not wanted:
        return ()
    try:
        # It shows what lies below a mount, as the overlay does.
        below = libc.open_tree_clone(directory)
        try:
            return tuple(
                path for path in _outermost(wanted.union(_repositories(below, wanted))) if _held(below, layer, path)
            )
        finally:
            os.close(below)
    except OSError as e:
        raise errors.WorkspaceError(
            f"the submodules and mounts of the workspace cannot be made read-only: {e.strerror}",
            hint="move nothing in the directory while a run starts; each of them takes an inode of max_mb",
        ) from e


def is_held(layer: int, path: str) -> bool:
    """Whether a path of an open upper layer is held."""
    try:
        fd = libc.openat2(path, _DIRECTORY, dir_fd=layer, resolve=lower.BENEATH)
    except OSError:
        return False
    try:
        return inode_flags.is_immutable(fd)
    finally:
        os.close(fd)


def _repositories(below: int, checkouts: Iterable[str]) -> Iterator[str]:
    """Yield the repository of each submodule, when it lies in that of the directory."""
    for path in checkouts:
        try:
            line = _text(libc.openat2(f"{path}/.git", _TEXT, dir_fd=below, resolve=lower.BENEATH)).rstrip("\n")
        except OSError:
            continue
        found = posixpath.normpath(posixpath.join(path, line.removeprefix(_LEADS)))
        if line.startswith(_LEADS) and found.startswith(_MODULES) and "\0" not in found and _has(below, found):
            yield found


def _has(below: int, path: str) -> bool:
    fd = lower.opened(lower.Tops(below), path)
    if fd is not None:
        os.close(fd)
    return fd is not None


def _outermost(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths that lie in no other one."""
    last = None
    for path in sorted(paths, key=lambda path: path.split("/")):
        if last is None or not path.startswith(f"{last}/"):
            last = path
            yield path


def _held(below: int, layer: int, path: str) -> bool:
    """Make a directory and those above it in the upper layer, as they are in the lower one, and hold the directory."""
    parts, made = path.split("/"), list[tuple[str, os.stat_result]]()
    for depth in range(1, len(parts) + 1):
        one = "/".join(parts[:depth])
        with _entered(below, one) as fd:
            info = os.fstat(fd)
        with _entered(layer, "/".join(parts[: depth - 1])) as above:
            try:
                os.mkdir(parts[depth - 1], 0o700, dir_fd=above)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(parts[depth - 1], dir_fd=above).st_mode):
                    return False
            else:
                made.append((one, info))
    for one, info in reversed(made):
        with _entered(layer, one) as fd:
            upper.mark_made(fd, info)
    with _entered(layer, path) as fd:
        if not inode_flags.is_immutable(fd):
            upper.hold(fd)
    return True


@contextlib.contextmanager
def _entered(top: int, path: str) -> Iterator[int]:
    fd = lower.opened(lower.Tops(top), path)
    if fd is None:
        raise OSError(errno.ENOENT, "a directory was moved meanwhile")
    try:
        yield fd
    finally:
        os.close(fd)
