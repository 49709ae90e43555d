"""From a manifest key to the cause of a rule: written by the file, or a default of ours with its reason."""

from __future__ import annotations

from functools import lru_cache

from policy.compile.artefacts import Cause
from policy.manifest import parse
from policy.manifest.agent import Manifest


def cause_of(manifest: Manifest, key: str) -> Cause:
    """The cause for a scalar ``key`` such as ``resources.memory_mb``."""
    if manifest.wrote(key):
        return Cause("manifest", key)
    return Cause("default", key, _reasons(manifest).get(key, "absent means the stated default"))


@lru_cache(maxsize=64)
def _reasons(manifest: Manifest) -> dict[str, str]:
    return {key: reason for key, _, reason in parse.defaults_applied(manifest)}
