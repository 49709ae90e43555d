"""A ``Server`` in one call for tests of handlers: every store in memory, a clock that only the test moves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

from covenant.handlers import routes
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.keys.identity import Identity
from covenant.runtime.agents import Agents
from covenant.settings import Settings
from covenant.stores.clock import SteadyClock
from covenant.wire.types import AgentId

NOW_MS = 1_790_000_000_000


class Clock:
    """``now_ms`` that goes on when it is told."""

    def __init__(self, at_ms: int = NOW_MS) -> None:
        self.at_ms = at_ms

    def __call__(self) -> int:
        return self.at_ms


class Absent:
    """A part that a test did not give; using it is the test's mistake."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AssertionError(f"give server_kit.make(..., {self._name}=...): `{attribute}` was asked for")


def _memory(clock: Clock) -> Any:
    from tests.doubles.memory import InMemory

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


def _identity(clock: Clock) -> Any:
    from covenant.keys.identity import Identity

    return Identity(b"\x07" * 32)


def _ignore(clock: Clock) -> Any:
    from covenant.handlers.state.ignore_rules import IgnoreSet

    return IgnoreSet.of()


def _embedder(clock: Clock) -> Any:
    from covenant.providers.embed.hashed import HashEmbedder

    return HashEmbedder()


def _tools(clock: Clock) -> Any:
    from covenant.providers import tools

    return tools.native(clock)


def _secrets(clock: Clock) -> Any:
    from covenant.handlers.state.secret_source import InMemorySecrets

    return InMemorySecrets()


def _of_the_identity(identity: Identity, clock: Clock) -> dict[str, Any]:
    from covenant.stores.capabilities.in_memory import InMemoryCapabilities
    from covenant.stores.peers.in_memory import InMemoryPeers
    from tests.doubles.audit import InMemoryAudit

    agent = identity.agent
    return {
        "audit": InMemoryAudit(issuer=agent, now_ms=clock),
        "capabilities": InMemoryCapabilities(agent.pubkey),
        "peers": InMemoryPeers(agent, clock),
    }


# Imported when they are made: a test of one family stands on no other's store.
_STORES = {
    "identity": _identity,
    "memory": _memory,
    "embedder": _embedder,
    "ignore": _ignore,
    "budget": _budget,
    "checkpoints": _checkpoints,
    "receipts": _receipts,
    "mailbox": _mailbox,
    "tools": _tools,
    "secrets": _secrets,
}


def make(*, home: Path, now_ms: Any = None, **given: Any) -> Server:
    """A server of in-memory stores without agents and without runners; any attribute of ``Server`` can be given."""
    clock = now_ms or Clock()
    fields: dict[str, Any] = {"home": home, "now_ms": clock, "handlers": routes.HANDLERS}
    fields |= {"settings": Settings(home=home), "agents": Agents(home)}
    fields |= {"clock": SteadyClock(home, clock)}
    fields |= {name: store(clock) for name, store in _STORES.items() if name not in given} | given
    if not {"audit", "capabilities", "peers"} <= set(given):
        fields = _of_the_identity(fields["identity"], clock) | fields
    own = [each for each in dataclasses.fields(Server) if each.init and each.default_factory is dataclasses.MISSING]
    needed = {each.name for each in own if each.default is dataclasses.MISSING}
    absent = needed - set(fields)
    return Server(**{name: Absent(name) for name in absent} | fields)


def caller(agent: AgentId, *, operator: bool = False, transport: Any = "ipc") -> Caller:
    """Return a caller for the agent."""
    return Caller(agent=agent, operator=operator, token_prefix=agent.pubkey[:6], transport=transport)
