"""mounts.json read back: what the agent sees, what it can write, and which programs it can start.

Every mount must be one of the kinds below, to the option. A mount that is none of them is refused rather than
passed on, since an option that is not understood may be one that opens something.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from msgspec import Struct, structs

from policy.decompile import config, documents, links
from policy.decompile.documents import Files, closed, fixed, normalised, refuse, shown
from policy.grants import paths
from policy.grants.executables import ExecutableSet
from policy.grants.paths import FilesystemGrants

MOUNTS = "mounts.json"
VERSION = 3
_HELD = ("nosuid", "nodev", "noexec")
_MASK = ("ro", *_HELD, "mode=0555", "size=4k")
_READ = ("ro", *_HELD)
_WRITE = ("rw", *_HELD, "nosymfollow", "idmapped")
_PROC = _HELD
WORKSPACE_TERMS: Final = {"apply": str, "below": list, "mask": list, "max_mb": int, "protect": list}
# The caller's directory behind an overlay, without and with programs that can be started.
_CALLERS = (("rw", *_HELD), ("rw", "nosuid", "nodev"))
# Its git directory, where it is a linked worktree.
REPOSITORY: Final = "/run/workspace.git"
_REPOSITORY = ("rw", *_HELD)
# The package of a program of its own has to be executable; everything in it but the entry is 0444.
_PACKAGE = {"script": _READ, "program": ("ro", "nosuid", "nodev")}
_SCRATCH_HEAD = (*_HELD, "mode=1777")
WORKSPACE: Final = "/workspace"
# Where libc reads whom to ask for names; ours says the gateway.
RESOLVER: Final = "/etc/resolv.conf"
# A file system that the supervisor alone fills, with the granted secrets.
CREDENTIALS: Final = "/run/credentials"
# The agent's own limits and denials, in a directory that the supervisor alone writes.
OWN_LIMITS: Final = "/run/covenant"
SCRATCH: Final = "/tmp"  # noqa: S108 (the agent's own)
# gVisor mounts these itself, writable, or shows the host in them: each policy covers them (docs/adr/0005).
MASKS: Final = ("/dev/net", "/sys")
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 (the agent's own)
# Runtimes whose interpreter lies in a closure, and the one that starts a program of the package.
_INTERPRETERS = ("node", "python3")
_PROGRAM = "rust-bin"
# Any program: of the package, of a closure or of a layer.
_COMMAND = "command"
# A volume of [permissions.filesystem], and one that is the workspace, without and with programs that can be started.
_VOLUME = re.compile(r"(workspace-)?volume:([a-z0-9][a-z0-9-]{0,31})")
_VOLUMES = {"": (_WRITE,), "workspace-": (_WRITE, tuple(flag for flag in _WRITE if flag != "noexec"))}
_LAYER = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TREE = re.compile(r"root|layer:[a-z0-9][a-z0-9._-]{0,63}")


_SIZED: Final = {SCRATCH: "scratch", SHARED_MEMORY: "shared memory"}


class ReadClosure(Struct, frozen=True):
    """Files that a program needs, by digest: the runtime (a word) or a granted program (its path).

    ``sha256`` is the digest of the file at ``entry``; empty for a program in the package.
    """

    name: str
    entry: str
    digest: str
    sha256: str


class ReadImage(Struct, frozen=True):
    """The layers of a root, lowest first, as (name, digest). ``trees`` are those whose programs can all be started,
    ``programs`` the single ones of its layers."""

    layers: tuple[tuple[str, str], ...] = ()
    trees: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


class ReadWorkspace(Struct, frozen=True):
    """The caller's directory: its place, and its terms as they stand in mounts.json (policy.compile.workspace)."""

    place: str
    max_mb: int
    below: tuple[str, ...]
    mask: tuple[str, ...]
    protect: tuple[str, ...]
    apply: str
    programs: bool


class ReadVolume(Struct, frozen=True):
    """A volume and its place. ``programs``: those in it can be started."""

    name: str
    place: str
    programs: bool = False


