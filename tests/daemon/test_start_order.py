"""The order in which a daemon opens its stores; it closes them in reverse.

Each step depends on an earlier one. No client connects before the row that says that the daemon runs. No package is run
before there is a log for its rows. Nothing is opened in a home that another daemon holds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covenant import daemon_home, daemon_stores
from covenant.adapters.http import listen
from covenant.handlers.intents import recovery
from covenant.handlers.mailbox import delivery
from covenant.handlers.state.ignore_rules import IgnoreSet
from covenant.keys.identity import Identity
from covenant.providers.embed import pick
from covenant.runtime import agents, budget_preemption, build
from covenant.stores.audit.durable import DurableAudit
from covenant.stores.budget.durable import DurableBudgetLedger, DurableCheckpoints
from covenant.stores.capabilities.durable import DurableCapabilities
from covenant.stores.mailbox.durable import DurableMailbox
from covenant.stores.memory.durable import DurableMemory
from covenant.stores.peers.durable import DurablePeers
from covenant.stores.settlement.durable import DurableReceipts
from sandbox.serve import systemd
from tests import daemon_kit

pytestmark = pytest.mark.anyio

# Version 1's order of the stores, with the embedder before the memory whose vectors it makes.
STORES = [
    *("embedder", "memory", "receipts", "identity", "audit", "runtime", "capabilities", "ignore"),
    *("mailbox", "peers", "budget", "checkpoints"),
]
START = [
    *("home", *STORES, "packages", "runs that were left", "daemon_started"),
    *("deliveries", "projection", "HTTP", "socket", "READY=1"),
]
# Two hold nothing open; what runs the agents is a context of its own.
CLOSED = [name for name in reversed(STORES) if name not in {"identity", "ignore", "runtime"}]
END = ["STOPPING=1", "daemon_stopped", "no HTTP", *(f"no {name}" for name in CLOSED), "no socket", "no home"]


class Seen:
    """The steps in the order of their first calls.

    The watcher reads the packages again at any time, so repeats do not count.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self._patch = monkeypatch

    def _note(self, step: str) -> None:
        if step not in self.steps:
            self.steps.append(step)

    def call(self, owner: Any, name: str, step: Callable[..., str | None]) -> None:
        """Each call of it, by what ``step`` makes of its arguments; None is not kept."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def noted(*args: Any, **more: Any) -> Any:
            if (said := step(*args)) is not None:
                self._note(said)
            return real(*args, **more)

        self._patch.setattr(owner, name, noted)

    def block(self, owner: Any, name: str, step: str) -> None:
        """The beginning of a ``with`` of it, and its end."""
        real = getattr(owner, name)

        @contextlib.contextmanager
        def noted(*args: Any) -> Iterator[Any]:
            with real(*args) as given:
                self._note(step)
                yield given
            self._note(f"no {step}")

        self._patch.setattr(owner, name, noted)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    one = Seen(monkeypatch)
    one.block(daemon_home, "held", "home")
    one.block(daemon_home, "listening", "socket")
    one.block(listen, "bind", "HTTP")
    for owner, name, step in (
        (pick, "pick", "embedder"),
        (DurableMemory, "open", "memory"),
        (DurableReceipts, "open", "receipts"),
        (Identity, "load", "identity"),
        (DurableAudit, "open", "audit"),
        (build, "opened", "runtime"),
        (DurableCapabilities, "open", "capabilities"),
        (IgnoreSet, "open", "ignore"),
        (DurableMailbox, "open", "mailbox"),
        (DurablePeers, "open", "peers"),
        (DurableBudgetLedger, "open", "budget"),
        (DurableCheckpoints, "open", "checkpoints"),
        (agents.Agents, "reload", "packages"),
        (recovery, "recover_open_intents", "runs that were left"),
        (delivery.Delivery, "__init__", "deliveries"),
        (budget_preemption.BudgetPreemption, "__init__", "projection"),
    ):
        one.call(owner, name, lambda *args, step=step: step)
    told = {"daemon_started", "daemon_stopped"}
    one.call(DurableAudit, "append", lambda log, kind, *more: kind if kind in told else None)
    one.call(systemd, "say", lambda text: text if text in {"READY=1", "STOPPING=1"} else None)
    one.call(daemon_stores, "_closed", lambda what, close: f"no {what}")
    return one


async def test_daemon_starts_in_order_and_ends_in_other(covenant_home: Path, seen: Seen) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as one:
        assert await one.ask("ping") == {"kind": "pong"}
        assert seen.steps == START
    assert seen.steps[len(START) :] == END
