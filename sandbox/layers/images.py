"""Root images: the union of closures, layers and derived files with the mount points of a run, made once.

    STATE/rootfs/images/<key>/root/...      hard links into closures and layers; copies where an execute bit is removed
    STATE/rootfs/images/<key>/image.erofs   the same tree in one file; root is empty then (sandbox.rootfs.erofs_image)
    STATE/rootfs/images/<key>/listing       what the image has, as the listing of a layer
    STATE/rootfs/images/<key>/table         its inodes (sandbox.layers.image_check), or that of the one file
    STATE/rootfs/images/<key>/meta.json     the digests of its layers, its kind, the digest of the one file
    STATE/rootfs/images/<key>/programs/...  an empty file for each program that a run looked up in the listing

The key is computed from digests alone, so that a start with an image that exists reads no listing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from msgspec import Struct, structs

from policy import errors, layers
from policy.host import Closure
from policy.layers import LayerRef
from sandbox import progress
from sandbox.layers import image_check, image_tree, tree_table
from sandbox.layers.store import LayerStore
from sandbox.rootfs import erofs_image, host_links, tree_store
from sandbox.rootfs.erofs_image import ImageFile
from sandbox.rootfs.skeleton import MountPoint, Skeletons

_LAYOUT = "covenant root image 2"
_KIND = "images"
_META, _LISTING = "meta.json", "listing"
ROOT = "root"


ImageKind = Literal["tree", "erofs"]


class ImageMeta(Struct, frozen=True):
    """Record of an image. ``layers`` are digests, bottom first; ``files`` counts every path.

    ``digest`` is the hex SHA-256 of an EROFS file, and empty for a tree. ``bytes`` is the size of the file. ``key``
    names the image, so that an image that was copied to another name is found out.
    """

    layers: tuple[str, ...]
    files: int
    kind: ImageKind = "tree"
    digest: str = ""
    bytes: int = 0
    key: str = ""


class RootCheck(Protocol):
    """The check of an image, begun when a run holds it."""

    def wait(self) -> None:
        """Wait for the result. Raises errors.LayerChangedError."""


class HeldImage(Struct, frozen=True):
    """A root image that a run holds. The run waits for ``check`` before it lets the agent's code run.

    ``root`` is the tree; it is empty where ``file`` has the root.
    """

    root: Path
    key: str
    check: RootCheck
    file: ImageFile | None = None


class ImageParts(Struct, frozen=True):
    """The parts that an image is made of.

    Trees are laid in this order: ``closures``, ``layers``, ``derived``. ``executable`` has the tree grants: ``root``
    for every layer, ``layer:NAME`` for one. ``programs`` are paths that keep their execute bit without a grant of
    their tree. ``points`` are the mount points.
    """

    closures: tuple[Closure, ...]
    layers: tuple[LayerRef, ...]
    executable: frozenset[str]
    programs: frozenset[str]
    points: tuple[MountPoint, ...]
    derived: tuple[Closure, ...]

    def granted(self, ref: LayerRef) -> bool:
        """Whether a grant covers this layer."""
        return ROOT in self.executable or f"layer:{ref.name}" in self.executable

    def key(self, kind: ImageKind = "tree") -> str:
        """Return the digest that names the image of this kind.

        Under a grant of the whole root each program keeps its execute bit, so that the image is the same for all of
        them: a session of another command makes no other image.
        """
        kept = () if ROOT in self.executable else sorted(self.programs)
        parts = [
            *(("closure", one.digest) for one in self.closures),
            *(("layer", one.digest, "x" if self.granted(one) else "-") for one in self.layers),
            *(("derived", one.digest) for one in self.derived),
            *(("program", path) for path in kept),
            *(("point", *point) for point in sorted(set(self.points))),
            *((("kind", kind),) if kind != "tree" else ()),
        ]
        return hashlib.sha256(msgspec.json.encode([_LAYOUT, *parts])).hexdigest()


class RootImages:
    """The root images below one state directory (0700, root's)."""

    def __init__(self, state: Path) -> None:
        self._store = tree_store.TreeStore(state / "rootfs", (_KIND,))
        self._copies, self._layers = Skeletons(state / "rootfs"), LayerStore(state)

    @contextlib.contextmanager
    def hold(
        self,
        closures: Sequence[Closure],
        layer_refs: Sequence[LayerRef],
        *,
        executable: Collection[str] = (),
        programs: Collection[str] = (),
        points: Sequence[MountPoint] = (),
        derived: Sequence[Closure] = (),
        packer: Path | None = None,
    ) -> Iterator[HeldImage]:
        """Give the image of these parts, which is made if there is none. It stays while the block runs.

        ``packer`` is mkfs.erofs, which makes it one file. Without it the image is a tree. Its check has begun. The
        caller calls ``check.wait()`` before it lets code of the image run.

        Raises:
            errors.LayerError: Raised when a layer is missing or changed, or the parts cannot be united.
            errors.HostError: Raised when closures differ about a path, or a mount point runs through a file.
            errors.NotEnforceableError: Raised when a layer's loader could be started as a program.
        """
        parts = ImageParts(
            tuple(closures),
            tuple(layer_refs),
            frozenset(executable),
            frozenset(programs),
            tuple(points),
            tuple(derived),
        )
        kind: ImageKind = "tree" if packer is None else "erofs"
        key = parts.key(kind)
        with contextlib.ExitStack() as stack:
            folder = self._store.hold(_KIND, key, lambda: self._make(parts, key, packer), stack)
            # mtime of the outer directory is the time of last use.
            os.utime(folder)
            meta = self._meta(folder)
            if meta.kind != kind:
                raise _damaged(folder)
            if meta.key != key:
                raise _foreign(folder)
            if ROOT in parts.executable:
                _check_programs(folder, parts)
            if kind == "tree":
                check = stack.enter_context(image_check.begin(folder, meta.files))
                yield HeldImage(folder / "root", key, check)
            else:
                file = erofs_image.opened(folder, meta.digest, hint=image_check.FIX)
                stack.callback(os.close, file.fd)
                one = erofs_image.FileCheck(folder, file, hint=image_check.FIX)
                yield HeldImage(folder / "root", key, one, file)

    def made_of(self, digest: str) -> dict[str, ImageMeta]:
        """Return the images that are made of a layer, by key."""
        found = {}
        for path in sorted(self._store.place(_KIND, "").iterdir()):
            try:
                if layers.is_digest(path.name) and digest in (meta := self._meta(path)).layers:
                    found[path.name] = meta
            except errors.LayerChangedError:
                if path.exists():  # else another process has just removed it
                    raise
        return found

    def verify(self, digest: str) -> tuple[str, ...]:
        """Read every EROFS file that is made of a layer. Returns one line for each that is not as it was made."""
        made = ((self._store.place(_KIND, key), meta) for key, meta in self.made_of(digest).items())
        lines = ((folder.name[:16], _reread(folder, meta)) for folder, meta in made if meta.kind == "erofs")
        return tuple(f"image {name}: {erofs_image.NAME} {problem}" for name, problem in lines if problem)

    def of_layer(self, digest: str) -> list[str]:
        """Return the keys of the images that are made of a layer."""
        return [*self.made_of(digest)]

    def collect(self, *, unused_seconds: float, now: float | None = None) -> list[str]:
        """Remove images that no run holds and none has used for that long; their keys.

        ``now`` is in seconds since the epoch.
        """
        return self._store.collect(unused_seconds=unused_seconds, keep=lambda _, __: False, now=now)

    def _meta(self, folder: Path) -> ImageMeta:
        try:
            return msgspec.json.decode(erofs_image.record(folder, _META, hint=image_check.FIX), type=ImageMeta)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise _damaged(folder) from e

    def _make(self, parts: ImageParts, key: str, packer: Path | None) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(progress.step("making the root that the agent is given"))
            tree = image_tree.ImageTree()
            tree.lay_closures(parts.closures, self._copies, stack)
            for ref in parts.layers:
                tree.lay_layer(self._layers.hold(ref, stack), str(ref), granted=parts.granted(ref))
            tree.check_programs()
            for closure in parts.derived:
                if closure.name == host_links.NAME:
                    tree.check_links(closure)
            tree.lay_closures(parts.derived, self._copies, stack)
            tree.lay_points(parts.points)
            tree.keep(parts.programs, [path for path, _ in parts.points])
            fresh = stack.enter_context(self._store.fresh(_KIND, key, many_files=True))
            listed = tree.write(fresh.root)
            meta = ImageMeta(tuple(ref.digest for ref in parts.layers), len(listed), key=key)
            if packer is not None:
                digest, size = _pack(packer, fresh)
                meta = structs.replace(meta, kind="erofs", digest=digest, bytes=size)
            tree_store.write(fresh.path / _LISTING, layers.canonical(listed), 0o600)
            tree_store.write(fresh.path / _META, msgspec.json.encode(meta), 0o600)
            tree_store.write(fresh.path / "table", _table(fresh, meta.kind), 0o600)


def _check_programs(folder: Path, parts: ImageParts) -> None:
    """Refuse a program that the image lacks. The key does not cover it, and another run may have made the image.

    The listing is read once for each program: an empty file says that it was found.

    Raises:
        errors.LayerError: Raised when a path leads to no file that has an execute bit.
        errors.LayerChangedError: Raised when the listing is missing or damaged.
    """
    marks = folder / "programs"
    missing = {path: marks / hashlib.sha256(path.encode()).hexdigest() for path in parts.programs}
    missing = {path: mark for path, mark in missing.items() if not mark.exists()}
    if not missing:
        return
    raw = tree_store.record(folder, _LISTING, hint=image_check.FIX)
    try:
        entries = layers.parsed(raw)
    except errors.LayerError as e:
        raise _damaged(folder, _LISTING) from e
    tree = image_tree.ImageTree()
    tree.lay_listing(entries)
    tree.keep(missing, [path for path, _ in parts.points])
    # A full disk refuses no program that is there: without its mark the next run reads the listing again.
    with contextlib.suppress(OSError):
        marks.mkdir(mode=0o700, exist_ok=True)
        for mark in missing.values():
            mark.touch(mode=0o600)


def _damaged(folder: Path, name: str = _META) -> errors.LayerChangedError:
    return errors.LayerChangedError(f"`{folder}/{name}` is damaged", hint=image_check.FIX, where=str(folder))


def _foreign(folder: Path) -> errors.LayerChangedError:
    return errors.LayerChangedError(
        f"the root image `{folder}` was made of other parts: it is a copy from elsewhere",
        hint=image_check.FIX,
        where=str(folder),
    )


def _pack(packer: Path, fresh: tree_store.FreshTree) -> tuple[str, int]:
    """Make the one file of a tree, and leave the tree empty. Returns the file's digest and size."""
    place = fresh.path / erofs_image.NAME
    digest = erofs_image.make(packer, fresh.root, place)
    shutil.rmtree(fresh.root)
    tree_store.make_directory(fresh.root)
    return digest, place.stat().st_size


def _table(fresh: tree_store.FreshTree, kind: ImageKind) -> bytes:
    if kind == "tree":
        return tree_table.table(str(fresh.root))
    return erofs_image.identity(os.lstat(fresh.path / erofs_image.NAME))


def _reread(folder: Path, meta: ImageMeta) -> str:
    """Return the difference of an EROFS file from what was made; empty if there is none, or no image any more."""
    with contextlib.ExitStack() as stack:
        held = tree_store.share(folder)
        if held is None:
            return ""
        stack.callback(os.close, held)
        try:
            file = erofs_image.opened(folder, meta.digest, hint=image_check.FIX)
        except errors.LayerChangedError:
            return "is missing" if folder.exists() else ""
        stack.callback(os.close, file.fd)
        return erofs_image.problem(file.fd, meta.digest)
