"""The operator's part of a run's injected secrets: the vault that has them, whom the gate believes, and the rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

from msgspec import structs

from policy import errors
from policy.decide import Decision
from sandbox.audit.run_events import RunEvents
from sandbox.broker.credentials import NO_NAME, Found, Near
from sandbox.broker.vault_process import Fetcher
from sandbox.config import Config
from sandbox.kernel.proc.secret_memory import guard_process
from sandbox.network.inject import gate
from sandbox.network.inject.ledger import Injected, Then
from sandbox.vault.backend import OpenedSecret
from sandbox.vault.open import configured

GRANT = "permissions.network.inject"
# A run without an end gets certificates for so long. Their key ends with the run.
_LONGEST_SECONDS = 90 * 86_400
_HOUR = 3_600

Ask = Callable[[str, str, Callable[[Found], None]], None]


class InjectedSecrets:
    """The injected secrets of one run. A secret's first use at a host is a durable row before the secret leaves."""

    def __init__(self, agent_id: str, rows: RunEvents, revoked: Callable[[], bool], ask: Ask, backend: str) -> None:
        self._agent_id, self._rows, self._revoked = agent_id, rows, revoked
        self._ask, self._backend = ask, backend
        self._known: set[tuple[str, str, int]] = set()

    def ask(self, host: str, name: str, then: Then) -> None:
        """Look a secret up for a request to a host."""
        if self._revoked():
            then(0, None)
            return
        self._ask(self._agent_id, name, functools.partial(self._found, host, name, then))

    def still(self, host: str, name: str, then: Callable[[bool], None]) -> None:
        """Ask whether a secret is there for a request under way. A vault that cannot be asked ends none."""
        if self._revoked():
            then(False)
        else:
            self._ask(self._agent_id, name, lambda found: then(found is not None))

    def told(self, request: Injected) -> None:
        """Write the row of a request."""
        fields = structs.asdict(request)
        self._rows.request_injected({"name": fields.pop("secret"), **fields})

    def _found(self, host: str, name: str, then: Then, found: Found) -> None:
        if not isinstance(found, OpenedSecret) or self._revoked():
            then(0, None)
            return
        if (host, name, found.version) not in self._known:
            self._rows.credential_injected(name, found.version, self._backend, host)
            self._known.add((host, name, found.version))
        then(found.version, found.value.view)


def of(
    decision: Decision,
    config: Config,
    rows: RunEvents,
    *,
    is_dev: bool,
    owner: str,
    revoked: Callable[[], bool],
    seconds: float,
    stack: contextlib.ExitStack,
) -> gate.InjectTerms:
    """Return the terms of one run, whose deadline is in ``seconds``. ``stack`` outlives it.

    ``owner`` is the agent id that has the secrets, empty for the run's own.

    Raises:
        errors.VaultError: the vault cannot be opened, or no operator signed for the agent id that owns the secrets.
        errors.ConfigError: a file of `[tls] ca` is not there.
    """
    if is_dev:
        raise errors.VaultError(
            "what `covenant dev` signed is given no secret",
            hint="have an operator sign the package, and run it",
            grant=GRANT,
        )
    guard_process()
    watches: Mapping[int, Callable[[], errors.RunError | None]] = {}
    agent_id = owner or decision.manifest.agent.id
    try:
        if config.vault.backend == "file":
            vault = configured(config)
            with vault.opened(agent_id, NO_NAME):
                ask: Ask = Near(vault).ask
        else:
            limit = 2.0 * config.vault.timeout_seconds
            fetcher = stack.enter_context(Fetcher(lambda: configured(config), agent_id, seconds=limit))
            ask, watches = fetcher.ask, {fetcher.fileno(): functools.partial(_served, fetcher)}
    except errors.VaultError as e:
        e.details["grant"] = GRANT
        raise
    served = InjectedSecrets(agent_id, rows, revoked, ask, config.vault.backend)
    return gate.InjectTerms(
        ask=served.ask,
        still=served.still,
        told=served.told,
        bundles=config.tls.bundles(),
        seconds=int(min(_LONGEST_SECONDS, seconds + _HOUR)),
        watches=watches,
    )


def _served(fetcher: Fetcher) -> None:
    fetcher.serve()
