"""Check the workspace of a run: its record, its overlays and their layers are those that the supervisor made.

(1) the record is the one that was written, with the patterns of the policy     workspaces/RUN/record.json
(2) each place has an overlay of the layers and options that were chosen        mountinfo of the gofer
(3) the run's user owns it: the layers are idmapped                             its directory in the gofer's root
(4) the device of the changes has the run's image                               /sys/dev/block
(5) the masked files are there, each as it was made                             a mount of that device
(6) submodules and mounts are read-only: each has an immutable directory        a mount of that device
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from policy import errors
from policy.prove.live import Layer, Standing
from sandbox.kernel import libc
from sandbox.kernel.procfs import ProcessMount
from sandbox.workspace import image, nested, overlay
from sandbox.workspace.session import RunWorkspace
from sandbox.workspace.store import WorkspaceDirectory

NAME: Final = "workspace"
# Options of overlayfs that make a name in the upper layer mean more than itself, and their value where none is shown.
_OFF: Final = {
    "index": "off",
    "metacopy": "off",
    "nfs_export": "off",
    "redirect_dir": "off",
    "verity": "off",
    "xino": "off",
}
_SAFE: Final = ("off", "nofollow")
# `uuid` says how the file system gets its number.
_HARMLESS: Final = frozenset({"rw", "uuid"})
_LAYERS: Final = ("lowerdir", "upperdir", "workdir")
_PARAMETERS: Final = Path("/sys/module/overlay/parameters")


class OverlayReference(Struct, frozen=True):
    """One overlay. ``layers`` are its options with paths, ``names`` the directories of the image, ``masks`` the digest
    of the directory of masked files, ``held`` the quoted paths that it shows read-only.
    """

    layers: Mapping[str, str]
    names: image.LayerNames
    masks: str
    held: tuple[str, ...]


class WorkspaceReference(Struct, frozen=True):
    """The workspace that was made for a run. ``device`` is the loop device (a path) that has ``image``.

    ``record_sha256`` is the digest of its record, ``overlays`` are by their place in the agent's root.
    """

    directory: str
    record_sha256: str
    device: str
    image: str
    overlays: Mapping[str, OverlayReference]

    @classmethod
    def of(cls, made: RunWorkspace, places: Sequence[str]) -> WorkspaceReference:
        """Describe a mounted workspace, whose overlays are at the places in the order of ``made.layers``."""
        overlays = {}
        with _changes(made.device) as changes:
            for place, one in zip(places, made.layers, strict=False):
                options = overlay.options(one.names, masks=one.masks)
                layers = {key: str(options[key]) for key in _LAYERS}
                held = tuple(urllib.parse.quote(os.fsencode(path)) for path in one.held)
                overlays[place] = OverlayReference(layers, one.names, _digest(changes, one.names.mask), held)
        where = made.place
        return cls(str(where.path), _sha256(where), made.device, os.path.realpath(where.image), overlays)

    @classmethod
    def restored(cls, found: Mapping[str, Any]) -> WorkspaceReference:
        """Return the reference of a record (attest.reference)."""
        overlays = {
            place: OverlayReference(one["layers"], image.LayerNames(*one["names"]), one["masks"], tuple(one["held"]))
            for place, one in found["overlays"].items()
        }
        return cls(**{**found, "overlays": overlays})


def judge(
    made: WorkspaceReference, terms: Mapping[str, Any], mounts: Sequence[ProcessMount], gofer: int, uid: int
) -> Iterator[Layer]:
    """Yield the findings about the workspace of a run. ``terms`` are those of its policy, ``gofer`` is a process id."""
    findings = [
        *_record(made, terms),
        *_overlays(made, mounts),
        *_owners(made, gofer, uid),
        *_device(made),
    ]
    for expected, found in findings or [("", "")]:
        yield Layer(NAME, Standing.WIDER if found else Standing.EQUAL, expected, found)


def _record(made: WorkspaceReference, terms: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    where = WorkspaceDirectory(Path(made.directory))
    try:
        record, found = where.record(), _sha256(where)
    except (OSError, errors.WorkspaceError) as e:
        yield "the record of the workspace", str(e)
        return
    for name, held in (("mask", record.terms.mask), ("protect", record.terms.protect)):
        if sorted(held) != sorted(terms[name]):
            odd = sorted(set(held) ^ set(terms[name]))
            yield f"a record with the patterns of {name} of the policy", f"{len(odd)} differ, as {odd[0]}"
    if found != made.record_sha256:
        yield f"a record of sha256 {made.record_sha256}", f"one of sha256 {found}"


def _overlays(made: WorkspaceReference, mounts: Sequence[ProcessMount]) -> Iterator[tuple[str, str]]:
    by_place = {mount.place: mount for mount in mounts}
    defaults = _defaults()
    for place, one in made.overlays.items():
        mount = by_place.get(place)
        if mount is None or mount.type != "overlay":
            yield f"an overlay at {place}", "nothing" if mount is None else mount.type
            continue
        yield from options_found(place, one.layers, mount.super_options, defaults)


def options_found(
    place: str, layers: Mapping[str, str], shown: Sequence[str], defaults: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield each option of an overlay that is none of ours. ``defaults`` hold where the kernel shows no value."""
    held = dict(option.partition("=")[::2] for option in shown)
    for key, value in layers.items():
        if held.get(key) != value:
            yield f"at {place} {key}={value}", f"{key}={held.get(key, '')}"
    for key, value in {**defaults, **{key: held[key] for key in held if key in _OFF}}.items():
        if value not in _SAFE:
            yield f"at {place} {key}=off", f"{key}={value}"
    for key in sorted(set(held) - set(_OFF) - set(_LAYERS) - _HARMLESS):
        yield f"at {place} no option {key}", f"{key}={held[key]}"


