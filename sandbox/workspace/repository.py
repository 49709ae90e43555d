"""The common directory of git of a linked worktree (git-worktree(1)): found by the caller, checked by the supervisor.

A worktree's `.git` is a file that names a directory of the repository, `COMMON/worktrees/NAME`. Anybody could have
written such a file: an archive, another user, an earlier agent. So the caller opens the common directory with its own
rights, and it is taken only when it names the worktree back, belongs to the owner of the worktree, and lies where the
manifest lets workspaces lie.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from msgspec import Struct

from policy import errors
from sandbox.kernel import libc
from sandbox.workspace import upper

_DOT_GIT: Final = ".git"
_MOST: Final = 8192
_ADMIN: Final = re.compile(r"(/.+)/worktrees/([^/\x00-\x1f\x7f]{1,255})")
_BENEATH: Final = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_XDEV
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
# git writes this into each worktree's directory of the repository.
_COMMON: Final = "../.."
_HINT: Final = "git worktree repair; or give the repository's own directory"


class LinkedRepository(Struct, frozen=True):
    """The common directory of a linked worktree: its path, which file it is, and the worktree's name in it."""

    directory: str
    device: int
    inode: int
    worktree: str


def named(directory: int, path: str) -> tuple[str, str] | None:
    """Return the common directory and the name that the `.git` file of an open directory has. None without one.

    ``path`` is the path of the directory.
    """
    text = _content(directory, _DOT_GIT)
    if text is None or not text.startswith("gitdir: "):
        return None
    found = _ADMIN.fullmatch(os.path.normpath(os.path.join(path, text.removeprefix("gitdir: "))))
    return None if found is None or found[2] in (".", "..") else (found[1], found[2])


def opened(directory: int) -> int | None:
    """Open the common directory that an open directory names, with this process's own rights. None without one.

    The caller closes it. Nothing is checked (``checked``), and no link is followed.
    """
    path = os.readlink(f"/proc/self/fd/{directory}")
    found = named(directory, path)
    if found is None:
        return None
    try:
        return libc.openat2(found[0], _DIRECTORY, resolve=libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS)
    except OSError:
        return None


def checked(directory: int, path: str, common: int) -> LinkedRepository:
    """Check that the open directory ``common`` is that of the linked worktree ``directory``, which is at ``path``.

    Raises:
        errors.WorkspaceError: it is not, or belongs to another user.
    """
    there = os.readlink(f"/proc/self/fd/{common}")
    owner, info = os.fstat(directory), os.fstat(common)
    found = named(directory, path)
    if found is None or found[0] != there or not upper.is_text(there):
        raise errors.WorkspaceError(f"`{path}` is no worktree of `{upper.shown(there)}`", hint=_HINT)
    name = found[1]
    if there == path or there.startswith(f"{path}/") or path.startswith(f"{there}/"):
        raise errors.WorkspaceError(f"`{path}` and its repository `{there}` lie in one another", hint=_HINT)
    admin = _directory(common, f"worktrees/{name}")
    if admin is None or not all(_is_owned(one, owner) for one in (info, os.fstat(admin))):
        if admin is not None:
            os.close(admin)
        raise errors.WorkspaceError(
            f"the repository `{there}` belongs to another user than `{path}`, or has no worktree `{name}`", hint=_HINT
        )
    try:
        back, shared = _content(admin, "gitdir"), _content(admin, "commondir")
    finally:
        os.close(admin)
    back = back and os.path.normpath(os.path.join(there, "worktrees", name, back))
    if back != f"{path}/{_DOT_GIT}" or shared != _COMMON:
        raise errors.WorkspaceError(f"the worktree `{name}` of `{there}` is not at `{path}`", hint=_HINT)
    if _content(common, "HEAD") is None or not all(_has_directory(common, one) for one in ("objects", "refs")):
        raise errors.WorkspaceError(f"`{there}` is no repository of git", hint=_HINT)
    return LinkedRepository(there, info.st_dev, info.st_ino, name)


def file_inside(worktree: str, place: str) -> bytes:
    """Return the `.git` file that the agent sees, where the common directory is at ``place``."""
    return f"gitdir: {place}/worktrees/{worktree}\n".encode()


def path_of(directory: Path) -> str:
    """Return the path of the common directory that a directory names, as a caller sees it. Empty without one."""
    try:
        fd = os.open(directory, _DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        common = opened(fd)
        if common is None:
            return ""
        try:
            return os.readlink(f"/proc/self/fd/{common}")
        finally:
            os.close(common)
    finally:
        os.close(fd)


def _is_owned(info: os.stat_result, owner: os.stat_result) -> bool:
    return stat.S_ISDIR(info.st_mode) and (info.st_uid, info.st_gid) == (owner.st_uid, owner.st_gid)


def _directory(top: int, path: str) -> int | None:
    try:
        return libc.openat2(path, _DIRECTORY | os.O_NOFOLLOW, dir_fd=top, resolve=_BENEATH)
    except OSError:
        return None


def _has_directory(top: int, path: str) -> bool:
    fd = _directory(top, path)
    if fd is None:
        return False
    os.close(fd)
    return True


def _content(top: int, name: str) -> str | None:
    """Return the text of a small file, without its last newline. None where there is none, or it is something else."""
    try:
        fd = libc.openat2(name, _FILE, dir_fd=top, resolve=_BENEATH)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        raw = os.read(fd, _MOST + 1)
    finally:
        os.close(fd)
    text = raw.decode("utf-8", "replace").removesuffix("\n")
    return text if len(raw) <= _MOST and "\n" not in text and "\ufffd" not in text else None
