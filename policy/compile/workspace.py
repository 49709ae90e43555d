"""``[workspace]`` to its terms in mounts.json: sizes, where the directory may lie, what is masked and protected."""

from __future__ import annotations

from typing import Any, Final

from policy import data
from policy.grants.effective import Effective
from policy.manifest.agent import Manifest

# The keys of the manifest whose terms have another name.
KEYS: Final = {"below": "from"}


def max_mb(manifest: Manifest) -> int:
    """The MiB of changes that a run may make in the caller's directory."""
    return 0 if manifest.workspace.mode is None else manifest.workspace.max_mb


def terms(effective: Effective, manifest: Manifest) -> dict[str, Any] | None:
    """The terms of a workspace as they stand in mounts.json. None without one, or where nothing can be written."""
    one = manifest.workspace
    if one.mode is None or effective.filesystem.mode == "read-only-package":
        return None
    files = data.workspace_files()
    return {
        "apply": one.apply,
        "below": sorted(one.below),
        "mask": sorted({*one.mask, *files.mask}),
        "max_mb": one.max_mb,
        "protect": sorted({*one.protect, *files.protect}),
    }