class RootContents(Struct, frozen=True):
    """The contents of an agent's root.

    ``scratch_mb`` is the size of the writable tmpfs, None when there is none; ``mounted`` are all places in order,
    ``granted`` those of the host, with ``file`` or ``dir``; ``rooms`` what can be written below each writable one, MiB.
    ``shared_mb`` is the size of /dev/shm. ``resolver`` says that the gateway is named as the one to ask for names,
    ``secrets`` that the granted secrets are files. ``links`` are the links of the root that granted paths lead through,
    each with its text. ``workspace`` is the caller's directory, None without one. ``volumes`` are in order of place.
    """

    filesystem: FilesystemGrants
    executables: ExecutableSet
    runtime: ReadClosure
    programs: tuple[ReadClosure, ...]
    scratch_mb: int | None
    mounted: tuple[str, ...]
    granted: Mapping[str, str]
    rooms: Mapping[str, int]
    resolver: bool
    secrets: bool
    shared_mb: int = 0
    image: ReadImage = ReadImage()
    links: Mapping[str, str] = types.MappingProxyType({})
    workspace: ReadWorkspace | None = None
    volumes: tuple[ReadVolume, ...] = ()


class _Mount(Struct, frozen=True):
    destination: str
    kind: str
    options: tuple[str, ...]
    source: str
    type: str


def read(files: Files, oci: config.Config) -> RootContents:
    """The root of the agent, of which config.json must say the same.

    Raises:
        errors.ArtefactError: a mount is of no known kind, a cover is missing, or the two files differ.
    """
    document = documents.load(files, MOUNTS)
    shape = {"mounts": list, "rooms": dict, "root": dict, "version": int}
    for name, kind in (("workspace", dict), ("shared", bool)):
        shape |= {name: kind} if type(document) is dict and name in document else {}
    whole = closed(document, MOUNTS, shape)
    if "shared" in whole:
        fixed(whole["shared"], f"{MOUNTS}:shared", True)
    fixed(whole["version"], f"{MOUNTS}:version", VERSION)
    form = {"closures": list, "mount_points": list, "readonly": bool}
    form |= {"image": dict} if "image" in whole["root"] else {}
    form |= {"links": list} if "links" in whole["root"] else {}
    root = closed(whole["root"], f"{MOUNTS}:root", form)
    image = _image(root["image"]) if "image" in root else ReadImage()
    fixed(root["readonly"], f"{MOUNTS}:root/readonly", True)
    mounts = tuple(_mount(item) for item in whole["mounts"])
    _in_order(mounts)
    fixed(
        root["mount_points"],
        f"{MOUNTS}:root/mount_points",
        [{"kind": mount.kind, "path": mount.destination} for mount in mounts],
    )
    fixed(oci.mounts, f"{config.CONFIG}:mounts", [_configured(index, mount) for index, mount in enumerate(mounts)])
    runtime, programs = _closures(root["closures"], oci.args)
    _from_closures(runtime, programs, mounts, init=oci.init)
    callers = _workspace(whole.get("workspace"), mounts)
    seen = _seen(mounts, oci, runtime, programs, whole["rooms"], image, callers)
    if "shared" in whole:
        seen = structs.replace(seen, filesystem=replace(seen.filesystem, shared=True))
    if "links" not in root:
        return seen
    entries = (runtime.entry, *(program.entry for program in programs), *image.programs)
    found = links.read(
        root["links"], mounted=seen.mounted, read=seen.filesystem.read.paths, written=seen.rooms, entries=entries
    )
    return structs.replace(seen, links=found)


def _image(value: dict[str, Any]) -> ReadImage:
    where = f"{MOUNTS}:root/image"
    own = closed(value, where, {"executable": list, "layers": list, "programs": list})
    layers = []
    for item in own["layers"]:
        layer = closed(item, where, {"digest": str, "name": str})
        if not _LAYER.fullmatch(layer["name"]):
            raise refuse(where, f"{shown(layer['name'])} is no name of a layer")
        layers.append((layer["name"], config.digest(layer["digest"], where)))
    names = [name for name, _ in layers]
    trees = documents.listed(own["executable"], where, str)
    programs = documents.listed(own["programs"], where, str)
    if len(set(names)) != len(names) or not (layers or trees):
        raise refuse(where, "a layer stands twice, or there is nothing in the image")
    for tree in trees:
        if not _TREE.fullmatch(tree) or (tree != "root" and tree.partition(":")[2] not in names):
            raise refuse(where, f"{shown(tree)} is no tree of the root")
    for listed in (trees, programs):
        if listed != sorted(set(listed)):
            raise refuse(where, f"{shown(listed)} is not sorted, or repeats")
    return ReadImage(tuple(layers), tuple(trees), tuple(normalised(one, where) for one in programs))


