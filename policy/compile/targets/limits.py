"""The limits that a target needs: it has no default of its own for them."""

from __future__ import annotations

from policy import errors
from policy.grants.effective import Effective


def limit(effective: Effective, name: str) -> int:
    """Return a limit of [resources].

    Raises:
        errors.NotEnforceableError: there is none.
    """
    found: int | None = getattr(effective.resources, name)
    if found is None:
        raise errors.NotEnforceableError(f"resources.{name} has no limit", hint=f"write resources.{name}")
    return found


def scratch_mb(effective: Effective) -> int:
    """Return the size of the scratch directory: 0 where the agent writes nothing."""
    return 0 if effective.filesystem.mode == "read-only-package" else limit(effective, "disk_mb")
