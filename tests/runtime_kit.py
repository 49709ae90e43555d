"""Packages of a home, and a runner that does as it is told: for tests of what routes and dispatches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.lowlevel

from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, Usage
from covenant.wire.types import AgentId
from policy import base58

ALICE = AgentId(display="alice@local", pubkey=base58.encode(b"\x01" * 32))
BOB = AgentId(display="bob@local", pubkey=base58.encode(b"\x02" * 32))

MANIFEST = """\
[agent]
id = "{id}"
name = "{name}"
version = "1.0.0"
runtime = "{runtime}"
entry = "{entry}"
[capabilities]
required = {required}
optional = {optional}
[resources]
network = "off"
[settlement]
budget_credits_per_hour = {budget}
priority = "{priority}"
{more}
"""
DEFAULTS: dict[str, Any] = {
    "name": "Test",
    "runtime": "python3",
    "entry": "main.py",
    "required": "[]",
    "optional": "[]",
    "budget": 0,
    "priority": "normal",
    "more": "",
}


def manifest(agent_id: str, **fields: Any) -> str:
    """An ``agent.toml``."""
    return MANIFEST.format(**{**DEFAULTS, "id": agent_id, **fields})


async def trusting(card: Card) -> None:
    """A verification that takes any package."""


def package(home: Path, agent_id: str, *, directory: str = "", **fields: Any) -> Path:
    """A package of this agent below the home."""
    path = home / "agents" / (directory or agent_id)
    path.mkdir(parents=True, exist_ok=True)
    (path / "agent.toml").write_text(manifest(agent_id, **fields))
    (path / "main.py").write_text("print(1)\n")
    return path


USED = Usage(cpu_ms=1500, memory_peak_bytes=1 << 20, wall_ms=2000)


async def echoes(card: Card, intent: Intent) -> RunResult:
    """An agent that says who it is and what it was asked."""
    await anyio.lowlevel.checkpoint()
    return RunResult(text=f"{card.id}: {intent.text}", sources=("a",), usage=USED, run_id=f"run-{intent.id}")


class Acts:
    """``runner.Runner`` whose runs are a function; ``asked`` are the intents that it was given."""

    def __init__(self, act: Callable[[Card, Intent], Awaitable[RunResult]] = echoes) -> None:
        self.act = act
        self.asked: list[Intent] = []
        self.ended: list[tuple[str, str]] = []

    async def run(self, card: Card, intent: Intent, *, caller: AgentId, deadline: int | None) -> RunResult:
        """As ``runner.Runner``."""
        self.asked.append(intent)
        return await self.act(card, intent)

    async def end(self, intent_id: str, *, reason: str, whole: bool = False) -> bool:
        """As ``runner.Runner``."""
        await anyio.lowlevel.checkpoint()
        self.ended.append((intent_id, reason))
        return True
