"""Root directories for agents: made once per set of closures and mount points, never changed afterwards.

    DIR/closures/<digest>/root/...     a copy of one closure, each file checked against its listing while copied
    DIR/skeletons/<digest>/root/...    hard links into those copies, plus every mount point
    DIR/*/<digest>/complete            the digest again, written last: without it the directory does not count

runsc makes missing mount points in the root directory of the host and leaves them there, so all are made here.
All files belong to root. Directories are 0755, files 0644, and programs of the closures 0755.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from policy import errors
from policy.host import Closure, ClosureFile
from sandbox import progress
from sandbox.kernel import small_files
from sandbox.rootfs import closure_cache, closure_files
from sandbox.storage import atomic_file

MountKind = Literal["dir", "file"]
MountPoint = tuple[str, MountKind]

_LAYOUT = b"covenant rootfs 1\n"
_MAX_PATH = 4096
# The holder of the lock may be removing all unused directories.
_TURN_SECONDS = 120.0

# Merging a thousand files costs milliseconds, so its digest is remembered.
# INVARIANT: keys hold identities of closures, which the values keep alive.
_known: dict[tuple[object, ...], tuple[tuple[Closure, ...], str]] = {}


class Skeletons:
    """The store below one directory, which only root can reach (0700).

    ``state`` is where closures are remembered (sandbox.rootfs.closure_cache), the directory above unless given: when a
    listing proves stale, all are forgotten there, so that the next attempt lists anew.
    """

    def __init__(self, directory: Path, *, state: Path | None = None) -> None:
        self.directory, self._state = directory, state or directory.parent
        for folder in (directory, directory / "closures", directory / "skeletons"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise errors.HomeError(f"`{directory}` is open to others", hint=f"chmod 0700 {directory}")

    def get(self, closures: Sequence[Closure], mount_points: Sequence[MountPoint]) -> Path:
        """Return a complete root directory for these closures and mount points. It is made if there is none.

        ``collect`` may remove it later: a run uses ``hold``.

        Raises:
            errors.HostError: Raised when two closures differ about a path, or a mount point runs through a file.
            errors.StaleClosureError: Raised when the host's files are no longer those of the listing.
        """
        key = (str(self.directory), *map(id, closures), *sorted(set(mount_points)))
        if key in _known:
            digest = _known[key][1]
            if _is_complete(self.directory / "skeletons" / digest, digest):
                return self.directory / "skeletons" / digest / "root"
        merged = _merge(closures)
        points = _mount_points(merged, mount_points)
        digest = _digest(merged, points)
        target = self.directory / "skeletons" / digest
        if not _is_complete(target, digest):
            with contextlib.ExitStack() as stack:
                copies = {c.digest: self._copy(c, stack) for c in closures}
                origin = _origins(closures, copies, merged)
                fresh = stack.enter_context(self._fresh("skeletons", digest))
                _lay_links(fresh / "root", merged, points, origin)
        _known[key] = (tuple(closures), digest)
        return target / "root"

    @contextlib.contextmanager
    def hold(self, closures: Sequence[Closure], mount_points: Sequence[MountPoint]) -> Iterator[Path]:
        """As ``get``, and ``collect`` leaves the directory alone for as long as the block runs.

        Raises:
            errors.HostError: as ``get``, or it is removed each time before it can be held.
        """
        for _ in range(8):
            root = self.get(closures, mount_points)
            fd = _share(root.parent)
            if fd is None:
                continue
            try:
                # The directory may have been collected between get and lock; then the name is another's.
                if _same(fd, root.parent):
                    # mtime of the outer directory is the time of last use; the root within is never touched.
                    os.utime(fd)
                    yield root
                    return
            finally:
                os.close(fd)
        raise errors.HostError(f"root directory in `{self.directory}` is being removed over and over")

    def collect(self, *, unused_seconds: float, now: float | None = None) -> list[str]:
        """Remove what no run holds and none has used for that long, and what broken makers left; the digests.

        ``now`` is in seconds since the epoch.
        """
        limit = (time.time() if now is None else now) - unused_seconds
        removed = []
        with self._gate():
            for kind in ("skeletons", "closures"):
                for path in sorted((self.directory / kind).iterdir()):
                    # Other processes create and rename directories meanwhile: a missing one is no error.
                    with contextlib.suppress(FileNotFoundError):
                        leftover = path.name.startswith(".")
                        # A copy that skeletons still link to costs nothing; it is removed after the last of them.
                        if not leftover and (path.stat().st_mtime > limit or (kind == "closures" and _linked(path))):
                            continue
                        if self._remove(path) and not leftover:
                            removed.append(path.name)
        return removed

    @contextlib.contextmanager
    def _gate(self) -> Iterator[None]:
        """Lock the store, so that ``collect`` never sees a directory between its creation and its lock.

        Raises:
            errors.KeeperError: Raised when another process holds the lock for too long.
        """
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            atomic_file.turn(fd, where=str(self.directory), seconds=_TURN_SECONDS)
            yield
        finally:
            os.close(fd)

    def _remove(self, path: Path) -> bool:
        fd = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fd is None:
            return False
        try:
            grave = path.parent / f".gone-{secrets.token_hex(8)}"
            os.rename(path, grave)
            shutil.rmtree(grave)
        finally:
            os.close(fd)
        return True

    def _copy(self, closure: Closure, stack: contextlib.ExitStack) -> Path:
        """The checked copy of one closure, which ``collect`` leaves alone until ``stack`` is closed."""
        digest = closure.digest
        target = self.directory / "closures" / digest
        for _ in range(8):
            if not _is_complete(target, digest):
                try:
                    copying = progress.step("copying the files that the agent's root is made of")
                    with copying, self._fresh("closures", digest) as fresh:
                        _lay_copies(fresh / "root", closure)
                except errors.StaleClosureError:
                    closure_cache.forget(self._state)
                    raise
            fd = _share(target)
            if fd is not None:
                stack.callback(os.close, fd)
                if _same(fd, target) and _is_complete(target, digest):
                    return target / "root"
        raise errors.HostError(f"`{target}` is being removed over and over")

    @contextlib.contextmanager
    def _fresh(self, kind: str, digest: str) -> Iterator[Path]:
        """A directory to fill, locked against ``collect``; on success it takes its name in one rename."""
        parent = self.directory / kind
        fresh = parent / f".new-{secrets.token_hex(8)}"
        with self._gate():
            fresh.mkdir(mode=0o700)
            fd = _lock(fresh, fcntl.LOCK_EX)
        try:
            (fresh / "root").mkdir()
            os.chmod(fresh / "root", closure_files.DIRECTORY_MODE)
            yield fresh
            _sync_directories(fresh)
            _write(fresh / "complete", digest.encode() + b"\n", 0o600)
            atomic_file.sync_directory(fresh)
            _take_name(fresh, parent / digest, digest)
            atomic_file.sync_directory(parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            if fd is not None:
                os.close(fd)


def _take_name(fresh: Path, target: Path, digest: str) -> None:
    for _ in range(2):
        try:
            os.rename(fresh, target)
        except OSError:
            # Another process was faster, which is as good; or the directory there is not complete.
            if _is_complete(target, digest):
                return
            os.rename(target, target.parent / f".broken-{secrets.token_hex(8)}")
        else:
            return
    raise errors.KernelError(f"`{target}` cannot be put in place")


def _merge(closures: Sequence[Closure]) -> dict[str, ClosureFile]:
    merged: dict[str, ClosureFile] = {}
    for closure in closures:
        for f in closure.files:
            _check_path(f.path)
            other = merged.get(f.path)
            if other is None or (other.mode | f.mode) == f.mode:
                merged[f.path] = f
            if other is not None and (other.kind, other.sha256, other.target) != (f.kind, f.sha256, f.target):
                raise errors.HostError(f"two closures disagree about `{f.path}`", where=f.path)
    for path in merged:
        parent = os.path.dirname(path)
        if parent != "/" and (parent not in merged or merged[parent].kind != "dir"):
            raise errors.HostError(f"`{path}` stands in no directory of its closure", where=path)
    return merged


def _check_path(path: str) -> None:
    clean = path.startswith("/") and path != "/" and os.path.normpath(path) == path and not path.startswith("//")
    if not clean or len(path) > _MAX_PATH or "\0" in path:
        raise errors.HostError(f"`{path}` cannot be a path in an agent's root", where=path)


def _mount_points(merged: Mapping[str, ClosureFile], wanted: Sequence[MountPoint]) -> dict[str, MountKind]:
    """Return the paths to make besides the closures: the mount points and the directories above them."""
    points: dict[str, MountKind] = {}
    for path, kind in sorted(set(wanted)):
        _check_path(path)
        above = [str(p) for p in list(Path(path).parents)[:-1]]
        for place, place_kind in [*((p, "dir") for p in reversed(above)), (path, kind)]:
            there = merged[place].kind if place in merged else points.get(place)
            if there is None:
                points[place] = "dir" if place_kind == "dir" else "file"
            elif there != place_kind:
                raise errors.HostError(f"mount point `{path}` cannot be made: `{place}` is a {there}", where=path)
    return points


def _digest(merged: Mapping[str, ClosureFile], points: Mapping[str, MountKind]) -> str:
    h = hashlib.sha256(_LAYOUT)
    for path, f in sorted(merged.items()):
        h.update(f"{path}\0{f.kind}\0{f.mode:o}\0{f.sha256}\0{f.target}\n".encode())
    for path, kind in sorted(points.items()):
        h.update(f"{path}\0mount {kind}\n".encode())
    return h.hexdigest()


def _is_complete(target: Path, digest: str) -> bool:
    try:
        return small_files.whole(f"{target}/complete") == digest.encode() + b"\n"
    except OSError:
        return False


def _origins(
    closures: Sequence[Closure], copies: Mapping[str, Path], merged: Mapping[str, ClosureFile]
) -> dict[str, Path]:
    """For each file of the merged listing the copy that has its mode."""
    return {f.path: copies[c.digest] for c in closures for f in c.files if merged[f.path].mode == f.mode}


def _lay_copies(root: Path, closure: Closure) -> None:
    for f in sorted(closure.files):
        place = Path(f"{root}{f.path}")
        if f.kind == "dir":
            _make_directory(place)
        elif f.kind == "symlink":
            os.symlink(f.target, place)
        else:
            _copy_file(f, place)


def _copy_file(f: ClosureFile, place: Path) -> None:
    try:
        # Python's byte code names its source's mtime, so mtimes are kept. They are read before the bytes.
        mtime = os.lstat(f.source).st_mtime_ns
        data = closure_files.read_source(f)
    except OSError as e:
        raise errors.StaleClosureError(f"`{f.source}` cannot be read: {e.strerror}", where=f.source) from e
    if hashlib.sha256(data).hexdigest() != f.sha256:
        raise errors.StaleClosureError(f"`{f.source}` changed while it was used", hint="run it again", where=f.source)
    _write(place, data, f.mode)
    os.utime(place, ns=(mtime, mtime), follow_symlinks=False)


def _lay_links(
    root: Path, merged: Mapping[str, ClosureFile], points: Mapping[str, MountKind], origin: Mapping[str, Path]
) -> None:
    for path, f in sorted(merged.items()):
        place = Path(f"{root}{path}")
        if f.kind == "dir":
            _make_directory(place)
        elif f.kind == "symlink":
            os.symlink(f.target, place)
        else:
            os.link(f"{origin[path]}{path}", place, follow_symlinks=False)
    for path, kind in sorted(points.items()):
        place = Path(f"{root}{path}")
        if kind == "dir":
            _make_directory(place)
        else:
            _write(place, b"", closure_files.DATA_MODE)


def _make_directory(place: Path) -> None:
    place.mkdir()
    os.chmod(place, closure_files.DIRECTORY_MODE)


def _write(place: Path, data: bytes, mode: int) -> None:
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as stream:
        stream.write(data)
        stream.flush()
        # Set the mode independent of the umask, and without setuid, setgid or sticky bits of the listing.
        os.fchmod(fd, mode & 0o755)
        os.fsync(fd)


def _sync_directories(top: Path) -> None:
    for folder, _, _ in os.walk(top):
        atomic_file.sync_directory(Path(folder))


def _share(folder: Path) -> int | None:
    """Take a shared lock that keeps ``collect`` away. Returns None if the folder is gone.

    It waits for a process that is removing the folder: that may pause between its lock and its removal for longer than
    any number of retries.

    Raises:
        errors.KeeperError: Raised when another process holds the lock for too long.
    """
    fd = _opened(folder)
    if fd is None:
        return None
    try:
        atomic_file.turn(fd, where=str(folder), seconds=_TURN_SECONDS, shared=True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _opened(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None


def _lock(folder: Path, how: int) -> int | None:
    """Lock the folder. Returns None if it is gone or another process holds the lock."""
    fd = _opened(folder)
    if fd is None:
        return None
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        return None
    return fd


def _same(fd: int, path: Path) -> bool:
    try:
        now = os.lstat(path)
    except OSError:
        return False
    held = os.fstat(fd)
    return (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino)


def _linked(path: Path) -> bool:
    """Whether a file of a closure's copy has a second name, which is a skeleton's."""
    for folder, _, names in os.walk(path / "root"):
        for name in names:
            info = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(info.st_mode):
                return info.st_nlink > 1
    return False
