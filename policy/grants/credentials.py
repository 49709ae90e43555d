"""Credential grants: the names of the secrets that the vault gives this agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policy.grants.sets.domain import NameSet


@dataclass(frozen=True, slots=True)
class CredentialSet(NameSet):
    """Names of secrets; no pattern, so that a new secret is never granted by an old manifest."""

    def describe(self) -> tuple[str, ...]:
        """A line a secret."""
        return tuple(f"credential {name}" for name in self.listing())

    def canonical(self) -> dict[str, Any]:
        """The names."""
        return {"grants": self.listing()}
