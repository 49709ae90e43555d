"""credentials.json: the names that the vault's token of a run covers."""

from __future__ import annotations

from typing import Any

from policy.compile.artefacts import Provenance
from policy.compile.causes import Origins
from policy.grants.effective import Effective

_KEY = "permissions.credentials.grants"


def compile(effective: Effective, origins: Origins, provenance: Provenance) -> dict[str, Any]:
    """credentials.json.

    Raises:
        errors.UnexplainedError: the manifest does not list a name, ``*`` among them.
    """
    names = effective.credentials.listing()
    for name in names:
        cause = origins.item(_KEY, origins.manifest.permissions.credentials.grants, name)
        provenance.add(f"credentials.json:{name}", cause)
    return {"version": 1, "names": names}
