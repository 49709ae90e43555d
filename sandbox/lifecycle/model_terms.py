"""The operator's part of a run's service gate: its providers with their keys, and the rows of its requests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from msgspec import structs

from policy import errors
from policy.decide import Decision
from policy.manifest.services import PROVIDERS_ID
from sandbox.audit.run_events import RunEvents
from sandbox.config import Config
from sandbox.network.service import gate, limits, providers
from sandbox.network.service.ledger import Asked, WebAsked
from sandbox.network.service.providers import Provider
from sandbox.vault.embedded import FILE, FOLDER
from sandbox.vault.open import configured


def of(
    decision: Decision, config: Config, rows: RunEvents, credits_: int | None, spent: Callable[[int], None]
) -> gate.Terms:
    """Return the terms of one run, which may spend ``credits_``. ``spent`` is called with the price of each request.

    Raises:
        errors.VaultError: a key cannot be had, with the verb that puts it there.
    """
    effective = decision.effective
    named = {provider for provider, _ in effective.services.models} | set(effective.web.search)
    operators = providers.load_all(config.state)
    granted = {name: one for name, one in operators.providers.items() if name in named}
    pages = {host: one for host, one in operators.pages.items() if effective.web.holds(host)}
    told = functools.partial(_told, granted, rows, spent)
    return gate.Terms(granted, keys(granted, config), told, config.tls.further(), pages, credits_)


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
    """Ends a run whose provider's key was taken out of the embedded vault. A rotated key is for the next run."""

    def __init__(self, decision: Decision, config: Config) -> None:
        effective = decision.effective
        named = {provider for provider, _ in effective.services.models} | set(effective.web.search)
        found = providers.load(config.state)
        self._wanted = {name: found[name].secret for name in sorted(named & set(found)) if found[name].secret}
        self._config, self._file = config, config.state / FOLDER / FILE
        self._seen = self._stamp()

    def look(self) -> errors.RunError | None:
        """Return why the run must end; None while every key is there."""
        if not self._wanted or (stamp := self._stamp()) == self._seen:
            return None
        try:
            there = {one.name for one in configured(self._config).entries(PROVIDERS_ID)}
        except errors.VaultError:
            return None  # it is being written, or locked: the next look tells
        self._seen = stamp
        for name, secret in self._wanted.items():
            if secret not in there:
                return errors.RunRevokedError(f"the key of provider `{name}` was taken out of the vault")
        return None

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self._file.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns


def _told(
    granted: Mapping[str, Provider], rows: RunEvents, spent: Callable[[int], None], asked: Asked | WebAsked
) -> None:
    if isinstance(asked, Asked):
        one = granted[asked.provider]
        cost = limits.price(asked.input_tokens, asked.output_tokens, one.input_price, one.output_price)
        rows.model_asked(structs.asdict(asked), cost)
    else:
        cost = granted[asked.target].request_price if asked.service == "search" and asked.status == 200 else 0
        rows.web_asked(structs.asdict(asked), cost)
    spent(cost)
