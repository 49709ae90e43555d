"""Granted paths that are links of the host: the names that the agent's root has for what is mounted (mounts.json)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from policy import errors
from policy.compile.artefacts import Provenance
from policy.compile.causes import Origins
from policy.grants.effective import Effective
from policy.grants.paths import PathSet
from policy.host import Closure, HostFacts
from policy.manifest import text

_KEY = "permissions.filesystem.read"


def compile(effective: Effective, origins: Origins, host: HostFacts, provenance: Provenance) -> list[dict[str, Any]]:
    """The links of the root, sorted by path.

    Raises:
        errors.NotEnforceableError: a link in a granted directory leads out of what is granted.
        errors.UnexplainedError: no key of the manifest covers a path.
    """
    found: dict[str, str] = {}
    for path in effective.filesystem.read:
        if not host.granted[path].links:
            continue
        cause = origins.path(_KEY, origins.manifest.permissions.filesystem.read, path)
        for link, target in host.granted[path].links:
            found[link] = target
            provenance.add(f"mounts.json:link{link}", cause)
    _check_inner(effective, origins, host)
    return [{"path": link, "target": target} for link, target in sorted(found.items())]


def in_closures(path: str, closures: Iterable[Closure], host: HostFacts) -> bool:
    """Whether a granted path is a link to a file that the root has already: it gets its name, and no mount."""
    found = host.granted.get(path)
    if found is None or not found.links:
        return False
    return any(closure.below(found.place) == found.place for closure in closures)


def _check_inner(effective: Effective, origins: Origins, host: HostFacts) -> None:
    """A link in a granted directory is there with it, and is a name of nothing where its target is not granted."""
    readable = effective.filesystem.readable()
    real = PathSet.of(host.granted[path].place for path in readable if path in host.granted)
    for index, path in enumerate(origins.manifest.permissions.filesystem.read):
        found = host.granted.get(path)
        if found is None or not found.links or path in readable.paths or not readable.covers(path):
            continue
        if not real.covers(found.place):
            raise errors.NotEnforceableError(
                f"read path {text.quote(path)} leads to {text.quote(found.place)}, which is not granted",
                hint=f"grant `{found.place}` as well",
                where=origins.manifest.where(f"{_KEY}[{index}]"),
            )
