"""Follow the symbolic links of a granted path by hand, and make them again in an agent's root.

A grant for reading may name a link, and programs then ask for that name. Root must own each link, other users must not
be able to write its directory, and no agent may be able to write its file system: otherwise another could choose what
is granted. The walk of the real path afterwards (host_paths) follows none.
"""

from __future__ import annotations

import functools
import os
import stat
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from policy import data, errors
from policy.host import Closure, ClosureFile
from policy.rules import never as rule
from policy.symlinks import MOST_LINKS
from sandbox.kernel.fs import filesystems
from sandbox.rootfs import writable_size

NAME: Final = "links"  # of the closure
# File systems whose owners and modes this kernel keeps itself. A FUSE or network server may make up any of them.
_LOCAL: Final = frozenset(
    {"bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs", "overlay", "squashfs", "tmpfs"}
    | {"xfs", "zfs"}
)
_OPEN: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

Links = tuple[tuple[str, str], ...]


def resolve(path: str, never: Mapping[str, str], where: str = "", *, owner: int = 0) -> tuple[str, Links]:
    """Return the real path of a granted path, and each link on the way with its text.

    A path without links is returned as it is, also one that does not exist. ``never`` and ``where`` are as for
    ``host_paths.open_granted``. ``owner`` is trusted besides root, in tests alone.

    Raises:
        errors.GrantedPathError: Raised when a link must not be followed, there are too many, or the last leads nowhere.
        errors.NeverGrantableError: Raised when a link is in a tree that is never granted.
    """
    walk = _Walk(path, never, where, frozenset({0, owner}))
    try:
        return walk.real()
    finally:
        os.close(walk.fd)


class _Walk:
    """One walk along a granted path. ``fd`` is the directory at ``_current``, a path without links.

    ``_odd`` says of the first directory on the way there that another than root may change it, empty for none.
    """

    def __init__(self, path: str, never: Mapping[str, str], where: str, trusted: frozenset[int]) -> None:
        self._path, self._never, self._where, self._trusted = path, never, where, trusted
        self._pending = deque(path.split("/"))
        self._links: dict[str, str] = {}
        self._current = self._odd = ""
        self.fd = os.open("/", _OPEN | os.O_DIRECTORY)

    def real(self) -> tuple[str, Links]:
        """Walk to the end. Raises as ``resolve``."""
        hops = 0
        while self._pending:
            part = self._pending.popleft()
            if part in ("", "."):
                continue
            here = self._current.rpartition("/")[0] if part == ".." else f"{self._current}/{part}"
            try:
                below = os.open(part, _OPEN, dir_fd=self.fd)
            except OSError as e:
                if not self._links:
                    return self._path, ()  # the walk without links finds the same, and says it
                raise self._refused(f"leads to `{here}`: {e.strerror}", "take it out of the manifest") from e
            info = os.fstat(below)
            if not stat.S_ISLNK(info.st_mode):
                self._enter(below, here, info)
                continue
            try:
                self._follow(below, here, info)
            finally:
                os.close(below)
            hops += 1
            if hops > MOST_LINKS:
                raise self._refused(f"leads through more than {MOST_LINKS} symlinks")
        return (self._current or "/", tuple(sorted(self._links.items()))) if self._links else (self._path, ())

    def _enter(self, fd: int, at: str, info: os.stat_result) -> None:
        os.close(self.fd)
        self.fd, self._current = fd, at
        shared = info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX
        if not self._odd and (shared or info.st_uid not in self._trusted):
            self._odd = f"others can change `{at}`"

    def _follow(self, link: int, at: str, info: os.stat_result) -> None:
        through = f"leads through symlink `{at}`"
        rule.check(at, data.never_grantable(), self._never, grant=self._path, where=self._where)
        odd = self._odd
        if not odd and info.st_uid not in self._trusted:
            odd = f"it belongs to uid {info.st_uid}"
        if not odd and os.fstat(self.fd).st_mode & 0o022:
            odd = f"others can write `{self._current or '/'}`"
        if not odd:
            odd = _odd_file_system(link)
        if odd:
            raise self._refused(f"{through}, and {odd}", f"grant `{os.path.realpath(self._path)}` instead")
        try:
            # readlinkat(2) with an empty name reads the link that was checked, and not its name again.
            target = os.readlink("", dir_fd=link)
            target.encode()
        except (OSError, UnicodeEncodeError) as e:
            raise self._refused(f"{through}, which cannot be read") from e
        self._links[at] = target
        self._pending.extendleft(reversed(target.split("/")))
        if target.startswith("/"):
            os.close(self.fd)
            self.fd, self._current, self._odd = os.open("/", _OPEN | os.O_DIRECTORY), "", ""

    def _refused(self, why: str, hint: str = "take it out of the manifest") -> errors.GrantedPathError:
        return errors.GrantedPathError(f"path `{self._path}` {why}", hint=hint, where=self._where)


def _odd_file_system(link: int) -> str:
    kind = filesystems.mount_of(link).kind
    if kind not in _LOCAL:
        return f"its file system is {kind or 'unknown'}, where others may say who owns a file"
    return "an agent may be granted its file system for writing" if writable_size.may_be_written(link) else ""


def closure(links: Sequence[Mapping[str, str]]) -> Closure:
    """Return the links of mounts.json (``root.links``) as one more closure of a root directory."""
    return _closure(tuple((one["path"], one["target"]) for one in links))


@functools.lru_cache(maxsize=32)
def _closure(links: Links) -> Closure:
    files = {path: ClosureFile(path, "symlink", target=target) for path, target in links}
    for path in list(files):
        while (path := os.path.dirname(path)) != "/":
            files.setdefault(path, ClosureFile(path, "dir", 0o755))
    return Closure(NAME, "", tuple(sorted(files.values())))
