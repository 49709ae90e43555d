"""Filesystem grants to a mount plan: an empty root, the runtime's closure, the package, the granted paths.

What is not listed is not in the root and does not exist for the agent. Every mount says all of its flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from policy import errors
from policy.compile import init, links, workspace
from policy.compile.artefacts import Cause, Provenance, built_in
from policy.compile.causes import Origins, holds_path
from policy.grants.effective import Effective
from policy.grants.paths import FilesystemGrants
from policy.host import Closure, HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.manifest.workspace import TREE

WORKSPACE = "/workspace"
SCRATCH = "/tmp"  # noqa: S108 - the path inside the agent's own root, a tmpfs of its own
RESOLVER = "/etc/resolv.conf"
# Where systemd would put the credentials of a service that sees no more of /run than its own.
CREDENTIALS = "/run/credentials"
# The agent's own limits and denials (policy.explain.own_limits), which the supervisor writes and the agent reads.
OWN_LIMITS = "/run/covenant"
# The common directory of git, where the caller's directory is a linked worktree (git-worktree(1)); empty otherwise.
REPOSITORY_PLACE = "/run/workspace.git"
# The trust anchors of the host: where Debian keeps them in one file, and where OpenSSL looks, with it Python and node.
ANCHORS = ("/etc/ssl/certs/ca-certificates.crt", "/usr/lib/ssl/cert.pem")
# Paths of the root that a grant may not take: ours, the package's and the scratch.
RESERVED = (WORKSPACE, SCRATCH, OWN_LIMITS, REPOSITORY_PLACE, "/proc", "/dev", "/sys")
_SAFE = ("nosuid", "nodev")
# gVisor mounts these although the config does not ask for them, and this runsc ignores linux.maskedPaths
# (docs/adr/0005), so each is covered by an empty read-only tmpfs.
MASKED = {
    "/dev/net": "the tun device belongs to no grant",
    "/sys": "what gVisor tells of the host's hardware belongs to no grant",
}
# The caller's directory behind an overlay, which the supervisor makes for the run.
CALLERS = "workspace"
REPOSITORY = "repository"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of the agent's root
_EMPTY = ("ro", *_SAFE, "noexec", "mode=0555", "size=4k")
# The flags of a granted path. A program that walks a writable one on the host follows no link of the agent in it;
# gVisor itself reads links and stays in the agent's root (tests/kernel/test_writable_paths.py). In a writable one the
# agent is the owner of what the owner of the granted path owns, and of nothing else.
_FLAGS = {"read": ("ro", *_SAFE, "noexec"), "write": ("rw", *_SAFE, "noexec", "nosymfollow", "idmapped")}
_KEYS = {"read": ("read", "write"), "write": ("write",)}  # what is granted for writing covers reading


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount of the plan. ``source`` is ``package``, ``proc``, ``tmpfs``, ``resolver`` (a file of ours that names
    the gateway), ``credentials`` (a file system of the run's own, which the supervisor fills), ``limits`` (a directory
    of the run's own, for OWN_LIMITS), ``workspace`` (the caller's directory), ``repository`` (its git directory),
    ``volume:NAME`` (a volume, and ``workspace-volume:NAME`` where it is the workspace) or the granted host path."""

    destination: str
    type: str
    source: str
    kind: str
    options: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As it stands in mounts.json."""
        return {
            "destination": self.destination,
            "type": self.type,
            "source": self.source,
            "kind": self.kind,
            "options": list(self.options),
        }


def compile(
    effective: Effective,
    origins: Origins,
    host: HostFacts,
    closures: Iterable[Closure],
    provenance: Provenance,
    *,
    named: bool = False,
) -> dict[str, Any]:
    """mounts.json: the root's closures and mount points, then every mount, parents before children.

    ``closures`` are the runtime's and then those of the granted executables. ``named``: names are resolved.

    Raises:
        errors.NotEnforceableError: a granted path hides the runtime's files, is not on this host, or has no bound.
        errors.UnexplainedError: no key of the manifest covers a path.
    """
    runtime, *programs = closures
    image = _image(effective, origins, runtime, programs, provenance)
    mounts = [*_fixed(origins, provenance), *_scratch(effective, origins, host, provenance)]
    mounts.append(_shared_memory(origins, provenance))
    provenance.add(f"mounts.json:{OWN_LIMITS}", built_in("limits", "an agent reads its own limits and denials"))
    mounts.append(Mount(OWN_LIMITS, "bind", "limits", "dir", _FLAGS["read"]))
    for path, reason in MASKED.items():
        provenance.add(f"mounts.json:{path}", built_in("masked", reason))
        mounts.append(Mount(path, "tmpfs", "tmpfs", "dir", _EMPTY))
    if named:
        provenance.add(f"mounts.json:{RESOLVER}", built_in("resolver", "the gateway is the one to ask for names"))
        mounts.append(Mount(RESOLVER, "bind", "resolver", "file", _FLAGS["read"]))
    reserved = (*RESERVED, RESOLVER) if named else RESERVED
    if init.wanted(effective, host.arch):
        reserved = (*reserved, init.DIRECTORY)
    if as_files(effective, origins.manifest):
        provenance.add(f"mounts.json:{CREDENTIALS}", origins.of("permissions.credentials.files"))
        mounts.append(Mount(CREDENTIALS, "bind", "credentials", "dir", _FLAGS["read"]))
        reserved = (*reserved, CREDENTIALS)
    terms = workspace.terms(effective, origins.manifest)
    if terms is not None:
        callers = _workspace(terms, origins, (runtime, *programs), reserved, provenance)
        mounts += callers
        reserved = (*reserved, *(mount.destination for mount in callers))
    written = workspace.volume_mounts(effective, origins, host, (runtime, *programs), reserved, provenance)
    mounts += [Mount(place, "bind", source, "dir", options) for place, source, options in written]
    reserved = (*reserved, *(place for place, _, _ in written))
    mounts += _granted(effective, origins, host, (runtime, *programs), reserved, provenance)
    named_links = links.compile(effective, origins, host, provenance)
    mounts.sort(key=lambda m: m.destination.split("/"))
    provenance.add(f"mounts.json:closure/{runtime.name}", origins.of("agent.runtime"))
    for closure in programs:
        provenance.add(f"mounts.json:closure/{closure.name}", _program(closure.name, effective, origins))
    return {
        "version": 3,
        "rooms": rooms(effective, host),
        "root": {
            "readonly": True,
            "closures": [_listed(runtime), *({**_listed(c), "sha256": entry_digest(c)} for c in programs)],
            "mount_points": [{"path": m.destination, "kind": m.kind} for m in mounts],
            **({} if image is None else {"image": image}),
            **({"links": named_links} if named_links else {}),
        },
        "mounts": [m.document() for m in mounts],
        **({} if terms is None else {"workspace": terms}),
        **_shared(effective, origins, provenance),
    }


def _shared(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, bool]:
    """Whether the run may write beside others."""
    if not effective.filesystem.shared:
        return {}
    provenance.add("mounts.json:shared", origins.of("permissions.filesystem.shared"))
    return {"shared": True}


def _image(
    effective: Effective, origins: Origins, runtime: Closure, programs: Sequence[Closure], provenance: Provenance
) -> dict[str, Any] | None:
    """The layers of the root, the trees of it whose programs may be started, and the single programs of its layers.

    None for a root of closures alone, where no tree is granted.
    """
    # The workspace is no part of the root: its mount says whether its programs can be started.
    stack, trees = origins.manifest.root.stack, sorted(effective.executables.trees - {TREE})
    if not stack and not trees:
        return None
    for index, one in enumerate(origins.manifest.root.layers):
        name = one.partition("@")[0]
        provenance.add(f"mounts.json:layer/{name}", Cause("manifest", f"root.layers[{index}]", name))
    if len(stack) > len(origins.manifest.root.layers):
        provenance.add(f"mounts.json:layer/{stack[0].name}", origins.of("root.base"))
    for tree in trees:
        provenance.add(f"mounts.json:programs/{tree}", _tree(tree, origins))
    started = [one.entry for one in (runtime, *programs) if one.layered]
    return {
        "layers": [{"name": one.name, "digest": one.digest} for one in stack],
        "executable": trees,
        "programs": sorted(set(started)),
    }


def _tree(tree: str, origins: Origins) -> Cause:
    for index, entry in enumerate(origins.manifest.permissions.executables.allow):
        if entry.tree == tree:
            return Cause("manifest", f"permissions.executables.allow[{index}]", tree)
    raise origins.uncovered("permissions.executables.allow", tree)


def host_flags(source: str, options: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of a bind mount on the host, where ``options`` are its flags in the agent's root.

    The package and a granted path for reading lose noexec on the host, and keep it inside: gVisor maps a library from
    the host's mount, and refuses execve by its own flags (ADR 0067). What is written by an agent keeps it in both.
    """
    own = source in ("resolver", "credentials", "limits")
    # An agent maps what it wrote from its own scratch as well, so a workspace loses nothing by it.
    mapped = source == CALLERS or source.startswith(workspace.OWN_VOLUME) or "ro" in options
    return tuple(flag for flag in options if flag != "noexec" or own or not mapped)


