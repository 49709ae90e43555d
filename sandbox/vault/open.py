"""The vault that the configuration names."""

from __future__ import annotations

from sandbox.config import Config
from sandbox.vault import keys
from sandbox.vault.backend import Backend
from sandbox.vault.embedded import FileVault, KeySource


def configured(config: Config, key: KeySource | None = None) -> Backend:
    """The vault; ``key`` opens the embedded one instead of the key file of the configuration.

    Raises:
        errors.VaultError: it cannot be one: no token, no client for its server.
    """
    if config.vault.backend == "openbao":
        from sandbox.vault.openbao import OpenBao

        return OpenBao(config.vault)
    return FileVault(config.state, key or (lambda: keys.configured(config.vault.key)))
