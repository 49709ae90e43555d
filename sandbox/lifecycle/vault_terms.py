"""The vault that the gates of a run ask for secrets, which the agent itself is not given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

from msgspec import Struct

from policy import errors
from sandbox.broker.credentials import Found, Near, vault_of
from sandbox.broker.vault_process import Fetcher
from sandbox.config import Config
from sandbox.kernel.proc.secret_memory import guard_process

# Asks for the secret of an agent by its name; the answer may come later.
Ask = Callable[[str, str, Callable[[Found], None]], None]


class GateVault(Struct, frozen=True):
    """An open vault. ``watches`` belong into the run's exchange: by them it answers."""

    ask: Ask
    watches: Mapping[int, Callable[[], errors.RunError | None]]


def of(
    config: Config, agent_id: str, *, given: str, grant: str, is_dev: bool, stack: contextlib.ExitStack
) -> GateVault:
    """Open the vault of an agent for a gate. ``given`` names what the gate is given, and ``stack`` outlives the run.

    Raises:
        errors.VaultError: the vault cannot be opened, or no operator signed for the agent id.
    """
    if is_dev:
        raise errors.VaultError(
            f"what `covenant dev` signed is given no {given}",
            hint="have an operator sign the package, and run it",
            grant=grant,
        )
    guard_process()
    try:
        vault = vault_of(config, agent_id, stack)
    except errors.VaultError as e:
        e.details["grant"] = grant
        raise
    if isinstance(vault, Near):
        return GateVault(vault.ask, {})
    return GateVault(vault.ask, {vault.fileno(): functools.partial(_served, vault)})


def _served(fetcher: Fetcher) -> None:
    fetcher.serve()