def as_files(effective: Effective, manifest: Manifest) -> bool:
    """Whether the granted secrets are files as well: asked for, and any are granted."""
    return manifest.permissions.credentials.files and bool(effective.credentials.listing())


def has_anchors(mode: str, manifest: Manifest) -> bool:
    """Whether the root has the host's trust anchors: with a network, and without a base that brings its own."""
    return mode != "off" and manifest.root.base == "closure"


def rooms(effective: Effective, host: HostFacts) -> dict[str, int]:
    """Return the MiB that can be written below each granted path and volume; 0 where nothing bounds it."""
    paths = {path: host.granted[path].room_mb for path in effective.filesystem.write if path in host.granted}
    return {**paths, **workspace.volume_rooms(effective, host)}


def shared_mb(effective: Effective, manifest: Manifest) -> int:
    """The size of /dev/shm in MiB, 0 where nothing can be written."""
    return 0 if effective.filesystem.mode == "read-only-package" else manifest.sandbox.dev_shm_mb


def scratch_mb(effective: Effective, origins: Origins, host: HostFacts) -> int:
    """The size of the scratch: what the written paths and /dev/shm leave of disk_mb, which bounds everything together.
    0 for none.

    Raises:
        errors.NotEnforceableError: they leave nothing.
    """
    if effective.filesystem.mode == "read-only-package":
        return 0
    disk, taken = effective.resources.disk_mb or 0, sum(rooms(effective, host).values())
    callers = workspace.max_mb(origins.manifest)
    disk -= callers
    shared = shared_mb(effective, origins.manifest)
    if taken and disk <= taken:
        raise errors.NotEnforceableError(
            f"disk_mb is {disk + callers}, and the file systems of the written paths have {taken} MiB"
            + (f", the workspace {callers}" if callers else ""),
            hint=f"write disk_mb = {taken + 1 + callers} or more, or make them smaller: "
            "what they leave is the size of /tmp",
            where=origins.manifest.where("resources.disk_mb"),
        )
    if disk - taken <= shared:
        raise errors.NotEnforceableError(
            f"disk_mb leaves {disk - taken} MiB, and dev_shm_mb is {shared}",
            hint=f"write disk_mb = {taken + shared + 1 + callers} or more, or a smaller dev_shm_mb",
            where=origins.manifest.where("sandbox.dev_shm_mb"),
        )
    return disk - taken - shared


