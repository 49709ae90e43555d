"""Cache compiled policies by all of their inputs, so that the same decision is not compiled twice.

A holder owns its cache, as the supervisor does for its life: two holders share nothing. The cache is bounded in number
and in bytes, since manifests are hostile; the entry that was used longest ago goes first. Errors and refusals are never
cached: each entry was checked once, on these very bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from msgspec import Struct

from policy.compile import plan
from policy.compile.artefacts import Artefacts
from policy.grants.effective import Effective
from policy.host import Closure, HostFacts
from policy.manifest.agent import Manifest
from policy.manifest.permissions import VolumeGrant

ENTRIES = 64
BYTES = 16 * 1024 * 1024


class _Kept(Struct, frozen=True):
    manifest: Manifest
    artefacts: Artefacts
    size: int


@dataclass
class Cache:
    """At most ``entries`` policies of ``size`` bytes in all; ``check`` raises on one that may not be used.

    It is given the artefacts after everything that they were compiled from: grants, manifest, host, package digest.
    """

    check: Callable[[Effective, Manifest, HostFacts, str, Artefacts], object]
    entries: int = ENTRIES
    size: int = BYTES
    _kept: dict[Hashable, _Kept] = field(default_factory=dict)
    _held: int = 0

    def compile(
        self,
        effective: Effective,
        manifest: Manifest,
        host: HostFacts,
        *,
        package_digest: str,
        parent: Effective | None = None,
    ) -> Artefacts:
        """As ``plan.compile``, with the same bytes.

        Raises:
            errors.CovenantError: as ``plan.compile``, or what ``check`` raised.
        """
        key = (package_digest, effective, parent, _facts(effective, manifest, host))
        found = self._kept.pop(key, None)
        # The digest covers agent.toml, so the manifest is the same; a caller that mixes two up gets no wrong answer.
        if found is not None and found.manifest == manifest:
            self._kept[key] = found
            return found.artefacts
        if found is not None:
            self._held -= found.size
        artefacts = plan.compile(effective, manifest, host, package_digest=package_digest, parent=parent)
        self.check(effective, manifest, host, package_digest, artefacts)
        self._keep(key, _Kept(manifest, artefacts, sum(map(len, artefacts.files.values()))))
        return artefacts

    def _keep(self, key: Hashable, new: _Kept) -> None:
        if new.size > self.size or self.entries < 1:
            return
        self._kept[key] = new
        self._held += new.size
        while len(self._kept) > self.entries or self._held > self.size:
            oldest = next(iter(self._kept))
            self._held -= self._kept.pop(oldest).size


def _facts(effective: Effective, manifest: Manifest, host: HostFacts) -> Hashable:
    """Return the host facts that ``plan.compile`` reads. Free memory and the like are for rule 6, and change often."""
    runtime = host.runtimes.get(manifest.agent.runtime)
    programs = tuple((path, _closure(host.executables.get(path))) for path in effective.executables.paths)
    written = manifest.permissions.filesystem.read
    paths = dict.fromkeys((*effective.filesystem.read, *effective.filesystem.write, *written))
    granted = tuple((path, host.granted.get(path)) for path in paths)
    names = (VolumeGrant.of(one).name for one in effective.filesystem.volumes.listing())
    volumes = tuple((name, host.volumes.get(name)) for name in names)
    return host.arch, host.runsc, host.network.stack, _closure(runtime), programs, granted, volumes


def _closure(closure: Closure | None) -> Hashable:
    return None if closure is None else (closure.name, closure.entry, closure.digest, closure.layered)
