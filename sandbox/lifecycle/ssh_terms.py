"""The operator's part of a run's keys of SSH: the vault that has them, and the row of each signature."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from policy import errors
from policy.decide import Decision
from sandbox.audit.run_events import RunEvents
from sandbox.broker.credentials import NO_NAME, Found, Near
from sandbox.broker.vault_process import Fetcher
from sandbox.kernel.proc.secret_memory import guard_process
from sandbox.lifecycle.types import RunDependencies
from sandbox.network.ssh.desk import SshSigned, Then
from sandbox.network.ssh.gate import SshAgentTerms
from sandbox.rundir import marks
from sandbox.vault.backend import OpenedSecret
from sandbox.vault.open import configured

GRANT = "services.ssh_agent"


class SshSecrets(Struct, frozen=True):
    """The keys of one run. A run that is being ended has none."""

    agent_id: str
    backend: str
    rows: RunEvents
    revoked: Callable[[], bool]
    vault: Callable[[str, str, Callable[[Found], None]], None]

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
    if is_dev:
        raise errors.VaultError(
            "what `covenant dev` signed is given no key",
            hint="have an operator sign the package, and run it",
            grant=GRANT,
        )
    guard_process()
    config, place = dependencies.config, dependencies.path / "runs" / run_id
    watches: Mapping[int, Callable[[], errors.RunError | None]] = {}
    agent_id = decision.manifest.agent.id
    try:
        if config.vault.backend == "file":
            vault = configured(config)
            with vault.opened(agent_id, NO_NAME):
                ask = Near(vault).ask
        else:
            limit = 2.0 * config.vault.timeout_seconds
            fetcher = stack.enter_context(Fetcher(lambda: configured(config), agent_id, seconds=limit))
            ask, watches = fetcher.ask, {fetcher.fileno(): functools.partial(_served, fetcher)}
    except errors.VaultError as e:
        e.details["grant"] = GRANT
        raise
    served = SshSecrets(agent_id, config.vault.backend, rows, lambda: marks.verdict(place) is not None, ask)
    return SshAgentTerms(served.ask, served.signed, watches)


def _served(fetcher: Fetcher) -> None:
    fetcher.serve()