def entry_digest(closure: Closure) -> str:
    """The SHA-256 of the file that a closure starts; empty when it has none of its own."""
    return next((f.sha256 for f in closure.files if f.path == closure.entry and f.kind == "file"), "")


def _listed(closure: Closure) -> dict[str, Any]:
    return {"name": closure.name, "entry": closure.entry, "digest": closure.digest}


def _program(path: str, effective: Effective, origins: Origins) -> Cause:
    """The entry of a granted executable, and whether a parent pinned what the manifest left open."""
    for index, entry in enumerate(origins.manifest.permissions.executables.allow):
        if not entry.tree and entry.path == path:
            pinned = entry.sha256 is None and any(f.path == path and f.sha256 for f in effective.executables)
            parent = "asked for any content" if pinned else ""
            return Cause("manifest", f"permissions.executables.allow[{index}]", path, parent)
    raise origins.uncovered("permissions.executables.allow", path)


def _fixed(origins: Origins, provenance: Provenance) -> list[Mount]:
    noexec = () if started_from_package(origins.manifest) else ("noexec",)
    provenance.add("mounts.json:/proc", built_in("proc", "runtimes read /proc/self; gVisor's own, not the host's"))
    provenance.add(f"mounts.json:{WORKSPACE}", origins.of("agent.entry"))
    return [
        Mount("/proc", "proc", "proc", "dir", (*_SAFE, "noexec")),
        Mount(WORKSPACE, "bind", "package", "dir", ("ro", *_SAFE, *noexec)),
    ]