def _workspace(value: dict[str, Any] | None, mounts: Sequence[_Mount]) -> ReadWorkspace | None:
    """The workspace of the terms and the mount, of which there are both or neither."""
    where = f"{MOUNTS}:workspace"
    found = [mount for mount in mounts if mount.source == "workspace"]
    for source in ("workspace", "repository"):
        number = len([mount for mount in mounts if mount.source == source])
        if number != (value is not None):
            raise refuse(where, f"there are {number} mounts of a {source}, and {int(value is not None)} of its terms")
    if value is None:
        return None
    own = closed(value, where, WORKSPACE_TERMS)
    if own["max_mb"] < 1:
        raise refuse(where, f"{shown(own['max_mb'])} bounds nothing")
    documents.one_of(own["apply"], where, ("ask", "operator", "never"))
    lists = {name: tuple(documents.listed(own[name], where, str)) for name in ("below", "mask", "protect")}
    for name, one in lists.items():
        if list(one) != sorted(set(one)) or not one:
            raise refuse(where, f"{name} is empty, not sorted, or repeats")
    below = tuple(normalised(one, where) for one in lists["below"])
    programs = "noexec" not in found[0].options
    return ReadWorkspace(
        found[0].destination, own["max_mb"], below, lists["mask"], lists["protect"], own["apply"], programs
    )


def _mount(value: object) -> _Mount:
    item = closed(
        value, f"{MOUNTS}:mounts", {"destination": str, "kind": str, "options": list, "source": str, "type": str}
    )
    where = f"{MOUNTS}:{shown(item['destination'])}"
    documents.one_of(item["kind"], where, ("dir", "file"))
    options = documents.listed(item["options"], where, str)
    return _Mount(normalised(item["destination"], where), item["kind"], tuple(options), item["source"], item["type"])


def _in_order(mounts: Sequence[_Mount]) -> None:
    """Nothing is mounted twice or over what was mounted before it: a later mount would hide, or show, something."""
    before: list[str] = []
    for mount in mounts:
        prefix = mount.destination.rstrip("/") + "/"
        if hidden := [p for p in before if (p + "/").startswith(prefix)]:
            raise refuse(f"{MOUNTS}:{shown(mount.destination)}", f"it would be mounted over {shown(hidden[0])}")
        before.append(mount.destination)


def _configured(index: int, mount: _Mount) -> dict[str, Any]:
    """The mount as runsc is told of it: the supervisor binds the source of that number there beforehand."""
    bind = mount.type == "bind"
    return {
        "destination": mount.destination,
        "options": [*(["bind"] if bind else []), *mount.options],
        "source": f"mounts/{index}" if bind else mount.source,
        "type": mount.type,
    }


def _closures(value: list[Any], args: tuple[str, ...]) -> tuple[ReadClosure, tuple[ReadClosure, ...]]:
    """The runtime's closure, which the arguments must start, and those of the granted programs."""
    where = f"{MOUNTS}:root/closures"
    shape = {"digest": str, "entry": str, "name": str, "sha256": str}
    found: list[ReadClosure] = []
    for item in value:
        own = closed(item, where, shape if type(item) is dict and "sha256" in item else _without(shape, "sha256"))
        place = f"{where}/{shown(own['name'])}"
        sha256 = config.digest(own["sha256"], place) if "sha256" in own else ""
        found.append(ReadClosure(own["name"], own["entry"], config.digest(own["digest"], place), sha256))
    if not found or len({c.name for c in found}) != len(found):
        raise refuse(where, "there is no closure, or one stands twice")
    runtime, *programs = found
    for program in programs:
        normalised(program.name, where)
        normalised(program.entry, where)
        if not program.sha256:
            raise refuse(where, f"program {shown(program.name)} is not bound to its content")
    _started(runtime, args)
    return runtime, tuple(programs)


