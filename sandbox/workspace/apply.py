"""Apply changes to the caller's directory, as the caller: all of them or none, whenever the process is killed.

(1) Each new file is written beside its place (``stage``). Nothing is changed yet; ``unstage`` takes it back.
(2) Every path is compared once more, and the steps are done (``commit``). Done again, they lead to the same end.

Between the two the caller of these functions writes down that the steps begin (sandbox.workspace.journal). A file that
the host changes in the very moment of a step is kept beside its place and named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from policy.workspace.changes import Change
from policy.workspace.entries import LowerEntry
from policy.workspace.steps import ApplyStep
from sandbox.kernel import libc
from sandbox.kernel.fs.freeing import Freeing
from sandbox.workspace import lower
from sandbox.workspace.lower import Tops

_PERMISSIONS: Final = 0o777
_PIECE: Final = 16 * 1024 * 1024
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HOSTS: Final = ".host"


class Kept(Struct, frozen=True):
    """A path that the host changed in the moment of a step, and the name under which the host's content is now."""

    path: str
    name: str


class _Parents:
    """Open directories of the paths, the last one kept open."""

    def __init__(self, top: Tops) -> None:
        self._top = top
        self._path: str | None = None
        self._fd = -1

    def of(self, path: str) -> tuple[int, str]:
        """Return the open directory of a path, and its last name.

        Raises:
            OSError: it is not there, or a link or another mount is on the way.
        """
        above, _, name = path.rpartition("/")
        if above != self._path:
            self.close()
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            top, inside = self._top.of(above)
            self._fd = libc.openat2(inside, flags, dir_fd=top, resolve=lower.BENEATH)
            self._path = above
        return self._fd, name

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None


@contextlib.contextmanager
def _parents(top: Tops) -> Iterator[_Parents]:
    with contextlib.closing(_Parents(top)) as found:
        yield found


def stage(top: Tops, upper: Tops, changes: Sequence[Change], staged: dict[str, str]) -> list[str]:
    """Write each new file and link under its staged name, durably. Returns the paths that the host changed meanwhile.

    ``upper`` are the open upper layers.

    Raises:
        OSError: one cannot be written; what was written stays for ``unstage``.
    """
    by_path = {one.path: one for one in changes if one.action in ("add", "modify")}
    with _parents(top) as places, _parents(upper) as sources:
        for path, name in staged.items():
            directory, last = places.of(name)
            change = by_path[path]
            if change.kind == "link":
                os.symlink(change.target, last, dir_fd=directory)
                continue
            source, own = sources.of(path)
            fd = os.open(own, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
            try:
                _copy(fd, directory, last, change)
            finally:
                os.close(fd)
        for fd in top.all():
            libc.syncfs(fd)
        return [one.path for one in changes if _differs(places, one)]


def _copy(source: int, directory: int, name: str, change: Change) -> None:
    fd = os.open(name, _NEW, 0o600, dir_fd=directory)
    try:
        left = change.size
        while left and (moved := _moved(source, fd, left)):
            left -= moved
        if left or os.fstat(source).st_size != change.size:
            raise OSError(errno.EIO, "the upper layer changed", change.path)
        os.fchmod(fd, change.mode & _PERMISSIONS)
    finally:
        os.close(fd)


def _moved(source: int, target: int, left: int) -> int:
    try:
        return os.copy_file_range(source, target, min(left, _PIECE))
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.sendfile(target, source, None, min(left, _PIECE))


def _differs(places: _Parents, change: Change) -> bool:
    """Whether the directory has something else at the path than what the change was judged by."""
    try:
        directory, _ = places.of(change.path)
    except OSError:
        return change.base is not None
    now, base = lower.entry(directory, change.path), change.base
    if base is None or now is None:
        # A removed path of the same name comes before: then the new one finds it still there.
        return base is not now and change.action != "add"
    return not _same(now, base)


def _same(now: LowerEntry, base: LowerEntry) -> bool:
    if now.kind != base.kind or (now.device, now.inode) != (base.device, base.inode):
        return False
    # A directory changes with each file in it.
    return now.kind == "dir" or (now.size, now.changed_ns) == (base.size, base.changed_ns)


def unstage(top: Tops, staged: Sequence[str]) -> int:
    """Remove what ``stage`` wrote. Returns how many there were."""
    count = 0
    with _parents(top) as places:
        for name in staged:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                directory, last = places.of(name)
                os.unlink(last, dir_fd=directory)
                count += 1
    return count


def commit(top: Tops, steps: Sequence[ApplyStep], bases: dict[str, LowerEntry]) -> list[Kept]:
    """Do the steps, durably. A step that was done already is passed over.

    ``bases`` are the paths that steps replace or remove, as they were judged.

    Raises:
        OSError: a step cannot be done, such as on a full disk; done again, the rest follows.
    """
    kept: list[Kept] = []
    with _parents(top) as places:
        with Freeing() as freeing:
            for step in steps:
                found = _step(places, step, bases.get(step.path), freeing)
                if found is not None:
                    kept.append(found)
        for fd in top.all():
            libc.syncfs(fd)
    return kept


def _step(places: _Parents, step: ApplyStep, base: LowerEntry | None, freeing: Freeing) -> Kept | None:
    try:
        directory, name = places.of(step.path)
    except FileNotFoundError:
        if step.verb in ("unlink", "rmdir"):
            return None
        raise
    if step.verb == "rmdir":
        return _without(directory, name, step)
    if step.verb == "unlink":
        now = lower.entry(directory, step.path)
        if now is None:
            return None
        if base is None or not _same(now, base):
            return Kept(step.path, step.path)
        freeing.unlink(directory, name)
    elif step.verb == "mkdir":
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, step.mode, dir_fd=directory)
    elif step.verb == "chmod":
        _chmod(directory, name, step.mode)
    else:
        return _renamed(places, step, base, freeing)
    return None


