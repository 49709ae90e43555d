"""The store of layers, below the state that only root can write.

    STATE/layers/<digest>/root/...     the tree: all of root, directories 0755, files 0644 or 0755
    STATE/layers/<digest>/listing      the canonical listing, whose SHA-256 is the digest
    STATE/layers/<digest>/meta.json    names, source, time, number of files and bytes

sandbox.rootfs.tree_store says how they are made, held and collected.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from policy import errors, layers
from policy.layers import LayerEntry, LayerRef
from policy.manifest import text
from sandbox.layers import packing, tree_walk
from sandbox.rootfs import tree_store
from sandbox.storage import atomic_file

_KIND = "."


class LayerInfo(Struct, frozen=True):
    """Describe a layer of the store. ``source`` says how it was made, ``made_ms`` when (milliseconds).

    ``search`` are the directories of its programs, which a session puts first on PATH.
    """

    digest: str
    names: tuple[str, ...]
    source: str
    made_ms: int
    files: int
    bytes: int
    search: tuple[str, ...] = ()

    def ref(self) -> LayerRef:
        """Return the reference for a manifest, by the layer's latest name."""
        return LayerRef(self.names[-1], self.digest)


class Packed(Struct, frozen=True):
    """Result of ``pack``: the layer, the files that lost a setuid or setgid bit, and notes of its source."""

    info: LayerInfo
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ref(self) -> LayerRef:
        """Return the reference for a manifest."""
        return self.info.ref()


class LayerTree(Struct, frozen=True):
    """A layer that is held: the directory of its tree, and its listing."""

    root: Path
    entries: tuple[LayerEntry, ...]


