"""Filesystem grants to a mount plan: an empty root, the runtime's closure, the package, the granted paths.

What is not listed is not in the root and does not exist for the agent. Every mount says all of its flags.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from policy import errors
from policy.compile.artefacts import Cause, Provenance, built_in
from policy.compile.causes import Origins, holds_path
from policy.grants.effective import Effective
from policy.host import Closure, HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest

WORKSPACE = "/workspace"
SCRATCH = "/tmp"  # noqa: S108 - the path inside the agent's own root, a tmpfs of its own
RESOLVER = "/etc/resolv.conf"
# Where systemd would put the credentials of a service that sees no more of /run than its own.
CREDENTIALS = "/run/credentials"
# Paths of the root that a grant may not take: ours, the package's and the scratch.
RESERVED = (WORKSPACE, SCRATCH, "/proc", "/dev", "/sys")
_SAFE = ("nosuid", "nodev")
# gVisor mounts these although the config does not ask for them, and this runsc ignores linux.maskedPaths
# (docs/adr/0005), so each is covered by an empty read-only tmpfs.
MASKED = {
    "/dev/net": "the tun device belongs to no grant",
    "/dev/shm": "a scratch that disk_mb would not bound",  # noqa: S108 - of the agent's root
    "/sys": "what gVisor tells of the host's hardware belongs to no grant",
}
_EMPTY = ("ro", *_SAFE, "noexec", "mode=0555", "size=4k")
# The flags of a granted path. A program that walks a writable one on the host follows no link of the agent in it;
# gVisor itself reads links and stays in the agent's root (tests/kernel/test_writable_paths.py). In a writable one the
# agent is the owner of what the owner of the granted path owns, and of nothing else.
_FLAGS = {"read": ("ro", *_SAFE, "noexec"), "write": ("rw", *_SAFE, "noexec", "nosymfollow", "idmapped")}
_KEYS = {"read": ("read", "write"), "write": ("write",)}  # what is granted for writing covers reading


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount of the plan. ``source`` is ``package``, ``proc``, ``tmpfs``, ``resolver`` (a file of ours that names
    the gateway), ``credentials`` (a file system of the run's own, which the supervisor fills) or the granted host
    path."""

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
    mounts = [*_fixed(origins, provenance), *_scratch(effective, origins, host, provenance)]
    for path, reason in MASKED.items():
        provenance.add(f"mounts.json:{path}", built_in("masked", reason))
        mounts.append(Mount(path, "tmpfs", "tmpfs", "dir", _EMPTY))
    if named:
        provenance.add(f"mounts.json:{RESOLVER}", built_in("resolver", "the gateway is the one to ask for names"))
        mounts.append(Mount(RESOLVER, "bind", "resolver", "file", _FLAGS["read"]))
    reserved = (*RESERVED, RESOLVER) if named else RESERVED
    if as_files(effective, origins.manifest):
        provenance.add(f"mounts.json:{CREDENTIALS}", origins.of("permissions.credentials.files"))
        mounts.append(Mount(CREDENTIALS, "bind", "credentials", "dir", _FLAGS["read"]))
        reserved = (*reserved, CREDENTIALS)
    mounts += _granted(effective, origins, host, (runtime, *programs), reserved, provenance)
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
        },
        "mounts": [m.document() for m in mounts],
    }


def as_files(effective: Effective, manifest: Manifest) -> bool:
    """Whether the granted secrets are files as well: asked for, and any are granted."""
    return manifest.permissions.credentials.files and bool(effective.credentials.listing())


def rooms(effective: Effective, host: HostFacts) -> dict[str, int]:
    """Return the MiB that can be written below each granted path; 0 where nothing bounds it."""
    return {path: host.granted[path].room_mb for path in effective.filesystem.write if path in host.granted}


def scratch_mb(effective: Effective, origins: Origins, host: HostFacts) -> int:
    """The size of the scratch: what the written paths leave of disk_mb, which bounds everything together. 0 for none.

    Raises:
        errors.NotEnforceableError: they leave nothing.
    """
    if effective.filesystem.mode == "read-only-package":
        return 0
    disk, taken = effective.resources.disk_mb or 0, sum(rooms(effective, host).values())
    if taken and disk <= taken:
        raise errors.NotEnforceableError(
            f"disk_mb is {disk}, and the file systems of the written paths have {taken} MiB",
            hint=f"write disk_mb = {taken + 1} or more, or make them smaller: what they leave is the size of /tmp",
            where=origins.manifest.where("resources.disk_mb"),
        )
    return disk - taken


