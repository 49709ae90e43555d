"""Filesystem grants to a mount plan: an empty root, the runtime's closure, the package, the granted paths.

What is not listed is not in the root and does not exist for the agent. Every mount says all of its flags.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from policy import errors
from policy.compile.artefacts import Cause, Provenance, built_in
from policy.compile.causes import cause_of
from policy.grants.effective import Effective
from policy.host import Closure, HostFacts
from policy.manifest.agent import Manifest

WORKSPACE = "/workspace"
SCRATCH = "/tmp"  # noqa: S108 - the path inside the agent's own root, a tmpfs of its own
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


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount of the plan. ``source`` is ``package``, ``proc``, ``tmpfs`` or the granted host path."""

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
    effective: Effective, manifest: Manifest, host: HostFacts, closures: Iterable[Closure], provenance: Provenance
) -> dict[str, Any]:
    """mounts.json: the root's closures and mount points, then every mount, parents before children.

    Raises:
        errors.NotEnforceableError: a granted path hides the runtime's files or is not on this host.
    """
    closures = tuple(closures)
    mounts = [*_fixed(manifest, provenance), *_scratch(effective, manifest, provenance)]
    for path, reason in MASKED.items():
        provenance.add(f"mounts.json:{path}", built_in("masked", reason))
        mounts.append(Mount(path, "tmpfs", "tmpfs", "dir", _EMPTY))
    mounts += _granted(effective, manifest, host, closures, provenance)
    mounts.sort(key=lambda m: m.destination.split("/"))
    for closure in closures:
        name = closure.name
        cause = (
            cause_of(manifest, "agent.runtime")
            if name == manifest.agent.runtime
            else Cause("manifest", "permissions.executables.allow", name)
        )
        provenance.add(f"mounts.json:closure/{name}", cause)
    return {
        "version": 1,
        "root": {
            "readonly": True,
            "closures": [{"name": c.name, "entry": c.entry, "digest": c.digest} for c in closures],
            "mount_points": [{"path": m.destination, "kind": m.kind} for m in mounts],
        },
        "mounts": [m.document() for m in mounts],
    }


def _fixed(manifest: Manifest, provenance: Provenance) -> list[Mount]:
    noexec = () if manifest.agent.runtime == "rust-bin" else ("noexec",)
    provenance.add("mounts.json:/proc", built_in("proc", "runtimes read /proc/self; gVisor's own, not the host's"))
    provenance.add(f"mounts.json:{WORKSPACE}", cause_of(manifest, "agent.entry"))
    return [
        Mount("/proc", "proc", "proc", "dir", (*_SAFE, "noexec")),
        Mount(WORKSPACE, "bind", "package", "dir", ("ro", *_SAFE, *noexec)),
    ]


def _scratch(effective: Effective, manifest: Manifest, provenance: Provenance) -> list[Mount]:
    """The modes of decisions.md: read-only-package has no writable mount; the others one tmpfs of disk_mb."""
    if effective.filesystem.mode == "read-only-package":
        # gVisor puts a writable tmpfs of its own on an empty /tmp unless something is mounted there.
        reason = "gVisor's own scratch, which no grant bounds"
        provenance.add(f"mounts.json:{SCRATCH}", built_in("masked", reason))
        return [Mount(SCRATCH, "tmpfs", "tmpfs", "dir", _EMPTY)]
    provenance.add(f"mounts.json:{SCRATCH}", cause_of(manifest, "sandbox.filesystem"))
    size = f"size={effective.resources.disk_mb}m"
    return [Mount(SCRATCH, "tmpfs", "tmpfs", "dir", (*_SAFE, "noexec", "mode=1777", size))]


def _granted(
    effective: Effective,
    manifest: Manifest,
    host: HostFacts,
    closures: tuple[Closure, ...],
    provenance: Provenance,
) -> list[Mount]:
    out = []
    written = list(manifest.permissions.filesystem.read)
    for path in effective.filesystem.read.paths:
        refusal = _refusal(path, closures, host)
        if refusal is not None:
            message, hint = refusal
            where = manifest.where("permissions.filesystem.read")
            raise errors.NotEnforceableError(f"read path `{path}` {message}", hint=hint, where=where)
        key = f"permissions.filesystem.read[{written.index(path)}]" if path in written else "parent"
        provenance.add(f"mounts.json:{path}", Cause("manifest", key, path))
        out.append(Mount(path, "bind", path, host.granted[path].kind, ("ro", *_SAFE, "noexec")))
    if effective.filesystem.write.paths:
        raise errors.NotEnforceableError(
            f"write path `{effective.filesystem.write.paths[0]}` needs a project quota, which this host has not",
            hint='use filesystem = "ephemeral" and return the result as text',
            where=manifest.where("permissions.filesystem.write"),
        )
    return out


def _refusal(path: str, closures: tuple[Closure, ...], host: HostFacts) -> tuple[str, str] | None:
    """Why a read path cannot be mounted, and the mend; None when it can."""
    for taken in RESERVED:
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
