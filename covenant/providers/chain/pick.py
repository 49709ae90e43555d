"""The chain that may keep the roots of batches. Nothing is on one unless the daemon is given a chain that is ready.

``OffChain`` is the default: it says what is missing, and anchors nothing. ``covenant.providers.chain.local_vm`` executes the
transaction in a machine of its own, where ``secrets.toml`` says so; a cluster is a third implementation of ``Chain``,
of which there is none yet.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import anyio.lowlevel

from covenant.stores.settlement.interface import Anchor, Batch
from covenant.wire import parts
from policy import errors

CHAIN: Final = "solana"


@dataclass(frozen=True, slots=True)
class Config:
    """What of a chain is configured; nothing by default."""

    cluster: str | None = None
    rpc_url: str | None = None
    ws_url: str | None = None
    program_id: str | None = None
    covnt_mint: str | None = None


class Chain(Protocol):
    """Where roots are kept."""

    def status(self) -> parts.ChainStatus:
        """What is configured, and what is missing before anything can be anchored."""
        ...

    async def anchor(self, batch: Batch, *, now_ms: int) -> Anchor:
        """Have the chain keep a batch's root; where it does. Asked again for the same batch, it may do so twice.

        Raises:
            errors.ChainError: it did not, or what it kept is another root.
        """
        ...


class OffChain:
    """No chain: ``status`` is never ready, and ``anchor`` is refused."""

    def __init__(self, config: Config | None = None) -> None:
        self._config = config or Config()

    def status(self) -> parts.ChainStatus:
        """As ``Chain.status``. A signer is always missing: this daemon holds no key that may sign for a chain."""
        named = {name: getattr(self._config, name) for name in ("cluster", "rpc_url", "program_id", "covnt_mint")}
        missing = [name for name, value in named.items() if value is None]
        missing += ["signer"] if installed() else ["signer", "extra settlement"]
        return parts.ChainStatus(chain=CHAIN, ws_url=self._config.ws_url, ready=False, missing=tuple(missing), **named)

    async def anchor(self, batch: Batch, *, now_ms: int) -> Anchor:
        """As ``Chain.anchor``: always refused."""
        await anyio.lowlevel.checkpoint()
        missing = ", ".join(self.status().missing)
        raise errors.ChainError(f"batch `{batch.batch_id}` cannot be anchored", hint=f"missing: {missing}")


def pick(name: Literal["off", "litesvm"]) -> Chain:
    """The chain that ``settlement.chain`` of ``secrets.toml`` names.

    Raises:
        errors.SettlementMissingError: it needs the extra, which is not installed.
    """
    if name == "off":
        return OffChain()
    # Needs no more than its extra when it is asked for.
    from covenant.providers.chain import local_vm

    # Whoever pays there is nobody: the machine gives it what it needs, and forgets it.
    return local_vm.LocalVm(os.urandom(32))


def installed() -> bool:
    """Whether the packages of the extra ``settlement`` are there."""
    return importlib.util.find_spec("solders") is not None


def require_installed() -> None:
    """Refuse what needs the extra ``settlement`` where it is not.

    Raises:
        errors.SettlementMissingError: it is not installed.
    """
    if not installed():
        raise errors.SettlementMissingError(
            "the extra `settlement` is not installed: no transaction can be made",
            hint="install covenant-supervisor[settlement]",
        )