def entry_digest(closure: Closure) -> str:
    """The SHA-256 of the file that a closure starts; empty when it has none of its own."""
    return next((f.sha256 for f in closure.files if f.path == closure.entry and f.kind == "file"), "")


def _listed(closure: Closure) -> dict[str, Any]:
    return {"name": closure.name, "entry": closure.entry, "digest": closure.digest}


def _program(path: str, effective: Effective, origins: Origins) -> Cause:
    """The entry of a granted executable, and whether a parent pinned what the manifest left open."""
    for index, entry in enumerate(origins.manifest.permissions.executables.allow):
        if entry.path == path:
            pinned = entry.sha256 is None and any(f.path == path and f.sha256 for f in effective.executables)
            parent = "asked for any content" if pinned else ""
            return Cause("manifest", f"permissions.executables.allow[{index}]", path, parent)
    raise origins.uncovered("permissions.executables.allow", path)


def _fixed(origins: Origins, provenance: Provenance) -> list[Mount]:
    noexec = () if origins.manifest.agent.runtime == "rust-bin" else ("noexec",)
    provenance.add("mounts.json:/proc", built_in("proc", "runtimes read /proc/self; gVisor's own, not the host's"))
    provenance.add(f"mounts.json:{WORKSPACE}", origins.of("agent.entry"))
    return [
        Mount("/proc", "proc", "proc", "dir", (*_SAFE, "noexec")),
        Mount(WORKSPACE, "bind", "package", "dir", ("ro", *_SAFE, *noexec)),
    ]


def _scratch(effective: Effective, origins: Origins, host: HostFacts, provenance: Provenance) -> list[Mount]:
    """The modes of decisions.md: read-only-package has no writable mount; the others one tmpfs of disk_mb, less what
    the written paths may hold."""
    if effective.filesystem.mode == "read-only-package":
        # gVisor puts a writable tmpfs of its own on an empty /tmp unless something is mounted there.
        reason = "gVisor's own scratch, which no grant bounds"
        taken = origins.value("filesystem", "mode", "sandbox.filesystem").parent
        provenance.add(f"mounts.json:{SCRATCH}", replace(built_in("masked", reason), parent=taken))
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
    out = []
    for table, options in _FLAGS.items():
        for path in getattr(effective.filesystem, table):
            cause = _path(table, path, origins)
            refusal = _refusal(path, closures, reserved, host)
            if refusal is None and table == "write" and not host.granted[path].room_mb:
                refusal = f"is bounded by nothing: {host.granted[path].unbounded}", _NO_ROOM
            if refusal is not None:
                message, hint = refusal
                where = origins.manifest.where(cause.key)
                raise errors.NotEnforceableError(f"{table} path {text.quote(path)} {message}", hint=hint, where=where)
            provenance.add(f"mounts.json:{path}", cause)
            out.append(Mount(path, "bind", path, host.granted[path].kind, options))
    return out


_NO_ROOM = 'give it a file system of its own (docs/limits.md), or use filesystem = "ephemeral"'


def _path(table: str, path: str, origins: Origins) -> Cause:
    """The item that covers a path. What the manifest would write and a parent only reads is still its item."""
    listed = origins.manifest.permissions.filesystem
    tables = [name for name in _KEYS[table] if holds_path(getattr(listed, name), path)]
    name = tables[0] if tables else table
    cause = origins.path(f"permissions.filesystem.{name}", getattr(listed, name), path)
    return cause if name == table else replace(cause, parent="asked to write it")


def _refusal(
    path: str, closures: tuple[Closure, ...], reserved: tuple[str, ...], host: HostFacts
) -> tuple[str, str] | None:
    """Why a granted path cannot be mounted, and the mend; None when it can."""
    for taken in reserved:
        if _within(path, taken) or _within(taken, path):
            return f"collides with `{taken}` of the agent's root", "grant another path, or copy it into the package"
    for closure in closures:
        # A granted mount is noexec and from the host: over a closure's file it would replace what was digested.
        if file := closure.below(path):
            hint = "grant the directory below it that the agent needs"
            return f"covers `{file}` of the closure of `{closure.name}`", hint
    if path not in host.granted:
        return "was not found on this host", "make it, or take it out of the manifest"
    return None


def _within(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or lies below it, by component."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")
