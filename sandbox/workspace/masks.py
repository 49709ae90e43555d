"""The walk over a workspace: its masked files, each an empty file of a layer over the caller's directory, and the parts
of it whose changes are not applied.
"""

from __future__ import annotations

import errno
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from policy import errors
from policy.workspace import globs
from sandbox.kernel import libc
from sandbox.storage import directory_listings as listings
from sandbox.workspace import lower, upper

_MOST_NAMES: Final = 2_000_000
_EMPTY_MODE: Final = 0o444
# The modules that say what is masked. Looked at once, when they are loaded: an update replaces them under a process
# that goes on by the older ones.
RULES: Final = tuple(
    (info.st_size, info.st_mtime_ns) for info in (os.stat(one) for one in (__file__, globs.__file__, lower.__file__))
)
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


def walk(directory: int, patterns: tuple[str, ...], above: str = "", remembered: Path | None = None) -> Walk:
    """Find the relative paths of the files and links below an open directory that a pattern names.

    Patterns take the directory for ``above``, which ends with a slash unless it is empty. A directory with a `.git`
    file is another checkout. ``remembered`` is the directory of the listings of earlier walks.

    No link is followed, and no other mount entered, also when the owner moves them there meanwhile.

    Raises:
        errors.WorkspaceError: there are too many names, or a directory cannot be read.
    """
    try:
        kept = listings.RememberedListings(remembered, directory, above, patterns, RULES)
        found = _Looking(directory, patterns, above, kept).walk()
    except OSError as e:
        raise errors.WorkspaceError(f"the workspace cannot be looked through: {e.strerror}") from e
    kept.write()
    return found


class _Looking:
    """One walk. Objects of git have names of digits, and are left out."""

    def __init__(self, top: int, patterns: tuple[str, ...], above: str, kept: listings.RememberedListings) -> None:
        self._top, self._above, self._kept = top, above, kept
        self._match, self._last = globs.matching(patterns), globs.last_names(patterns)

    def walk(self) -> Walk:
        """Look at each directory, and list those that changed since they were remembered."""
        hidden, mounts, checkouts = list[str](), list[str](), list[str]()
        pending, seen = [""], 0
        while pending:
            above = pending.pop()
            fd = lower.opened(lower.Tops(self._top), above)
            if fd is None:
                if _is_mount(self._top, above):
                    mounts.append(above)
                continue
            try:
                # Before its names are read: a later change gives it another time.
                info = os.fstat(fd)
                one = self._kept.get(above, info) or self._kept.put(above, info, self._listed(fd, above))
            finally:
                os.close(fd)
            seen += one.count
            if seen > _MOST_NAMES:
                raise errors.WorkspaceError(
                    f"the workspace has more than {_MOST_NAMES} names", hint="take a part of it"
                )
            prefix = f"{above}/" if above else ""
            hidden += [prefix + name for name in one.hidden]
            pending += [prefix + name for name in one.directories]
            if one.is_checkout and above:
                checkouts.append(above)
        apart = dict.fromkeys(map(upper.shown, checkouts), "checkout")
        apart |= dict.fromkeys(map(upper.shown, mounts), "mount")
        return Walk(hidden, apart, [*checkouts, *mounts])

    def _listed(self, fd: int, above: str) -> listings.Listing:
        """Read the names of an open directory."""
        directories, hidden, count, is_checkout = list[str](), list[str](), 0, False
        prefix, may_be = f"{above}/" if above else "", None if self._last is None else self._last.may_be
        # What is below `objects` has no names of files.
        is_repository = above.rpartition("/")[2] == lower.REPOSITORY or (self._above and not above)
        left_out = "objects" if is_repository else ""
        with os.scandir(fd) as entries:
            for entry in entries:
                count += 1
                if count > _MOST_NAMES:
                    break
                name = entry.name
                if entry.is_dir(follow_symlinks=False):
                    if name != left_out:
                        directories.append(name)
                    continue
                low = name.lower()
                is_checkout = is_checkout or low == lower.REPOSITORY
                # A name that is no UTF-8 is matched as it is shown.
                if (may_be is None or may_be(low)) and self._match(self._above + upper.shown(prefix + name)):
                    hidden.append(name)
        return listings.Listing(0, 0, 0, directories, hidden, count, is_checkout)


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
