"""The walk over a workspace: its masked files, each an empty file of a layer over the caller's directory, and the parts
of it whose changes are not applied.
"""

from __future__ import annotations

import errno
import os
import types
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from policy import errors
from policy.workspace import globs
from sandbox.kernel import libc
from sandbox.workspace import lower, upper

_MOST_NAMES: Final = 2_000_000
_EMPTY_MODE: Final = 0o444
EMPTY: Final[Mapping[str, bytes]] = types.MappingProxyType({})


class Walk(NamedTuple):
    """The masked files, and the parts that are not applied: each with its kind (policy.workspace.changes.APART).

    ``apart`` has their paths as they are shown, ``held`` as they are.
    """

    hidden: list[str]
    apart: dict[str, str]
    held: list[str]


def found(directory: int, patterns: tuple[str, ...]) -> list[str]:
    """Return the masked files alone (``walk``)."""
    return walk(directory, patterns).hidden


def walk(directory: int, patterns: tuple[str, ...], above: str = "") -> Walk:
    """Find the relative paths of the files and links below an open directory that a pattern names.

    Patterns take the directory for ``above``, which ends with a slash unless it is empty. A directory with a `.git`
    file is another checkout.

    No link is followed, and no other mount entered, also when the owner moves them there meanwhile.

    Raises:
        errors.WorkspaceError: there are too many names, or a directory cannot be read.
    """
    match, last = globs.matching(patterns), globs.last_names(patterns)
    hidden, mounts, checkouts = list[str](), list[str](), list[str]()
    try:
        for path, name in _files(directory, "objects" if above else "", mounts):
            # A name that is no UTF-8 is matched as it is shown.
            if (last is None or last.may_be(name)) and match(above + upper.shown(path)):
                hidden.append(path)
            if name == lower.REPOSITORY and path != name:
                checkouts.append(path.rpartition("/")[0])
        apart = dict.fromkeys(map(upper.shown, checkouts), "checkout")
        apart |= dict.fromkeys(map(upper.shown, mounts), "mount")
        return Walk(hidden, apart, [*checkouts, *mounts])
    except OSError as e:
        raise errors.WorkspaceError(f"the workspace cannot be looked through: {e.strerror}") from e


def _files(top: int, leaves_out: str = "", mounts: list[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the path of each file and link, and its last name in lower case.

    Objects of git have names of digits, and are left out, as is the directory ``leaves_out``. Directories of other
    mounts are added to ``mounts``.
    """
    pending, seen = [""], 0
    while pending:
        above = pending.pop()
        fd = lower.opened(lower.Tops(top), above)
        if fd is None:
            if mounts is not None and _is_mount(top, above):
                mounts.append(above)
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _MOST_NAMES:
                        raise errors.WorkspaceError(
                            f"the workspace has more than {_MOST_NAMES} names", hint="take a part of it"
                        )
                    path = f"{above}/{entry.name}" if above else entry.name
                    if not entry.is_dir(follow_symlinks=False):
                        yield path, entry.name.lower()
                    elif not path.endswith(".git/objects") and path != leaves_out:
                        pending.append(path)
        finally:
            os.close(fd)


def _is_mount(top: int, path: str) -> bool:
    """Whether a directory that cannot be opened is one of another mount."""
    try:
        beneath = lower.BENEATH & ~libc.RESOLVE_NO_XDEV
        os.close(libc.openat2(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top, resolve=beneath))
    except OSError:
        return False
    return True


def put(
    directory: int, layer: int, paths: list[str], owner: tuple[int, int], contents: Mapping[str, bytes] = EMPTY
) -> None:
    """Make a file for each path in an open, empty directory: empty, or with its content in ``contents``.

    The directories above it have the owner and the mode of the caller's directory: the overlay shows theirs.

    Raises:
        errors.WorkspaceError: one cannot be made.
    """
    made: set[str] = set()
    try:
        for path in paths:
            parts = path.split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                above = "/".join(parts[:depth])
                if above not in made:
                    made.add(above)
                    info = _stat(directory, above)
                    os.mkdir(above, 0o700, dir_fd=layer)
                    os.chown(above, info.st_uid, info.st_gid, dir_fd=layer)
                    os.chmod(above, info.st_mode & 0o777, dir_fd=layer)
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _EMPTY_MODE, dir_fd=layer)
            os.write(fd, contents.get(path, b""))
            os.fchown(fd, *owner)
            os.fchmod(fd, _EMPTY_MODE)
            os.close(fd)
    except OSError as e:
        raise errors.WorkspaceError(f"the masked files of the workspace cannot be made: {e.strerror}") from e


def _stat(top: int, path: str) -> os.stat_result:
    fd = lower.opened(lower.Tops(top), path)
    if fd is None:
        raise OSError(errno.ENOENT, "a directory was moved meanwhile")
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
