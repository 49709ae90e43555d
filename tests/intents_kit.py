"""A server that dispatches: agents on a disk, a runner that does as it is told, every store in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covenant.handlers.caller import Caller
from covenant.handlers.grants import capabilities
from covenant.handlers.server import Server
from covenant.handlers.state.ignore_rules import IgnoreSet
from covenant.keys.identity import Identity
from covenant.providers.embed.hashed import HashEmbedder
from covenant.runtime.agents import Agents
from covenant.runtime.runner import Runners
from covenant.stores.capabilities.in_memory import InMemoryCapabilities
from tests import runtime_kit, server_kit
from tests.doubles.audit import InMemoryAudit
from tests.runtime_kit import Acts

SECRET = "**/secrets.toml"


def make(home: Path, *, acts: Acts | None = None, **given: Any) -> Server:
    """A server without agents; ``agents.reload`` finds those of the home."""
    clock = given.pop("now_ms", None) or server_kit.Clock()
    identity = Identity(b"\x07" * 32)
    acts = acts or Acts()
    fields: dict[str, Any] = {
        "identity": identity,
        "audit": InMemoryAudit(issuer=identity.agent, now_ms=clock),
        "capabilities": InMemoryCapabilities(identity.agent.pubkey),
        "ignore": IgnoreSet.of(SECRET),
        "embedder": HashEmbedder(),
        "agents": Agents(home),
        "runners": Runners(dict.fromkeys(("python3", "node", "rust-bin", "hermes"), acts)),
    }
    return server_kit.make(home=home, now_ms=clock, **{**fields, **given})


async def granted(server: Server, caller: Caller, *actions: str, scope: Any = None) -> None:
    """Have the caller hold these actions."""
    for action in actions:
        signed = capabilities.from_daemon(server, caller.agent, action, {} if scope is None else scope, None)
        await capabilities.give(server, server.identity.agent, signed)


async def rows(server: Server, *kinds: str) -> list[dict[str, Any]]:
    """The rows of these kinds, or all that grants did not write, oldest first."""
    found = [event.kind for event in await server.audit.recent(10_000)]
    found.reverse()
    return [row for row in found if (row["type"] in kinds if kinds else row["type"] != "capability_granted")]


ALICE = server_kit.caller(runtime_kit.ALICE)
BOB = server_kit.caller(runtime_kit.BOB)
