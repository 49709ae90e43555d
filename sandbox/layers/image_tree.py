"""Write the tree of a root image: the union is computed first, so that no link is followed while it is written.

Without a grant of its tree a layer's file loses its execute bit, by a copy. Two kinds of file keep it: the programs
that the caller names, and the dynamic loader of a program that keeps it. That loader is a copy that refuses to be
started as a program (sandbox.rootfs.loader_patch): otherwise it would start any file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec import Struct, structs

from policy import errors, layers
from policy.host import Closure
from policy.layers import LayerEntry, Placed
from sandbox.layers import elf_head, packing
from sandbox.layers.store import LayerTree
from sandbox.rootfs import closure_files, loader_patch, skeleton, tree_store
from sandbox.rootfs.skeleton import MountPoint, Skeletons

_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_EMPTY = hashlib.sha256(b"").hexdigest()
_MAX_LOADER = 64 << 20


class _Source(Struct, frozen=True):
    """One tree of the union. ``files`` says where the bytes of each path are; ``free`` whether execute bits stay."""

    name: str
    free: bool
    files: dict[str, str]
    root: str = ""

    def place(self, path: str) -> str:
        return self.files.get(path) or self.root + path


class ImageTree:
    """The union of the parts of one image, and the places of their bytes."""

    def __init__(self) -> None:
        self._union = layers.Union()
        self._sources: list[_Source] = []
        self._kept: set[str] = set()
        self._points: set[str] = set()
        self._programs: dict[str, str] = {}

    def lay_closures(self, closures: Sequence[Closure], copies: Skeletons, stack: contextlib.ExitStack) -> None:
        """Lay closures as one tree. Their execute bits stay, since they are those that the policy grants.

        Raises:
            errors.HostError: Raised when two closures differ about a path.
            errors.StaleClosureError: Raised when the host's files are no longer those of the listing.
        """
        merged = skeleton.merge(closures)
        origins = skeleton.origins(closures, {c.digest: copies.copy(c, stack) for c in closures}, merged)
        entries = []
        for path, f in merged.items():
            kind: layers.EntryKind = "link" if f.kind == "symlink" else f.kind
            executable = kind == "file" and bool(f.mode & 0o111)
            size, digest = (f.size, f.sha256) if kind == "file" else (0, "")
            entries.append(LayerEntry(path, kind, executable, size, digest, f.target))
        self._lay(entries, _Source("closures", True, {path: f"{root}{path}" for path, root in origins.items()}))
        for one in closures:
            placed = self._union.resolve(one.entry) if one.entry else None
            if placed is not None and placed.entry.executable:
                self._programs[one.entry] = placed.entry.sha256

    def lay_layer(self, held: LayerTree, name: str, *, granted: bool) -> None:
        """Lay a layer. Its execute bits stay if it is ``granted``.

        Raises:
            errors.LayerError: Raised when links of the trees below lead two of its paths to one.
        """
        self._lay(held.entries, _Source(name, granted, {}, str(held.root)))

    def lay_listing(self, entries: Collection[LayerEntry]) -> None:
        """Lay the listing of an image that was made, to look up paths in it. It has no files to write."""
        self._lay(entries, _Source("image", True, {}))

    def check_programs(self) -> None:
        """Refuse layers that replace a granted program of the host: its digest is a part of the policy.

        Raises:
            errors.LayerError: Raised with the program. A file of the same bytes may be in its place.
        """
        for path, digest in self._programs.items():
            there = self._union.resolve(path)
            if there is None or there.entry.sha256 != digest:
                what = "nothing" if there is None else f"`{there.path}` of {self._sources[there.source].name}"
                raise errors.LayerError(
                    f"program `{path}` of this host is granted, and the layers put {what} in its place",
                    hint=f"leave the layer out, or build it again without `{path if there is None else there.path}`",
                    where=path,
                )

    def check_links(self, links: Closure) -> None:
        """Refuse links of granted paths (sandbox.rootfs.host_links) that would hide a part of a layer.

        Raises:
            errors.LayerError: Raised with the link. A link of the same text may be there.
        """
        for link in links.files:
            there = self._union.at(link.path) if link.kind == "symlink" else None
            if there is not None and (there.kind != "link" or there.target != link.target):
                what = f"another {there.kind}" if there.kind == "link" else f"a {there.kind}"
                raise errors.LayerError(
                    f"a granted path leads through symlink `{link.path}` of this host, where a layer has {what}",
                    hint=f"grant what `{link.path}` leads to on this host, by its own path",
                    where=link.path,
                )

    def lay_points(self, points: Sequence[MountPoint]) -> None:
        """Make mount points, with the directories above them. One at a link that leads nowhere takes the link's place.

        Raises:
            errors.HostError: Raised when a mount point runs through a file or a link, or is another kind of entry.
        """
        for path, kind in sorted(set(points)):
            layers.check_path(path)
            self._points.add(path)
            there = self._union.resolve(path)
            if there is not None and (there.entry.kind == "dir") != (kind == "dir"):
                raise _no_point(path, there)
            parts = path.split("/")[1:]
            above = ["/" + "/".join(parts[:n]) for n in range(1, len(parts))]
            for place in above:
                found = self._union.resolve(place)
                if found is not None and found.entry.kind != "dir":
                    raise _no_point(path, found)
                _refuse_link(path, place, found)
            _refuse_link(path, path, there)
            if there is not None:
                continue
            last = LayerEntry(path, "dir") if kind == "dir" else LayerEntry(path, "file", sha256=_EMPTY)
            tree = [*(LayerEntry(place, "dir") for place in above), last]
            self._lay(tree, _Source("mount points", True, {path: os.devnull} if kind == "file" else {}))

    def keep(self, programs: Collection[str], mounted: Collection[str]) -> None:
        """Let these paths keep their execute bit. Paths below a mount are not of the image.

        Raises:
            errors.LayerError: Raised when a path leads to no file that has an execute bit.
        """
        for path in programs:
            if any((path + "/").startswith(one.rstrip("/") + "/") for one in mounted):
                continue
            found = self._union.resolve(path)
            if found is None or found.entry.kind != "file":
                raise errors.LayerError(
                    f"program `{path}` is in no layer of the root",
                    hint="name a program that `covenant layer show NAME --files` lists, or add the layer that has it",
                    where=path,
                )
            if not found.entry.executable:
                raise errors.LayerError(
                    f"program `{path}` has no execute bit in its layer",
                    hint=f"chmod +x it in the directory that the layer is made of, and build the layer again: {path}",
                    where=path,
                )
            self._kept.add(found.path)

    def write(self, root: Path) -> list[LayerEntry]:
        """Write the union below an empty directory. Every byte of a layer is compared with its listing.

        Raises:
            errors.LayerChangedError: Raised when a file of a layer is not as packed.
            errors.NotEnforceableError: Raised when a loader is needed that could be started as a program.
        """
        placed = self._union.entries()
        free = {p.path for p in placed if p.entry.executable and (self._sources[p.source].free or p.path in self._kept)}
        loaders = self._loaders([p for p in placed if p.path in free], free)
        return [self._write(p, root, executable=p.path in free, loader=loaders.get(p.path, "")) for p in placed]

    def _lay(self, entries: Collection[LayerEntry], source: _Source) -> None:
        self._union.lay(entries)
        self._sources.append(source)

    def _loaders(self, programs: Sequence[Placed], free: Collection[str]) -> dict[str, str]:
        """Return the loaders that need their execute bit and have no grant, each with a program that needs it."""
        found: dict[str, str] = {}
        for p in programs:
            source = self._sources[p.source]
            named = elf_head.interpreter(source.place(p.entry.path))
            place = self._union.resolve(named) if named.startswith("/") else None
            if place is not None and place.entry.executable and place.path not in free:
                found.setdefault(place.path, p.path)
        return found

    def _write(self, p: Placed, root: Path, *, executable: bool, loader: str) -> LayerEntry:
        place, entry = Path(f"{root}{p.path}"), structs.replace(p.entry, path=p.path)
        if entry.kind == "dir":
            tree_store.make_directory(place)
            return entry
        if entry.kind == "link":
            os.symlink(entry.target, place)
            return entry
        source = self._sources[p.source]
        origin = source.place(p.entry.path)
        if origin == os.devnull:
            tree_store.write(place, b"", closure_files.DATA_MODE)
            os.utime(place, ns=(0, 0))
            return entry
        try:
            fd = os.open(origin, _FILE)
        except OSError as e:
            raise _changed(source.name, p.entry.path, e.strerror or "cannot be read") from e
        try:
            if problem := _mode_problem(os.fstat(fd), entry):
                raise _changed(source.name, p.entry.path, problem)
            if loader:
                return self._patched(fd, place, source.name, p, loader)
            if entry.executable == executable:
                size, digest = packing.hash_open(fd)
                os.link(origin, place, follow_symlinks=False)
            else:
                time_ns = os.fstat(fd).st_mtime_ns
                size, digest = packing.copy(fd, place, executable=executable, mtime_ns=time_ns)
        finally:
            os.close(fd)
        if (size, digest) != (entry.size, entry.sha256):
            raise _changed(source.name, p.entry.path, "has other bytes")
        return structs.replace(entry, executable=executable)

    def _patched(self, fd: int, place: Path, name: str, p: Placed, program: str) -> LayerEntry:
        if p.entry.size > _MAX_LOADER:
            raise errors.NotEnforceableError(f"the loader `{p.path}` is larger than {_MAX_LOADER} bytes", where=p.path)
        with os.fdopen(os.dup(fd), "rb") as stream:
            data = stream.read(_MAX_LOADER + 1)
        if hashlib.sha256(data).hexdigest() != p.entry.sha256:
            raise _changed(name, p.entry.path, "has other bytes")
        try:
            data = loader_patch.patch(data, name=p.path)
        except (errors.NotEnforceableError, errors.NotElfError) as e:
            raise errors.NotEnforceableError(
                f"`{program}` is loaded by `{p.path}` of {name}, which could start any file: {e.message}",
                hint='grant the whole tree instead: permissions.executables allow = ["root"]',
                where=p.path,
            ) from e
        tree_store.write(place, data, closure_files.PROGRAM_MODE)
        # Equal parts give equal images (sandbox.rootfs.erofs_image).
        time_ns = os.fstat(fd).st_mtime_ns
        os.utime(place, ns=(time_ns, time_ns))
        return LayerEntry(p.path, "file", True, len(data), hashlib.sha256(data).hexdigest())


def _no_point(path: str, there: Placed) -> errors.HostError:
    return errors.HostError(f"mount point `{path}` cannot be made: `{there.path}` is a {there.entry.kind}", where=path)


def _refuse_link(point: str, place: str, there: Placed | None) -> None:
    """Refuse a mount that a link of a layer would lead to another place, where attestation does not expect it."""
    if there is not None and there.path != place:
        raise errors.HostError(
            f"mount point `{point}` cannot be made: a layer has the link `{place}` to `{there.path}`",
            hint=f"build the layer again without `{place}`",
            where=point,
        )


def _mode_problem(info: os.stat_result, entry: LayerEntry) -> str:
    if not stat.S_ISREG(info.st_mode):
        return "is no plain file"
    if info.st_uid != os.geteuid() or info.st_mode & 0o7022:
        return "has another owner or mode"
    return "" if bool(info.st_mode & 0o111) == entry.executable else "has another execute bit"


def _changed(name: str, path: str, how: str) -> errors.LayerChangedError:
    return errors.LayerChangedError(
        f"`{path}` of {name} {how}: it is not as it was packed",
        hint="covenant layer verify shows every such file; remove the layer (covenant layer rm) and build it again",
        where=path,
    )
