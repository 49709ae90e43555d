"""Granted host paths: found component by component, through directories that only root can change.

A right never follows a name that others control (decisions.md): a component that someone else may write could be
swapped for anything between the check and the mount. What is mounted is the descriptor that was checked. Links are
followed only where the caller asks for it, before the walk, by ``host_links``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from typing import Literal

from msgspec import structs

from policy import errors
from policy.data.types import NeverGrantable
from policy.host import GrantedPath
from policy.rules import never as rule
from sandbox.kernel.fs import filesystems, hanging
from sandbox.rootfs import covered, host_links, writable_size

_NO_TABLE = NeverGrantable(0, {}, {})
_OPEN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

# File systems through which the kernel itself is read or steered, wherever they are mounted.
KERNEL_FILESYSTEMS = frozenset(
    {"autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"}
    | {"fusectl", "mqueue", "nsfs", "proc", "pstore", "securityfs", "selinuxfs", "sysfs", "tracefs"}
)


def open_granted(
    path: str,
    *,
    owners: Collection[int] = (),
    never: Mapping[str, str] | None = None,
    where: str = "",
    writing: bool = False,
    beside: Collection[str] = (),
    follow: bool = False,
) -> tuple[int, GrantedPath]:
    """Open a granted file or directory as O_PATH, and return the descriptor with the fact. The caller closes it.

    ``owners`` are uids trusted besides 0. ``never`` maps a path to the reason why it, its descendants and its ancestors
    are never granted. ``where`` is used in errors. For ``writing`` the fact has the most bytes that can be written.
    ``beside`` are paths granted for writing, which may be mounts inside a path for reading. With ``follow``, links of
    root are followed, and the fact lists them.

    Raises:
        errors.GrantedPathError: Raised when the path cannot be granted on this host.
        errors.NeverGrantableError: Raised when ``never`` forbids the path.
    """
    trusted = frozenset(owners) | {0}
    _check_spelling(path, where)
    check_never(path, never or {}, where)
    with hanging.within(f"the file system of granted path `{path}`"):
        real, links = host_links.resolve(path, never or {}, where) if follow else (path, ())
        if not links:
            return _walk(path, trusted, where, writing=writing, beside=beside)
        try:
            check_never(real, never or {}, where)
            fd, fact = _walk(real, trusted, where, writing=writing, beside=beside)
        except (errors.GrantedPathError, errors.NeverGrantableError) as e:
            e.message = f"path `{path}` leads to `{real}`: {e.message}"
            raise
        return fd, structs.replace(fact, path=path, real=real, links=links)


def _walk(
    path: str, trusted: frozenset[int], where: str, *, writing: bool, beside: Collection[str]
) -> tuple[int, GrantedPath]:
    fd = os.open("/", _OPEN | os.O_DIRECTORY)
    try:
        parts = path.strip("/").split("/")
        for depth, part in enumerate(parts):
            at, last = "/" + "/".join(parts[: depth + 1]), depth == len(parts) - 1
            below = _step(fd, part, path, at, where)
            os.close(fd)
            fd = below
            info = os.fstat(fd)
            _check_kind(info, path, at, last=last, where=where)
            _check_hands(info, path, at, trusted, last=last, where=where)
        info = os.fstat(fd)
        filesystem = filesystem_of(info.st_dev)
        if filesystem in KERNEL_FILESYSTEMS:
            raise errors.GrantedPathError(f"path `{path}` lies on `{filesystem}` and is never granted", where=where)
        covered.check(fd, path, beside=beside, where=where)
        bound = writable_size.of(fd, path) if writing else writable_size.SizeLimit()
        kind: Literal["dir", "file"] = "dir" if stat.S_ISDIR(info.st_mode) else "file"
        device = info.st_dev if writing else 0
        return os.dup(fd), GrantedPath(path, kind, bound.mb, bound.lacking, device=device)
    finally:
        os.close(fd)


def look_up(
    path: str,
    *,
    owners: Collection[int] = (),
    never: Mapping[str, str] | None = None,
    where: str = "",
    writing: bool = False,
    beside: Collection[str] = (),
    follow: bool = False,
) -> GrantedPath:
    """Return only the fact of ``open_granted``."""
    fd, fact = open_granted(
        path, owners=owners, never=never, where=where, writing=writing, beside=beside, follow=follow
    )
    os.close(fd)
    return fact


def check_never(path: str, never: Mapping[str, str], where: str = "") -> None:
    """Apply rule 1 with facts of the host: refuse a path that is in ``never``, inside one of these, or contains one.

    Raises:
        errors.NeverGrantableError: Raised with the tree and its reason.
    """
    rule.check(path, _NO_TABLE, never, grant=path, where=where)


def _check_spelling(path: str, where: str) -> None:
    if not path.startswith("/") or os.path.normpath(path) != path or path.startswith("//") or "\0" in path:
        raise errors.GrantedPathError(f"path `{path}` is not absolute and normalised", where=where)


def _step(fd: int, part: str, path: str, at: str, where: str) -> int:
    if not part:
        return os.dup(fd)
    try:
        return os.open(part, _OPEN, dir_fd=fd)
    except OSError as e:
        hint = "make it, or take it out of the manifest" if isinstance(e, FileNotFoundError) else ""
        raise errors.GrantedPathError(
            f"path `{path}` cannot be granted: `{at}`: {e.strerror}", hint=hint, where=where
        ) from e


def _check_kind(info: os.stat_result, path: str, at: str, *, last: bool, where: str) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise errors.GrantedPathError(
            f"path `{path}` leads through symlink `{at}`",
            hint=f"grant `{os.path.realpath(path)}` instead",
            where=where,
        )
    if not (stat.S_ISDIR(info.st_mode) or (last and stat.S_ISREG(info.st_mode))):
        what = "neither a file nor a directory" if last else "not a directory"
        raise errors.GrantedPathError(f"path `{path}` cannot be granted: `{at}` is {what}", where=where)


def _check_hands(info: os.stat_result, path: str, at: str, trusted: Collection[int], *, last: bool, where: str) -> None:
    if info.st_uid not in trusted:
        raise errors.GrantedPathError(
            f"path `{path}` cannot be granted: `{at}` belongs to uid {info.st_uid}",
            hint=f"chown root {at}, or name that uid in path_owners of the configuration",
            where=where,
        )
    # In a sticky directory of root no user can move another's entries, so a path may lead through it. The granted path
    # itself must not be a directory where every user can create entries.
    passable = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX and info.st_uid == 0 and not last
    if info.st_mode & 0o022 and not passable:
        raise errors.GrantedPathError(
            f"path `{path}` cannot be granted: `{at}` can be written by others",
            hint=f"grant a directory below {at}" if info.st_mode & stat.S_ISVTX else f"chmod go-w {at}",
            where=where,
        )


def filesystem_of(device: int) -> str:
    """The type of the file system with this device number, empty when the mount table does not show it.

    btrfs and overlayfs give files other numbers than their mount; kernel file systems do not.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in filesystems.lines():
        left, _, right = line.partition(" - ")
        if left.split(" ")[2] == number:
            return right.split(" ", 1)[0]
    return ""
