"""The network plan. This version can enforce one mode: ``off``, a network namespace with loopback alone.

Other modes are refused as not yet enforceable before anything is compiled, never ignored: the plan is a closed
table with one row.
"""

from __future__ import annotations

from typing import Any

from policy import errors
from policy.compile.artefacts import Provenance
from policy.compile.causes import cause_of
from policy.grants.effective import Effective
from policy.manifest.agent import Manifest


def compile(effective: Effective, manifest: Manifest, provenance: Provenance) -> dict[str, Any]:
    """network.json.

    Raises:
        errors.NotYetEnforceableError: any mode but ``off``.
    """
    if effective.network.mode != "off":
        raise errors.NotYetEnforceableError(
            f"network `{effective.network.mode}` cannot be enforced under gVisor yet",
            hint='write network = "off"',
            where=manifest.where("resources.network"),
        )
    provenance.add("network.json:mode", cause_of(manifest, "resources.network"))
    return {"version": 1, "mode": "off", "interfaces": ["lo"], "rules": []}