def _from_closures(
    runtime: ReadClosure, programs: Sequence[ReadClosure], mounts: Sequence[_Mount], *, init: bool
) -> None:
    """Check that each started program lies in the root, which closures make, and in no mount."""
    held = runtime.name in _INTERPRETERS or (runtime.name == _COMMAND and not _of_package(runtime))
    closures = (*([runtime] if held else []), *programs)
    for entry in (*([config.INIT, config.SSH_RELAY] if init else []), *(closure.entry for closure in closures)):
        for mount in mounts:
            if (entry + "/").startswith(mount.destination.rstrip("/") + "/"):
                message = f"program {shown(entry)} lies in the mount at {shown(mount.destination)}"
                raise refuse(f"{MOUNTS}:root/closures", message)


def _of_package(runtime: ReadClosure) -> bool:
    return runtime.entry.startswith(f"{WORKSPACE}/")


def _without(shape: Mapping[str, type], key: str) -> dict[str, type]:
    return {name: kind for name, kind in shape.items() if name != key}


def _started(runtime: ReadClosure, args: tuple[str, ...]) -> None:
    """The first process is the runtime's interpreter with one file of the package, or that file itself."""
    where = f"{config.CONFIG}:process/args"
    if runtime.name in _INTERPRETERS:
        fixed(list(args[:1]), where, [normalised(runtime.entry, where)])
        entry = args[1:]
    elif runtime.name == _COMMAND:
        fixed(list(args[:1]), where, [normalised(runtime.entry, where)])
        return
    elif runtime.name == _PROGRAM and args:
        entry = (args[0].removeprefix(f"{WORKSPACE}/"), *args[1:])
        if runtime.entry not in ("", args[0]) or not args[0].startswith(f"{WORKSPACE}/"):
            raise refuse(where, f"it starts {shown(args[0])}, which is not the program of the package")
    else:
        raise refuse(where, f"{shown(runtime.name)} is no runtime")
    # The first argument is a path inside the package: not an option (`-c`), and nothing outside (`../`, `/`). The
    # others are the program's own.
    if not entry or entry[0].startswith(("-", "/")):
        raise refuse(where, f"the arguments are {shown(list(args))}")
    normalised(f"{WORKSPACE}/{entry[0]}", where)


def _seen(
    mounts: Sequence[_Mount],
    oci: config.Config,
    runtime: ReadClosure,
    programs: tuple[ReadClosure, ...],
    rooms: Mapping[str, Any],
    image: ReadImage,
    callers: ReadWorkspace | None,
) -> RootContents:
    kinds = {mount.destination: kind for mount, kind in zip(mounts, _kinds(mounts, runtime), strict=True)}
    needed = (*MASKS, "/proc", SHARED_MEMORY, SCRATCH, WORKSPACE, OWN_LIMITS)
    if missing := [place for place in needed if place not in kinds]:
        raise refuse(MOUNTS, f"there is no mount at {shown(missing[0])}")
    scratch = next((_size(m) for m in mounts if kinds[m.destination] == "scratch"), None)
    shared = next((_size(m) for m in mounts if kinds[m.destination] == "shared memory"), 0)
    if shared and scratch is None:
        raise refuse(MOUNTS, "a /dev/shm that can be written without a /tmp of its own")
    if (scratch is not None) != oci.scratch:
        raise refuse(MOUNTS, "the environment and the mounts differ in whether /tmp can be written")
    write = [place for place, kind in kinds.items() if kind == "write"]
    volumes = tuple(_read_volume(mount) for mount in mounts if kinds[mount.destination] == "volume")
    if len({one.name for one in volumes}) != len(volumes):
        raise refuse(MOUNTS, "a volume is mounted twice")
    written = [*write, *(one.place for one in volumes)]
    mode: paths.Mode = "host" if written else "read-only-package" if scratch is None else "ephemeral"
    if written and scratch is None:
        raise refuse(MOUNTS, "a writable path without a /tmp of its own")
    if callers is not None and scratch is None:
        raise refuse(MOUNTS, "a workspace without a /tmp of its own")
    startable = (callers is not None and callers.programs) or any(one.programs for one in volumes)
    trees = (*image.trees, *(["workspace"] if startable else ()))
    if sorted(rooms) != sorted(written) or any(type(mb) is not int or mb < 1 for mb in rooms.values()):
        raise refuse(f"{MOUNTS}:rooms", f"{shown(rooms)} does not bound each of the written paths {shown(written)}")
    return RootContents(
        FilesystemGrants.of(
            mode,
            (place for place, kind in kinds.items() if kind == "read"),
            write,
            volumes=(f"{one.name}:{one.place}" for one in volumes),
        ),
        ExecutableSet.of(((program.name, program.sha256) for program in programs), trees),
        runtime,
        programs,
        scratch,
        tuple(kinds),
        {mount.destination: mount.kind for mount in mounts if kinds[mount.destination] in ("read", "write")},
        rooms,
        kinds.get(RESOLVER) == "resolver",
        kinds.get(CREDENTIALS) == "credentials",
        shared,
        image,
        workspace=callers,
        volumes=volumes,
    )


