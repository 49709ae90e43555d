"""Everything that a question about an agent is judged by, put together in one place for every asker.

``covenant policy why``, ``covenant denials``, ``covenant manifest check`` and a run that tells its agent of a denial
all judge by this, so that none of them can answer otherwise than the others (ADR 0075).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from policy import data
from policy.compile import mounts
from policy.compile.artefacts import Artefacts
from policy.decompile import read
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.why.ask import Sight


def of(
    artefacts: Artefacts,
    manifest: Manifest,
    *,
    files: Collection[str],
    host: HostFacts,
    never: Mapping[str, str],
    above: Mapping[str, Effective] | None = None,
) -> Sight:
    """Return the sight of a compiled package: its artefacts read back, below the ceilings of its role and ``above``.

    ``files`` are the names in the package, ``host`` the facts that it was compiled with, ``never`` the trees of this
    host that are never granted.

    Raises:
        errors.ArtefactError: Raised when the artefacts cannot be read back.
    """
    bounds: dict[str, Effective] = {}
    role = manifest.agent.role
    if role is not None and role in data.roles().by_name:
        bounds[f"role {text.quote(role)}"] = data.roles().ceiling(role)
    closures = (*host.runtimes.values(), *host.executables.values())
    seen = read.read(artefacts.files)
    anchors = mounts.has_anchors(seen.reached.mode, manifest)
    return Sight(seen, files, closures, {**bounds, **(above or {})}, never, anchors, manifest)
