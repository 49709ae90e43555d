"""``[workspace]`` to its terms in mounts.json, and volumes to mounts, each with its size as its bound (ADR 0081)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from policy import data, errors
from policy.compile.artefacts import Cause, Provenance
from policy.compile.causes import Origins
from policy.grants.effective import Effective
from policy.host import Closure, HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.manifest.permissions import VolumeGrant
from policy.manifest.workspace import TREE

# The keys of the manifest whose terms have another name.
KEYS: Final = {"below": "from"}
VOLUME: Final = "volume:"
OWN_VOLUME: Final = "workspace-volume:"
_HELD: Final = ("rw", "nosuid", "nodev")
# A volume is idmapped as a granted path is: the agent is the owner of what the owner of its top directory owns.
_REST: Final = ("nosymfollow", "idmapped")
_OTHER: Final = "write another place for it, as /data"

# Place, source and options of a mount.
VolumeMount = tuple[str, str, tuple[str, ...]]


def max_mb(manifest: Manifest) -> int:
    """The MiB of changes that a run may make in the caller's directory."""
    return manifest.workspace.max_mb if manifest.workspace.mode == "overlay" else 0


def terms(effective: Effective, manifest: Manifest) -> dict[str, Any] | None:
    """The terms of a caller's directory as they stand in mounts.json. None without one, or where nothing is written."""
    one = manifest.workspace
    if one.mode != "overlay" or effective.filesystem.mode == "read-only-package":
        return None
    files = data.workspace_files()
    return {
        "apply": one.apply,
        "below": sorted(one.below),
        "mask": sorted({*one.mask, *files.mask}),
        "max_mb": one.max_mb,
        "protect": sorted({*one.protect, *files.protect}),
    }


def volume_mounts(
    effective: Effective,
    origins: Origins,
    host: HostFacts,
    closures: Sequence[Closure],
    reserved: Sequence[str],
    provenance: Provenance,
) -> list[VolumeMount]:
    """The mounts of the granted volumes.

    Raises:
        errors.NotEnforceableError: a place is taken, or a volume is not on this host.
        errors.UnexplainedError: no key of the manifest names it.
    """
    out: list[VolumeMount] = []
    for one in map(VolumeGrant.of, effective.filesystem.volumes.listing()):
        cause = _cause(one, origins)
        places = (*reserved, *(place for place, _, _ in out))
        refused = _refusal(one, closures, places, host)
        if refused is not None:
            message, hint = refused
            where = origins.manifest.where(cause.key)
            raise errors.NotEnforceableError(f"volume `{one.name}` {message}", hint=hint, where=where)
        provenance.add(f"mounts.json:{one.place}", cause)
        out.append(_mount(one, cause, effective))
    return out


def volume_rooms(effective: Effective, host: HostFacts) -> dict[str, int]:
    """The MiB of each granted volume, by its place."""
    found = map(VolumeGrant.of, effective.filesystem.volumes.listing())
    return {one.place: host.volumes[one.name].mb for one in found if one.name in host.volumes}


def _mount(one: VolumeGrant, cause: Cause, effective: Effective) -> VolumeMount:
    if cause.key != "workspace.volume":
        return one.place, f"{VOLUME}{one.name}", (*_HELD, "noexec", *_REST)
    noexec = () if TREE in effective.executables.trees else ("noexec",)
    return one.place, f"{OWN_VOLUME}{one.name}", (*_HELD, *noexec, *_REST)


def _cause(one: VolumeGrant, origins: Origins) -> Cause:
    key = next((key for key, written in origins.manifest.volumes if written == one), None)
    if key is None:
        raise origins.uncovered("permissions.filesystem.write", one.grant)
    return Cause("manifest", key, one.grant)


def _refusal(
    one: VolumeGrant, closures: Sequence[Closure], reserved: Sequence[str], host: HostFacts
) -> tuple[str, str] | None:
    place = text.quote(one.place)
    for taken in reserved:
        if _within(one.place, taken) or _within(taken, one.place):
            return f"at {place} collides with `{taken}` of the agent's root", _OTHER
    for closure in closures:
        if file := closure.below(one.place):
            return f"at {place} covers `{file}` of the closure of `{closure.name}`", _OTHER
    if one.name not in host.volumes:
        return "is not on this host", f"covenant volume create {one.name} --size 1G"
    return None


def _within(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or lies below it, by component."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")