def started_from_package(manifest: Manifest) -> bool:
    """Whether the first program is a file of the package, by which it must be executable."""
    agent = manifest.agent
    return agent.runtime == "rust-bin" or (agent.runtime == "command" and _is_relative(agent.entry))


def _is_relative(entry: str) -> bool:
    return "/" in entry and not entry.startswith("/")


def _workspace(
    terms: Mapping[str, Any],
    origins: Origins,
    closures: Sequence[Closure],
    reserved: Sequence[str],
    provenance: Provenance,
) -> list[Mount]:
    """The caller's directory, and its git directory. Its programs can be started where the tree is granted.

    Raises:
        errors.NotEnforceableError: its place is taken.
    """
    place, where = origins.manifest.workspace.path, origins.manifest.where("workspace.path")
    for taken in reserved:
        if _within(place, taken) or _within(taken, place):
            message = f"the workspace at {text.quote(place)} collides with `{taken}` of the agent's root"
            raise errors.NotEnforceableError(message, hint='write another path, as path = "/work"', where=where)
    for closure in closures:
        if file := closure.below(place):
            message = f"the workspace at {text.quote(place)} covers `{file}` of the closure of `{closure.name}`"
            raise errors.NotEnforceableError(message, hint='write another path, as path = "/work"', where=where)
    provenance.add(f"mounts.json:{place}", origins.of("workspace.mode"))
    for name in terms:
        provenance.add(f"mounts.json:workspace/{name}", origins.of(f"workspace.{workspace.KEYS.get(name, name)}"))
    noexec = () if TREE in origins.effective.executables.trees else ("noexec",)
    provenance.add(f"mounts.json:{REPOSITORY_PLACE}", origins.of("workspace.mode"))
    return [
        Mount(place, "bind", CALLERS, "dir", ("rw", *_SAFE, *noexec)),
        Mount(REPOSITORY_PLACE, "bind", REPOSITORY, "dir", ("rw", *_SAFE, "noexec")),
    ]


def _shared_memory(origins: Origins, provenance: Provenance) -> Mount:
    """The shared memory: a tmpfs of dev_shm_mb, or a cover."""
    size = shared_mb(origins.effective, origins.manifest)
    if not size:
        provenance.add(f"mounts.json:{SHARED_MEMORY}", built_in("masked", "a scratch that disk_mb would not bound"))
        return Mount(SHARED_MEMORY, "tmpfs", "tmpfs", "dir", _EMPTY)
    provenance.add(f"mounts.json:{SHARED_MEMORY}", origins.of("sandbox.dev_shm_mb"))
    return Mount(SHARED_MEMORY, "tmpfs", "tmpfs", "dir", (*_SAFE, "noexec", "mode=1777", f"size={size}m"))


