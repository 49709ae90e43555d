"""Root directories for agents: made once per set of closures and mount points, never changed afterwards.

    DIR/closures/<digest>/root/...     a copy of one closure, each file checked against its listing while copied
    DIR/skeletons/<digest>/root/...    hard links into those copies, plus every mount point

sandbox.rootfs.tree_store says how they are made, held and collected.

runsc makes missing mount points in the root directory of the host and leaves them there, so all are made here.
All files belong to root. Directories are 0755, files 0644, and programs of the closures 0755.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from policy import errors
from policy.host import Closure, ClosureFile
from sandbox import progress
from sandbox.rootfs import closure_cache, closure_files, tree_store

MountKind = Literal["dir", "file"]
MountPoint = tuple[str, MountKind]

_LAYOUT = b"covenant rootfs 1\n"
_MAX_PATH = 4096
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
        self._store = tree_store.TreeStore(directory, ("skeletons", "closures"))

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
            if self._store.is_complete("skeletons", digest):
                return self._store.place("skeletons", digest) / "root"
        merged = merge(closures)
        points = _mount_points(merged, mount_points)
        digest = _digest(merged, points)
        if not self._store.is_complete("skeletons", digest):
            with contextlib.ExitStack() as stack:
                origin = origins(closures, {c.digest: self.copy(c, stack) for c in closures}, merged)
                fresh = stack.enter_context(self._store.fresh("skeletons", digest))
                _lay_links(fresh.root, merged, points, origin)
        _known[key] = (tuple(closures), digest)
        return self._store.place("skeletons", digest) / "root"

    @contextlib.contextmanager
    def hold(self, closures: Sequence[Closure], mount_points: Sequence[MountPoint]) -> Iterator[Path]:
        """As ``get``, and ``collect`` leaves the directory alone for as long as the block runs.

        Raises:
            errors.HostError: as ``get``, or it is removed each time before it can be held.
        """
        for _ in range(8):
            root = self.get(closures, mount_points)
            fd = tree_store.share(root.parent)
            if fd is None:
                continue
            try:
                # The directory may have been collected between get and lock; then the name is another's.
                if tree_store.same(fd, root.parent):
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
        return self._store.collect(unused_seconds=unused_seconds, keep=_is_linked_copy, now=now)

    def copy(self, closure: Closure, stack: contextlib.ExitStack) -> Path:
        """Return the checked copy of one closure, which ``collect`` leaves alone until ``stack`` is closed.

        Raises:
            errors.StaleClosureError: Raised when the host's files are no longer those of the listing.
        """

        def make() -> None:
            try:
                copying = progress.step("copying the files that the agent's root is made of")
                with copying, self._store.fresh("closures", closure.digest) as fresh:
                    _lay_copies(fresh.root, closure)
            except errors.StaleClosureError:
                closure_cache.forget(self._state)
                raise

        return self._store.hold("closures", closure.digest, make, stack) / "root"


def _is_linked_copy(kind: str, path: Path) -> bool:
    """Whether this is a copy that trees still link to. It costs nothing, and goes after the last of them."""
    return kind == "closures" and tree_store.linked(path)


def merge(closures: Sequence[Closure]) -> dict[str, ClosureFile]:
    """Return the files of all closures by path. The greater mode of two equal files counts.

    Raises:
        errors.HostError: Raised when two closures differ about a path, or a file is in no directory.
    """
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


def origins(
    closures: Sequence[Closure], copies: Mapping[str, Path], merged: Mapping[str, ClosureFile]
) -> dict[str, Path]:
    """Return for each file of the merged listing the copy that has its mode."""
    return {f.path: copies[c.digest] for c in closures for f in c.files if merged[f.path].mode == f.mode}


def _lay_copies(root: Path, closure: Closure) -> None:
    for f in sorted(closure.files):
        place = Path(f"{root}{f.path}")
        if f.kind == "dir":
            tree_store.make_directory(place)
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
    tree_store.write(place, data, f.mode)
    os.utime(place, ns=(mtime, mtime), follow_symlinks=False)


def _lay_links(
    root: Path, merged: Mapping[str, ClosureFile], points: Mapping[str, MountKind], origin: Mapping[str, Path]
) -> None:
    for path, f in sorted(merged.items()):
        place = Path(f"{root}{path}")
        if f.kind == "dir":
            tree_store.make_directory(place)
        elif f.kind == "symlink":
            os.symlink(f.target, place)
        else:
            os.link(f"{origin[path]}{path}", place, follow_symlinks=False)
    for path, kind in sorted(points.items()):
        place = Path(f"{root}{path}")
        if kind == "dir":
            tree_store.make_directory(place)
        else:
            tree_store.write(place, b"", closure_files.DATA_MODE)