def _without(directory: int, name: str, step: ApplyStep) -> Kept | None:
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return Kept(step.path, step.path)
    return None


def _chmod(directory: int, name: str, mode: int) -> None:
    """Change the mode of a file or directory through no link.

    Both times of a directory are set: a status change time alone that is newer is the mark of a directory that the host
    moved (policy.workspace.changes).
    """
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        kind = os.fstat(fd).st_mode
        if not stat.S_ISLNK(kind):
            os.chmod(f"/proc/self/fd/{fd}", mode & _PERMISSIONS)
        if stat.S_ISDIR(kind):
            os.utime(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _renamed(places: _Parents, step: ApplyStep, base: LowerEntry | None, freeing: Freeing) -> Kept | None:
    """Give a staged file its name. What it replaces is removed only when it is what the change was judged by."""
    directory = os.dup(places.of(step.path)[0])
    try:
        source, name = places.of(step.staged)
        staged = lower.entry(source, step.staged)
        if staged is None:
            return None  # it has its name already
        old, new = f"/proc/self/fd/{source}/{name}", f"/proc/self/fd/{directory}/{step.path.rpartition('/')[2]}"
        if base is None:
            return _named(old, new, step)
        if staged.inode == base.inode:
            freeing.unlink(source, name)  # exchanged already
            return None
        now = lower.entry(directory, step.path)
        if now is None:
            return _named(old, new, step)
        if not _same(now, base):
            os.unlink(old)
            return Kept(step.path, step.path)
        libc.exchange(old, new)
        was = lower.entry(source, step.staged)
        if was is not None and (was.inode, was.size, was.modified_ns) != (base.inode, base.size, base.modified_ns):
            try:
                libc.rename_new(old, new + _HOSTS)
            except OSError:  # the name is another file's, or too long
                return Kept(step.path, step.staged)
            return Kept(step.path, step.path + _HOSTS)
        freeing.unlink(source, name)
        return None
    finally:
        os.close(directory)


def _named(old: str, new: str, step: ApplyStep) -> Kept | None:
    """Give a staged file a name that nothing has. Where the host has made something of that name, that stays."""
    try:
        libc.rename_new(old, new)
    except FileExistsError:
        os.unlink(old)
        return Kept(step.path, step.path)
    return None