class LayerStore:
    """The layers below one state directory (0700, root's).

    Raises:
        errors.HomeError: Raised when the directory is open to others.
    """

    def __init__(self, state: Path) -> None:
        self._store = tree_store.TreeStore(state / "layers", (_KIND,))

    def pack(self, name: str, source: str, fill: Callable[[packing.Packing], None]) -> Packed:
        """Make a layer of what ``fill`` puts into it. ``source`` is told in listings.

        Raises:
            errors.LayerError: Raised when the name is refused, or the tree cannot be packed.
        """
        layers.check_name(name)
        with self._store.fresh(_KIND, many_files=True) as fresh:
            pack = packing.Packing(fresh.root)
            fill(pack)
            listed = pack.entries()
            raw = layers.canonical(listed)
            digest = layers.digest_of(listed)
            sizes = [e.size for e in listed if e.kind == "file"]
            search = tuple(path for path in pack.search if pack.kind(path) == "dir")
            info = LayerInfo(digest, (name,), source, time.time_ns() // 1_000_000, len(sizes), sum(sizes), search)
            tree_store.write(fresh.path / "listing", raw, 0o600)
            tree_store.write(fresh.path / "meta.json", msgspec.json.encode(info), 0o600)
            fresh.named(digest)
        return Packed(self._known_as(digest, name, search), tuple(pack.dropped), tuple(pack.notes))

    def pack_tree(self, top: Path, name: str, *, prefix: str = "", source: str = "directory") -> Packed:
        """Make a layer of a directory, which is at ``prefix`` in the root.

        Raises:
            errors.LayerError: As ``pack``.
        """
        fd = tree_walk.open_top(top)
        try:
            return self.pack(name, source, lambda pack: pack.tree(fd, prefix))
        finally:
            os.close(fd)

    def get(self, ref: LayerRef) -> LayerInfo:
        """Return what a reference names. The digest counts: the layer may have been built under another name.

        Raises:
            errors.LayerError: Raised when the layer is not in the store.
        """
        if not self._store.is_complete(_KIND, ref.digest):
            known = [str(one.ref()) for one in self.listed() if ref.name in one.names]
            raise errors.LayerError(
                f"layer `{ref}` is not in the store",
                hint=f"the store has {known[0]}: name that in the manifest, or build the layer from what it was made of"
                if known
                else f"covenant layer build {ref.name}; `covenant layer list` shows what there is",
            )
        return self._info(ref.digest)

    def listed(self) -> list[LayerInfo]:
        """Return every layer of the store, by name and time."""
        found = []
        for path in self._store.place(_KIND, "").iterdir():
            if layers.is_digest(path.name) and self._store.is_complete(_KIND, path.name):
                try:
                    found.append(self._info(path.name))
                except errors.LayerChangedError:
                    if path.exists():  # else another process has just removed it
                        raise
        return sorted(found, key=lambda one: (one.names[-1], one.made_ms))

    def find(self, word: str) -> LayerInfo:
        """Return the layer that a name, a digest, the beginning of one (8 digits or more) or a reference means.

        Raises:
            errors.LayerError: Raised when none or more than one is meant.
        """
        wanted = word.partition("@sha256:")[2] if "@sha256:" in word else word.removeprefix("sha256:")
        everything = self.listed()
        found = [one for one in everything if word in one.names or one.digest == wanted]
        if not found and len(wanted) >= 8:
            found = [one for one in everything if one.digest.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        if found:
            digests = ", ".join(one.digest[:12] for one in found)
            raise errors.LayerError(f"`{word}` is the name of {len(found)} layers", hint=f"give a digest: {digests}")
        near = text.nearest(word, tuple(name for one in everything for name in one.names))
        hint = f"did you mean `{near}`? If not: covenant layer list" if near else "covenant layer list"
        raise errors.LayerError(f"no layer `{word}` is in the store", hint=hint)

    def hold(self, ref: LayerRef, stack: contextlib.ExitStack) -> LayerTree:
        """Return a layer that ``collect`` and ``remove`` leave alone until ``stack`` is closed.

        Raises:
            errors.LayerError: Raised when it is not in the store, or its listing is damaged.
        """

        def missing() -> None:
            self.get(ref)

        folder = self._store.hold(_KIND, ref.digest, missing, stack)
        entries = self._listing(folder, ref.digest)
        os.utime(folder)
        return LayerTree(folder / "root", entries)

    def listing(self, ref: LayerRef) -> tuple[LayerEntry, ...]:
        """Return the entries of a layer.

        Raises:
            errors.LayerError: As ``hold``.
        """
        with contextlib.ExitStack() as stack:
            return self.hold(ref, stack).entries

    def verify(self, ref: LayerRef) -> tuple[str, ...]:
        """Read the whole layer again. Returns the difference of each path that is not as packed.

        Raises:
            errors.LayerError: As ``hold``.
        """
        with contextlib.ExitStack() as stack:
            held = self.hold(ref, stack)
            return differences(held.root, held.entries)

    def remove(self, info: LayerInfo, *, images: Sequence[str]) -> None:
        """Remove a layer. ``images`` are the root images that are made of it.

        Raises:
            errors.LayerInUseError: Raised when there is such an image, or a process holds the layer.
        """
        if images:
            raise errors.LayerInUseError(
                f"layer `{info.ref()}` is part of {len(images)} root images",
                hint="covenant layer gc --images removes those that no run uses; then repeat",
            )
        with self._store.gate():
            removed = self._store.remove(self._store.place(_KIND, info.digest))
        if not removed:
            raise errors.LayerInUseError(f"layer `{info.ref()}` is in use", hint="repeat once no image is being made")

    def collect(self, *, unused_seconds: float, images_of: Callable[[str], Sequence[str]]) -> list[str]:
        """Remove layers that no image is made of and none was made of for that long. Returns their digests."""
        return self._store.collect(unused_seconds=unused_seconds, keep=lambda _, path: bool(images_of(path.name)))

    def _info(self, digest: str) -> LayerInfo:
        folder = self._store.place(_KIND, digest)
        place, hint = folder / "meta.json", _again(folder)
        try:
            info = msgspec.json.decode(tree_store.record(folder, place.name, hint=hint), type=LayerInfo)
        except msgspec.MsgspecError as e:
            raise errors.LayerChangedError(f"`{place}` is damaged", hint=hint, where=str(place)) from e
        if info.digest != digest:
            raise errors.LayerChangedError(f"`{place}` is that of another layer", hint=hint, where=str(place))
        return info

    def _known_as(self, digest: str, name: str, search: tuple[str, ...]) -> LayerInfo:
        """Record the latest name and search directories of a layer, which may have been packed before."""
        with self._store.gate():
            info = self._info(digest)
            if info.names[-1] != name or info.search != search:
                names = (*(one for one in info.names if one != name), name)
                info = msgspec.structs.replace(info, names=names, search=search)
                atomic_file.derive(self._store.place(_KIND, digest) / "meta.json", msgspec.json.encode(info))
        return info

    def _listing(self, folder: Path, digest: str) -> tuple[LayerEntry, ...]:
        hint = _again(folder)
        entries = layers.parsed(tree_store.record(folder, "listing", hint=hint))
        if layers.digest_of(entries) != digest:
            raise errors.LayerChangedError(
                f"the listing of layer {digest[:12]} is not the one that was packed",
                hint=hint,
                where=str(folder / "listing"),
            )
        return entries


def _again(folder: Path) -> str:
    return f"rm -r {folder}, and build the layer again"


def differences(root: Path, entries: Sequence[LayerEntry], *, only: Collection[str] | None = None) -> tuple[str, ...]:
    """Compare a tree with its listing. Returns one line for each path that differs.

    Every byte is read; with ``only`` those of these paths alone.
    """
    wanted, found = {e.path: e for e in entries}, []
    top = tree_walk.open_top(root)
    try:
        if (problem := _owner(os.fstat(top))) and (only is None or "" in only):
            found.append(f"/: {problem}")
        for one in tree_walk.walk(top):
            entry = wanted.pop(one.path, None)
            if entry is None:
                found.append(f"{one.path}: is not in the listing")
            elif (only is None or one.path in only) and (difference := _difference(one, entry)):
                found.append(f"{one.path}: {difference}")
    finally:
        os.close(top)
    return (*found, *(f"{path}: is missing" for path in wanted))


def _owner(info: os.stat_result) -> str:
    if stat.S_ISLNK(info.st_mode):
        return ""
    return "has another owner or mode" if info.st_uid != os.geteuid() or info.st_mode & 0o7022 else ""


def _difference(one: tree_walk.WalkedEntry, entry: LayerEntry) -> str:
    mode = one.info.st_mode
    kind = "dir" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "file"
    if kind != entry.kind:
        return f"is a {kind} and was a {entry.kind}"
    if kind == "link":
        return "" if one.target == entry.target else "leads elsewhere"
    if (problem := _owner(one.info)) or kind == "dir":
        return problem
    if bool(mode & 0o111) != entry.executable:
        return "has another execute bit"
    fd = one.open()
    try:
        size, digest = packing.hash_open(fd)
    finally:
        os.close(fd)
    return "" if (size, digest) == (entry.size, entry.sha256) else "has other bytes"