def _defaults() -> dict[str, str]:
    """Return the values of options that the kernel shows only where they differ (overlayfs, Module options)."""
    found = {}
    for key in _OFF:
        parameter = _PARAMETERS / ("xino_auto" if key == "xino" else key)
        try:
            found[key] = "on" if parameter.read_text().strip() == "Y" else "off"
        except OSError:
            found[key] = "off"
    return found


def _owners(made: WorkspaceReference, gofer: int, uid: int) -> Iterator[tuple[str, str]]:
    root = os.open(f"/proc/{gofer}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for place in made.overlays:
            beneath = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS
            fd = libc.openat2(place.lstrip("/"), os.O_PATH | os.O_NOFOLLOW, dir_fd=root, resolve=beneath)
            info = os.fstat(fd)
            os.close(fd)
            if (info.st_uid, info.st_gid) != (uid, uid):
                yield f"at {place} a directory of uid and gid {uid}", f"one of {info.st_uid} and {info.st_gid}"
    finally:
        os.close(root)


def _device(made: WorkspaceReference) -> Iterator[tuple[str, str]]:
    number = os.stat(made.device).st_rdev
    backing = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/loop/backing_file")
    try:
        found = backing.read_text().rstrip("\n")
    except OSError:
        found = "no file"
    if found != made.image:
        yield f"{made.device} with {made.image}", f"it has {found}"
        return
    with _changes(made.device) as changes:
        for place, one in made.overlays.items():
            if _digest(changes, one.names.mask) != one.masks:
                yield f"at {place} the masked files of the start", "others"
            yield from _held(changes, place, one)


def _held(changes: int, place: str, one: OverlayReference) -> Iterator[tuple[str, str]]:
    layer = os.open(one.names.upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=changes)
    try:
        for path in one.held:
            if not nested.is_held(layer, os.fsdecode(urllib.parse.unquote_to_bytes(path))):
                yield f"read-only at {place} `{path}`", "it can be written"
    finally:
        os.close(layer)


@contextlib.contextmanager
def _changes(device: str) -> Iterator[int]:
    fd = image.mounted(device)
    try:
        yield fd
    finally:
        os.close(fd)


def _digest(changes: int, name: str) -> str:
    """Return the SHA-256 of all below a directory: names, kinds, modes, owners, sizes, and the content of files."""
    digest = hashlib.sha256()
    for directory, names, files, fd in os.fwalk(name, dir_fd=changes, follow_symlinks=False):
        names.sort()
        for one in sorted([*names, *files]):
            info = os.lstat(one, dir_fd=fd)
            row = (directory, one, info.st_mode, info.st_uid, info.st_gid, info.st_rdev)
            digest.update(repr(row).encode("utf-8", "surrogateescape"))
            if stat.S_ISREG(info.st_mode):
                digest.update(_content(fd, one))
    return digest.hexdigest()


def _content(directory: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sha256(where: WorkspaceDirectory) -> str:
    return hashlib.sha256(where.record_bytes()).hexdigest()
