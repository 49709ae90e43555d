"""A ``Server`` in one call for tests of handlers: every store in memory, a clock that stands still until it is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

from covenant.respond import table
from covenant.respond.caller import Caller
from covenant.respond.server import Server
from covenant.wire.types import AgentId

NOW_MS = 1_790_000_000_000


class Clock:
    """``now_ms`` that goes on when it is told."""

    def __init__(self, at_ms: int = NOW_MS) -> None:
        self.at_ms = at_ms

    def __call__(self) -> int:
        return self.at_ms


class Absent:
    """What a test did not give: using it is the test's mistake."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AssertionError(f"give server_kit.make(..., {self._name}=...): `{attribute}` was asked for")


def _memory(clock: Clock) -> Any:
    from covenant.stores.memory.in_memory import InMemory

    return InMemory()


def _budget(clock: Clock) -> Any:
    from covenant.stores.budget.in_memory import InMemoryBudgetLedger

    return InMemoryBudgetLedger(clock)


def _checkpoints(clock: Clock) -> Any:
    from covenant.stores.budget.in_memory import InMemoryCheckpoints

    return InMemoryCheckpoints(clock)


def _receipts(clock: Clock) -> Any:
    from covenant.stores.settlement.in_memory import InMemoryReceipts

    return InMemoryReceipts()


def _mailbox(clock: Clock) -> Any:
    from covenant.stores.mailbox.in_memory import InMemoryMailbox

    return InMemoryMailbox(now_ms=clock)


# Imported when they are made: a test of one family stands on no other's store.
_STORES = {
    "memory": _memory,
    "budget": _budget,
    "checkpoints": _checkpoints,
    "receipts": _receipts,
    "mailbox": _mailbox,
}


def make(*, home: Path, now_ms: Any = None, **given: Any) -> Server:
    """A server of in-memory stores; any attribute of ``Server`` can be given instead."""
    clock = now_ms or Clock()
    fields: dict[str, Any] = {"home": home, "now_ms": clock, "handlers": table.HANDLERS}
    fields |= {name: store(clock) for name, store in _STORES.items() if name not in given} | given
    absent = {one.name for one in dataclasses.fields(Server) if one.default_factory is dataclasses.MISSING and one.init}
    return Server(**{name: Absent(name) for name in absent - set(fields)} | fields)


def caller(agent: AgentId, *, operator: bool = False, transport: Any = "ipc") -> Caller:
    """Somebody who asks."""
    return Caller(agent=agent, operator=operator, token_prefix=agent.pubkey[:6], transport=transport)