def _read_volume(mount: _Mount) -> ReadVolume:
    return ReadVolume(mount.source.partition(":")[2], mount.destination, "noexec" not in mount.options)


def _kinds(mounts: Sequence[_Mount], runtime: ReadClosure) -> Iterator[str]:
    """Classify each mount, by the table of all allowed mounts."""
    started = runtime.name == _PROGRAM or (runtime.name == _COMMAND and _of_package(runtime))
    package = _PACKAGE["program" if started else "script"]
    for mount in mounts:
        place = mount.destination
        known: dict[tuple[str, str, tuple[str, ...]], str]
        if place in MASKS:
            known = {("tmpfs", "tmpfs", _MASK): "mask"}
        elif place == "/proc":
            known = {("proc", "proc", _PROC): "proc"}
        elif place == WORKSPACE:
            known = {("bind", "package", package): "package"}
        elif place == OWN_LIMITS:
            known = {("bind", "limits", _READ): "limits"}
        elif place == REPOSITORY:
            known = {("bind", "repository", _REPOSITORY): "repository"}
        elif place in (SCRATCH, SHARED_MEMORY):
            known = {
                ("tmpfs", "tmpfs", _MASK): "mask",
                ("tmpfs", "tmpfs", (*_SCRATCH_HEAD, _size_of(mount))): _SIZED[place],
            }
        else:
            known = {("bind", place, _READ): "read", ("bind", place, _WRITE): "write"}
            known |= {("bind", "workspace", options): "workspace" for options in _CALLERS}
            if found := _VOLUME.fullmatch(mount.source):
                known |= {("bind", mount.source, options): "volume" for options in _VOLUMES[found[1] or ""]}
            if place == RESOLVER:
                known[("bind", "resolver", _READ)] = "resolver"
            if place == CREDENTIALS:
                known[("bind", "credentials", _READ)] = "credentials"
        kind = known.get((mount.type, mount.source, mount.options))
        files = {"read": ("file", "dir"), "write": ("file", "dir"), "resolver": ("file",)}
        if kind is None or mount.kind not in files.get(kind, ("dir",)):
            raise refuse(f"{MOUNTS}:{shown(place)}", f"no mount of a known kind: {shown([mount.type, *mount.options])}")
        yield kind


def _size_of(mount: _Mount) -> str:
    """The size option of a mount, which must be its last; an impossible one when there is none."""
    return mount.options[-1] if mount.options and mount.options[-1].startswith("size=") else "size="


def _size(mount: _Mount) -> int:
    """The size of a scratch tmpfs in MiB. A size of 0 would be no limit at all (tmpfs(5))."""
    where = f"{MOUNTS}:{shown(mount.destination)}"
    text = mount.options[-1].removeprefix("size=")
    if not text.endswith("m") or not text[:-1].isdecimal() or not text.isascii() or text[0] == "0" or len(text) > 12:
        raise refuse(where, f"{shown(mount.options[-1])} is no size in MiB")
    return int(text[:-1])
