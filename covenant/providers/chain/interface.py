"""The interface of the settlement chain, and the chain that is off."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final, Protocol

import anyio.lowlevel

from covenant.stores.settlement.interface import Anchor, Batch
from covenant.wire import parts
from policy import errors

CHAIN: Final = "solana"


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of a chain; empty by default."""

    cluster: str | None = None
    rpc_url: str | None = None
    ws_url: str | None = None
    program_id: str | None = None
    covnt_mint: str | None = None


# Version 1's clients decode a text.
NO_CLUSTER: Final = "none"


class Chain(Protocol):
    """A chain that stores roots."""

    def status(self) -> parts.ChainConfiguration:
        """Return the configuration, and the settings that are missing for anchoring."""
        ...

    async def anchor(self, batch: Batch, *, now_ms: int) -> Anchor:
        """Store a batch's root on the chain. Returns its place there. Repeated for the same batch, it may be stored
        twice.

        Raises:
            errors.ChainError: it failed, or the chain stored another root.
        """
        ...


class OffChain:
    """No chain: ``status`` is never ready, and ``anchor`` is refused."""

    def __init__(self, config: Config | None = None) -> None:
        self._config = config or Config()

    def status(self) -> parts.ChainConfiguration:
        """As ``Chain.status``. A signer is always missing: this daemon holds no key that may sign for a chain."""
        named = {name: getattr(self._config, name) for name in ("cluster", "rpc_url", "program_id", "covnt_mint")}
        missing = [name for name, value in named.items() if value is None]
        missing += ["signer"] if installed() else ["signer", "extra settlement"]
        named["cluster"] = named["cluster"] or NO_CLUSTER
        return parts.ChainConfiguration(
            chain=CHAIN, ws_url=self._config.ws_url, ready=False, missing=tuple(missing), **named
        )

    async def anchor(self, batch: Batch, *, now_ms: int) -> Anchor:
        """As ``Chain.anchor``: always refused."""
        await anyio.lowlevel.checkpoint()
        missing = ", ".join(self.status().missing)
        raise errors.ChainError(f"batch `{batch.batch_id}` cannot be anchored", hint=f"missing: {missing}")


def installed() -> bool:
    """Whether the packages of the extra ``settlement`` are installed."""
    return importlib.util.find_spec("solders") is not None


def require_installed() -> None:
    """Require the extra ``settlement``.

    Raises:
        errors.SettlementMissingError: it is not installed.
    """
    if not installed():
        raise errors.SettlementMissingError(
            "the extra `settlement` is not installed: no transaction can be made",
            hint='pip install "solders>=0.26"',
        )
