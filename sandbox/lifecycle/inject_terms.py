"""The operator's part of a run's injected secrets: the vault that has them, whom the gate believes, and the rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from msgspec import structs

from policy import errors
from policy.decide import Decision
from sandbox.audit.run_events import RunEvents
from sandbox.broker.credentials import Found
from sandbox.config import Config
from sandbox.control.withdrawn_secrets import SecretChecks
from sandbox.lifecycle import vault_terms
from sandbox.network.inject import gate
from sandbox.network.inject.ledger import Injected, Then
from sandbox.vault.backend import OpenedSecret

GRANT = "permissions.network.inject"
# A run without an end gets certificates for so long. Their key ends with the run.
_LONGEST_SECONDS = 90 * 86_400
_HOUR = 3_600


class InjectedSecrets:
    """The injected secrets of one run. A secret's first use at a host is a durable row before the secret leaves."""

    def __init__(
        self, agent_id: str, rows: RunEvents, revoked: Callable[[], bool], ask: vault_terms.Ask, backend: str
    ) -> None:
        self._agent_id, self._rows, self._revoked = agent_id, rows, revoked
        self._ask, self._backend = ask, backend
        self._known: set[tuple[str, str, int]] = set()

    def ask(self, host: str, name: str, then: Then) -> None:
        """Look a secret up for a request to a host."""
        if self._revoked():
            then(0, None)
            return
        self._ask(self._agent_id, name, functools.partial(self._found, host, name, then))

    def still(self, host: str, name: str, then: Callable[[bool | None], None]) -> None:
        """Ask whether a secret is there for a request under way. A vault that cannot be asked ends none: None."""
        if self._revoked():
            then(False)
        else:
            self._ask(self._agent_id, name, lambda found: then(_is_there(found)))

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


def _is_there(found: Found) -> bool | None:
    return None if isinstance(found, errors.VaultError) else found is not None


def of(
    decision: Decision,
    config: Config,
    rows: RunEvents,
    *,
    is_dev: bool,
    owner: str,
    revoked: Callable[[], bool],
    seconds: float,
    checks: SecretChecks,
    stack: contextlib.ExitStack,
) -> gate.InjectTerms:
    """Return the terms of one run, whose deadline is in ``seconds``. ``stack`` outlives it.

    ``checks`` has requests cut whose secret is not in the vault any more.

    ``owner`` is the agent id that has the secrets, empty for the run's own.

    Raises:
        errors.VaultError: the vault cannot be opened, or no operator signed for the agent id that owns the secrets.
        errors.ConfigError: a file of `[tls] ca` is not there.
    """
    agent_id = owner or decision.manifest.agent.id
    vault = vault_terms.of(config, agent_id, given="secret", grant=GRANT, is_dev=is_dev, stack=stack)
    served = InjectedSecrets(agent_id, rows, revoked, vault.ask, config.vault.backend)
    return gate.InjectTerms(
        ask=served.ask,
        still=served.still,
        told=served.told,
        bundles=config.tls.bundles(),
        seconds=int(min(_LONGEST_SECONDS, seconds + _HOUR)),
        watches=vault.watches,
        made=checks.add,
    )
