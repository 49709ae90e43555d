"""A server with peers, grants and agents for tests of the mailbox and of tools: stores in memory, runs by a double."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio

from covenant.handlers import billing
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.handlers.state.ignore_rules import IgnoreSet
from covenant.keys.identity import Identity
from covenant.providers.embed.hashed import HashEmbedder
from covenant.runtime.agents import Agents
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, Runners, RunResult
from covenant.stores.capabilities.in_memory import InMemoryCapabilities
from covenant.stores.capabilities.interface import to_wire
from covenant.wire import requests, responses
from covenant.wire.types import A2ATask, A2ATaskResult, AgentId
from policy import base58
from policy.capabilities.token import Token
from tests import server_kit
from tests.doubles.audit import InMemoryAudit

MANIFEST = """
[agent]
id = "{id}"
name = "{id}"
version = "0.1.0"
runtime = "python3"
entry = "main.py"

[capabilities]
required = {required}

[resources]
network = "off"
"""


def peer(name: str) -> AgentId:
    return AgentId(display=f"{name}@local", pubkey=base58.encode(name.encode().ljust(32, b"\1")))


ADA, BOB, EVE = peer("ada"), peer("bob"), peer("eve")


class Runs:
    """The runner of a test: notes what it is asked, and answers as it is told; ``hold`` makes it wait."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, AgentId]] = []
        self.ended: list[str] = []
        self.at_once = self.most_at_once = 0
        self.hold: anyio.Event | None = None
        self.answer: Callable[[Intent], RunResult] = lambda intent: RunResult(text=intent.text.upper())

    async def run(self, card: Card, intent: Intent, *, caller: AgentId, deadline: int | None) -> RunResult:
        self.asked.append((card.id, intent.text, caller))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            if self.hold is not None:
                await self.hold.wait()
            return self.answer(intent)
        except BaseException:
            self.ended.append(intent.text)
            raise
        finally:
            self.at_once -= 1

    async def end(self, intent_id: str, *, reason: str, whole: bool = False) -> bool:
        return False


class World:
    """A server, and what a test does with it."""

    def __init__(self, home: Path, **given: Any) -> None:
        self.home = home
        self.clock = server_kit.Clock()
        self.identity = Identity(b"\x07" * 32)
        self.runs = Runs()
        self.operator = Caller(agent=self.identity.agent, operator=True, token_prefix="oooooo", transport="ipc")
        fields: dict[str, Any] = {
            "identity": self.identity,
            "audit": InMemoryAudit(issuer=self.identity.agent, now_ms=self.clock),
            "capabilities": InMemoryCapabilities(self.identity.agent.pubkey),
            "agents": Agents(home),
            "runners": Runners({"python3": self.runs}),
            "embedder": HashEmbedder(),
            "ignore": IgnoreSet.of("**/.env"),
        }
        self.server: Server = server_kit.make(home=home, now_ms=self.clock, **fields | given)

    def caller(self, agent: AgentId) -> Caller:
        return self.operator if agent == self.identity.agent else server_kit.caller(agent)

    async def grant(self, subject: AgentId, *actions: str, **scope: Any) -> str:
        """Grants of the daemon; the signature of the last."""
        signature = ""
        for action in actions:
            bounds = {"version": 1, **scope} if scope else {}
            token = Token(subject.pubkey, action, bounds, self.identity.agent.pubkey, None)
            signature = self.identity.grant(token)
            signed = to_wire(token, signature, subject.display, self.identity.agent.display)
            await self.server.capabilities.grant(signed, self.clock())
        return signature

    async def package(self, agent_id: str, required: str = "[]") -> AgentId:
        """An agent of this host."""
        place = self.home / "agents" / agent_id
        place.mkdir(parents=True, mode=0o700)
        (place / "agent.toml").write_text(MANIFEST.format(id=agent_id, required=required))
        await self.server.agents.reload()
        return billing.budget_of(agent_id)

    async def ask(self, agent: AgentId, request: requests.Request) -> Any:
        """Return the response, also a refusal."""
        return await self.server.respond(self.caller(agent), request)

    async def send(self, sender: AgentId, recipient: AgentId, name: str = "t1", **fields: Any) -> responses.Response:
        fields = {"intent_text": "count to three", **fields}
        task = A2ATask(id=name, sender=sender, recipient=recipient, **fields)
        answer: responses.Response = await self.ask(sender, requests.SendA2ATask(task=task))
        return answer

    async def post(self, agent: AgentId, name: str = "t1", status: Any = "ok") -> responses.Response:
        result = A2ATaskResult(task_id=name, status=status, content=({"type": "text", "text": "3"},))
        answer: responses.Response = await self.ask(agent, requests.PostA2AResult(result=result))
        return answer

    async def rows(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The rows of these kinds, oldest first, without what they all have."""
        found = await self.server.audit.recent(10_000)
        return [event.kind for event in reversed(found) if event.kind["type"] in kinds]
