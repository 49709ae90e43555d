"""The operator's part of a run's keys of SSH: the vault that has them, and the row of each signature."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from msgspec import Struct, structs

from policy.decide import Decision
from sandbox.audit.run_events import RunEvents
from sandbox.broker.credentials import Found
from sandbox.lifecycle import vault_terms
from sandbox.lifecycle.types import RunDependencies
from sandbox.network.ssh.desk import SshSigned, Then
from sandbox.network.ssh.gate import SshAgentTerms
from sandbox.rundir import marks
from sandbox.vault.backend import OpenedSecret

GRANT = "services.ssh_agent"


class SshSecrets(Struct, frozen=True):
    """The keys of one run. A run that is being ended has none."""

    agent_id: str
    backend: str
    rows: RunEvents
    revoked: Callable[[], bool]
    vault: vault_terms.Ask

    def ask(self, name: str, then: Then) -> None:
        """Look a key up for a request."""
        if self.revoked():
            then(0, None)
            return
        self.vault(self.agent_id, name, functools.partial(self._found, then))

    def signed(self, row: SshSigned) -> None:
        """Write the row of a signature that is about to be given."""
        self.rows.ssh_signed({**structs.asdict(row), "backend": self.backend})

    def _found(self, then: Then, found: Found) -> None:
        if not isinstance(found, OpenedSecret) or self.revoked():
            then(0, None)
        else:
            then(found.version, found.value.view)


def of(
    decision: Decision,
    run_id: str,
    dependencies: RunDependencies,
    rows: RunEvents,
    is_dev: bool,
    stack: contextlib.ExitStack,
) -> SshAgentTerms:
    """Return the terms of one run. ``stack`` outlives it.

    Raises:
        errors.VaultError: the vault cannot be opened, or no operator signed for the agent id that owns the keys.
    """
    config, place = dependencies.config, dependencies.path / "runs" / run_id
    agent_id = decision.manifest.agent.id
    vault = vault_terms.of(config, agent_id, given="key", grant=GRANT, is_dev=is_dev, stack=stack)
    served = SshSecrets(agent_id, config.vault.backend, rows, lambda: marks.verdict(place) is not None, vault.ask)
    return SshAgentTerms(served.ask, served.signed, vault.watches)
