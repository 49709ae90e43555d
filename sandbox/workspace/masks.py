"""The masked files of a workspace: each is an empty file of a layer over the caller's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from policy import errors
from policy.workspace import globs

_MOST_FILES: Final = 2_000_000
_EMPTY_MODE: Final = 0o444


def found(directory: int, patterns: tuple[str, ...]) -> list[str]:
    """Return the relative paths of the files and links below an open directory that a pattern names.

    No link is followed. A directory that a pattern names stands for all of its files.

    Raises:
        errors.WorkspaceError: there are too many files, or a directory cannot be read.
    """
    match, last = globs.matching(patterns), globs.last_names(patterns)
    files = _files(f"/proc/self/fd/{directory}")
    try:
        if last is None:
            return [path for path, _ in files if match(path)]
        return [path for path, name in files if last.may_be(name) and match(path)]
    except OSError as e:
        raise errors.WorkspaceError(f"the workspace cannot be looked through: {e.strerror}") from e


def _files(top: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each file and link, and its last name in lower case.

    Objects of git have names of digits, and are left out.
    """
    pending, seen = [""], 0
    while pending:
        above = pending.pop()
        with os.scandir(f"{top}/{above}") as entries:
            for entry in entries:
                name = entry.name
                path = above + name
                if not entry.is_dir(follow_symlinks=False):
                    seen += 1
                    yield path, name.lower()
                elif not path.endswith(".git/objects"):
                    pending.append(f"{path}/")
        if seen > _MOST_FILES:
            raise errors.WorkspaceError(f"the workspace has more than {_MOST_FILES} files", hint="take a part of it")


def put(directory: int, layer: int, paths: list[str], owner: tuple[int, int]) -> None:
    """Make an empty file for each path in an open, empty directory.

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
                    info = os.lstat(f"/proc/self/fd/{directory}/{above}")
                    os.mkdir(above, 0o700, dir_fd=layer)
                    os.chown(above, info.st_uid, info.st_gid, dir_fd=layer)
                    os.chmod(above, info.st_mode & 0o777, dir_fd=layer)
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _EMPTY_MODE, dir_fd=layer)
            os.fchown(fd, *owner)
            os.fchmod(fd, _EMPTY_MODE)
            os.close(fd)
    except OSError as e:
        raise errors.WorkspaceError(f"the masked files of the workspace cannot be made: {e.strerror}") from e
