"""Where the daemon's secrets come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class SecretSource(Protocol):
    """Where secrets are: for the daemon ``[secrets]`` of ``secrets.toml`` (``covenant.providers.secrets_file``)."""

    def get(self, name: str) -> bytes | None:
        """The secret, None where there is none of that name."""


class InMemorySecrets:
    """Secrets that were given, and no others."""

    def __init__(self, secrets: Mapping[str, bytes] | None = None) -> None:
        self._secrets = dict(secrets or {})

    def get(self, name: str) -> bytes | None:
        """See ``SecretSource``."""
        return self._secrets.get(name)

    def __repr__(self) -> str:
        return f"InMemorySecrets({len(self._secrets)})"