def _scratch(effective: Effective, origins: Origins, host: HostFacts, provenance: Provenance) -> list[Mount]:
    """The modes of decisions.md: read-only-package has no writable mount; the others one tmpfs of disk_mb, less what
    the written paths may hold."""
    if effective.filesystem.mode == "read-only-package":
        # gVisor puts a writable tmpfs of its own on an empty /tmp unless something is mounted there.
        reason = "gVisor's own scratch, which no grant bounds"
        taken = origins.value("filesystem", "mode", "sandbox.filesystem").parent
        provenance.add(f"mounts.json:{SCRATCH}", structs.replace(built_in("masked", reason), parent=taken))
        return [Mount(SCRATCH, "tmpfs", "tmpfs", "dir", _EMPTY)]
    provenance.add(f"mounts.json:{SCRATCH}", origins.value("filesystem", "mode", "sandbox.filesystem"))
    size = f"size={scratch_mb(effective, origins, host)}m"
    return [Mount(SCRATCH, "tmpfs", "tmpfs", "dir", (*_SAFE, "noexec", "mode=1777", size))]


def _granted(
    effective: Effective,
    origins: Origins,
    host: HostFacts,
    closures: tuple[Closure, ...],
    reserved: tuple[str, ...],
    provenance: Provenance,
) -> list[Mount]:
    mounted = FilesystemGrants.of(
        effective.filesystem.mode,
        (host.granted[path].place for path in effective.filesystem.read if path in host.granted),
        effective.filesystem.write,
    )
    out: dict[str, Mount] = {}
    for table, options in _FLAGS.items():
        # A path by its own name before a link to it: then its mount has its own cause.
        for path in sorted(getattr(effective.filesystem, table), key=lambda one: _place(one, host) != one):
            cause = _path(table, path, origins)
            refusal = _refusal(path, closures, reserved, host)
            if refusal is None and table == "write" and not host.granted[path].room_mb:
                refusal = f"is bounded by nothing: {host.granted[path].unbounded}", _NO_ROOM
            if refusal is not None:
                message, hint = refusal
                where = origins.manifest.where(cause.key)
                raise errors.NotEnforceableError(f"{table} path {text.quote(path)} {message}", hint=hint, where=where)
            place = _place(path, host)
            if place in out or place not in getattr(mounted, table) or links.in_closures(path, closures, host):
                continue
            provenance.add(f"mounts.json:{place}", cause)
            out[place] = Mount(place, "bind", place, host.granted[path].kind, options)
    return list(out.values())


def _place(path: str, host: HostFacts) -> str:
    return host.granted[path].place if path in host.granted else path


_OTHER = "grant another path, or copy it into the package"
_NO_ROOM = 'give it a file system of its own (docs/limits.md), or use filesystem = "ephemeral"'


def _path(table: str, path: str, origins: Origins) -> Cause:
    """The item that covers a path. What the manifest would write and a parent only reads is still its item."""
    listed = origins.manifest.permissions.filesystem
    tables = [name for name in _KEYS[table] if holds_path(getattr(listed, name), path)]
    name = tables[0] if tables else table
    cause = origins.path(f"permissions.filesystem.{name}", getattr(listed, name), path)
    return cause if name == table else structs.replace(cause, parent="asked to write it")


def _refusal(
    path: str, closures: tuple[Closure, ...], reserved: tuple[str, ...], host: HostFacts
) -> tuple[str, str] | None:
    """Why a granted path cannot be mounted, and the mend; None when it can."""
    found = host.granted.get(path)
    names = (path,) if found is None else (path, found.place, *(link for link, _ in found.links))
    for name in dict.fromkeys(names):
        for taken in reserved:
            if _within(name, taken) or _within(taken, name):
                through = "" if name == path else f"leads to {text.quote(name)}, which "
                return f"{through}collides with `{taken}` of the agent's root", _OTHER
    for closure in closures:
        # A granted mount is noexec and from the host: over a closure's file it would replace what was digested.
        if (file := closure.below(found.place if found else path)) and not links.in_closures(path, closures, host):
            hint = "grant the directory below it that the agent needs"
            if file == path:
                hint = "take it out of the manifest: the agent's root has it already"
            return f"covers `{file}` of the closure of `{closure.name}`", hint
    if found is None:
        return "was not found on this host", "make it, or take it out of the manifest"
    return None


def _within(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or lies below it, by component."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")
