"""The operator's part of a run's service gate: its providers with their keys, and the rows of its requests."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import Final

from msgspec import structs

from policy import errors
from policy.decide import Decision
from policy.manifest.services import PROVIDERS_ID
from sandbox import export_settings
from sandbox.audit.run_events import RunEvents
from sandbox.broker.credentials import Found
from sandbox.broker.vault_process import Fetcher
from sandbox.config import Config, check_authorities
from sandbox.kernel.proc.secret_memory import guard_process
from sandbox.lifecycle.types import Request
from sandbox.network.gate.proxy import Proxy, ProxyTerms
from sandbox.network.service import gate, limits, providers
from sandbox.network.service.ledger import AgentAsked, Asked, Row, TelemetryRelayed
from sandbox.network.service.providers import Provider
from sandbox.vault.embedded import FILE, FOLDER
from sandbox.vault.open import configured

FAR_SECONDS: Final = 5.0


def of(decision: Decision, config: Config, rows: RunEvents, request: Request, meter: int | None) -> gate.Terms:
    """Return the terms of the run of ``request``. ``meter`` counts what was spent of its credits.

    Raises:
        errors.VaultError: a key cannot be had, with the verb that puts it there, or no operator signed for the agent
            id whose token it is.
        errors.ConfigError: a file of authorities is missing or has no certificate, or as ``_collector``.
    """
    effective = decision.effective
    if request.is_dev and effective.agents:
        # The daemon knows the agent by it: what it may ask there, and its tasks.
        raise errors.VaultError(
            "what `covenant dev` signed is given no token of an agent",
            hint="have an operator sign the package, and run it",
            grant="services.agents",
        )
    operators = providers.load_all(config.state)
    granted = _granted(decision, operators.providers)
    for name, one in granted.items():
        # INVARIANT: never the system's authorities in place of a file that is not there.
        if one.ca is not None:
            check_authorities(f"providers.{name}.ca", one.ca, owned=False)
    pages = {host: one for host, one in operators.pages.items() if effective.web.holds(host)}
    for host, place in pages.items():
        if place.ca is not None:
            check_authorities(f"fetch.{host}.ca", place.ca, owned=False)
    told = functools.partial(_told, granted, rows)
    by = proxy(config)
    return gate.Terms(
        granted,
        keys(granted, config),
        told,
        config.tls.further(),
        pages,
        request.credits,
        meter,
        proxy=by,
        collector=_collector(decision, config, rows, request) if effective.telemetry else None,
    )


def _collector(decision: Decision, config: Config, rows: RunEvents, request: Request) -> gate.Collector:
    """The operator's collector for the telemetry of agents. No manifest is enforceable where none is named.

    Raises:
        errors.ConfigError: the file of its headers can be read by others, or is malformed; or the file of its
            authorities is missing, or others can write it.
    """
    settings = config.export
    if settings.agents_ca is not None:
        check_authorities("export.agents_ca", settings.agents_ca)
    stamp = {
        "covenant.run.id": rows.run_id,
        "covenant.agent.id": decision.manifest.agent.id,
        "covenant.package.digest": request.package.digest,
    }
    headers = {} if settings.agents_headers is None else export_settings.headers(settings.agents_headers)
    return gate.Collector(settings.agents, stamp, headers, str(settings.agents_ca or ""))


def _granted(decision: Decision, operators: Mapping[str, Provider]) -> dict[str, Provider]:
    """The granted providers in the operator's order, and the first server of agents where an agent is granted.

    The daemon knows each agent by a token of its own, so ``secret`` is there the beginning of the secret's name.
    """
    effective = decision.effective
    named = {provider for provider, _ in effective.services.models} | set(effective.web.search)
    found = {name: one for name, one in operators.items() if name in named}
    server = next((name for name, one in operators.items() if one.has_agents and effective.agents), None)
    if server is not None:
        one = operators[server]
        found[server] = one.model_copy(update={"secret": f"{one.secret}.{decision.manifest.agent.id}"})
    return found


def proxy(config: Config) -> Proxy | None:
    """Return the operator's proxy with its credentials, from the vault.

    Raises:
        errors.VaultError: the vault cannot be opened, or has not the secret.
    """
    settings = config.proxy
    if not settings.url:
        return None
    credentials = ""
    if settings.secret:
        with configured(config).opened(PROVIDERS_ID, settings.secret) as opened:
            if opened is None:
                raise errors.VaultError(
                    "the secret of the proxy is not in the vault",
                    hint=f"covenant vault put {PROVIDERS_ID} {settings.secret}",
                )
            credentials = str(opened.value.view, "utf-8").strip()
    bundles = config.tls.bundles() if settings.tls else ()
    return Proxy(*settings.place, credentials, settings.direct, settings.by_name, settings.resolves, bundles)


def network_proxy(mode: str, config: Config, rows: RunEvents) -> ProxyTerms | None:
    """Return the terms of the operator's proxy for a run's own connections. None without a proxy or a network.

    Raises:
        errors.VaultError: the vault cannot be opened, or has not the secret.
    """
    found = None if mode == "off" else proxy(config)
    return None if found is None else ProxyTerms(found, rows.note)


def keys(granted: Mapping[str, Provider], config: Config) -> dict[str, str]:
    """Return the keys of providers, from the vault.

    Raises:
        errors.VaultError: the vault cannot be opened, or has not the secret of one.
    """
    wanted = {name: one.secret for name, one in granted.items() if one.secret}
    if not wanted:
        return {}
    vault, found = configured(config), {}
    for name, secret in wanted.items():
        with vault.opened(PROVIDERS_ID, secret) as opened:
            if opened is None:
                raise errors.VaultError(
                    f"the key of provider `{name}` is not in the vault",
                    hint=f"covenant vault put {PROVIDERS_ID} {secret}",
                )
            found[name] = str(opened.value.view, "utf-8").strip()
    return found


class KeyWatch:
    """Ends a run whose provider's key was taken out of the vault. A rotated key is for the next run.

    The embedded vault's file tells when to look. Another vault is asked every few seconds, by a process of its own.
    Where a removal is announced, both are asked at once (sandbox.control.withdrawn_secrets).
    """

    def __init__(self, decision: Decision, config: Config, stack: contextlib.ExitStack) -> None:
        found = _granted(decision, providers.load(config.state))
        self._wanted = {name: one.secret for name, one in sorted(found.items()) if one.secret}
        self._config, self._file = config, config.state / FOLDER / FILE
        self._seen = self._stamp()
        self._gone, self._unanswered, self._next, self._anew = "", 0, 0.0, False
        self._far: Fetcher | None = None
        if self._wanted and config.vault.backend != "file":
            guard_process()
            limit = 2.0 * config.vault.timeout_seconds
            self._far = stack.enter_context(Fetcher(lambda: configured(config), PROVIDERS_ID, seconds=limit))

    @property
    def is_checking(self) -> bool:
        """Whether an answer of the vault is still awaited."""
        if self._far is not None:
            return self._anew or self._unanswered > 0
        return bool(self._wanted) and self._stamp() != self._seen

    def look(self, *, anew: bool = False) -> errors.RunError | None:
        """Return why the run must end; None while every key is there.

        ``anew``: an answer to an earlier question does not count.
        """
        if self._far is not None:
            self._anew = self._anew or anew
            return self._look_far(self._far)
        if not self._wanted or (stamp := self._stamp()) == self._seen:
            return None
        try:
            there = {one.name for one in configured(self._config).entries(PROVIDERS_ID)}
        except errors.VaultError:
            return None  # it is being written, or locked: the next look tells
        self._seen = stamp
        return self._over(next((name for name, secret in self._wanted.items() if secret not in there), ""))

    def _look_far(self, vault: Fetcher) -> errors.RunError | None:
        vault.serve()  # never waits
        now = time.monotonic()
        if not self._unanswered and (self._anew or now >= self._next):
            self._next, self._unanswered, self._anew = now + FAR_SECONDS, len(self._wanted), False
            for name, secret in self._wanted.items():
                vault.ask(PROVIDERS_ID, secret, functools.partial(self._told, name))
        return self._over(self._gone)

    def _told(self, name: str, found: Found) -> None:
        self._unanswered -= 1
        if found is None:
            self._gone = name
        elif isinstance(found, errors.VaultError):
            self._anew = True  # a vault that cannot be asked ends no run, and confirms nothing

    @staticmethod
    def _over(name: str) -> errors.RunError | None:
        return errors.RunRevokedError(f"the key of provider `{name}` was taken out of the vault") if name else None

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self._file.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns


def _told(granted: Mapping[str, Provider], rows: RunEvents, asked: Row) -> None:
    if isinstance(asked, Asked):
        one = granted[asked.provider]
        cost = limits.price(asked.input_tokens, asked.output_tokens, one.input_price, one.output_price)
        rows.model_asked(structs.asdict(asked), cost)
    elif isinstance(asked, AgentAsked):
        rows.agent_asked(structs.asdict(asked))
    elif isinstance(asked, TelemetryRelayed):
        rows.telemetry_relayed(structs.asdict(asked))
    else:
        cost = granted[asked.target].request_price if asked.service == "search" and asked.status == 200 else 0
        rows.web_asked(structs.asdict(asked), cost)
