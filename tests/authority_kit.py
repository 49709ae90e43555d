"""A server with the stores of authority in memory, and callers: the operator and enrolled peers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covenant.handlers import identity
from covenant.handlers.access import secrets
from covenant.handlers.caller import Caller
from covenant.handlers.grants import capabilities, peers
from covenant.handlers.state.secret_source import InMemorySecrets
from covenant.runtime.runner import Runners
from covenant.stores.capabilities.in_memory import InMemoryCapabilities
from covenant.stores.peers.in_memory import InMemoryPeers
from covenant.wire import requests, responses
from covenant.wire.types import AgentId
from policy import errors
from tests import server_kit
from tests.capability_kit import DAEMON
from tests.doubles.audit import InMemoryAudit

HANDLERS = {**capabilities.HANDLERS, **identity.HANDLERS, **peers.HANDLERS, **secrets.HANDLERS}


@dataclass(frozen=True)
class Card:
    """An agent's card, as far as its id."""

    id: str


class Agents:
    """One agent, `hello`."""

    def cards(self) -> list[Card]:
        return [Card("hello")]

    def listing(self) -> list[Card]:
        return self.cards()


class World:
    """Requests in, answers or refusals out, and the rows that each wrote."""

    def __init__(self, home: Path) -> None:
        self.clock = server_kit.Clock(1000)
        self.audit = InMemoryAudit(issuer=DAEMON.agent, now_ms=self.clock)
        self.peers = InMemoryPeers(DAEMON.agent, self.clock)
        self.capabilities = InMemoryCapabilities(DAEMON.agent.pubkey)
        self.server = server_kit.make(
            home=home,
            now_ms=self.clock,
            identity=DAEMON,
            audit=self.audit,
            peers=self.peers,
            capabilities=self.capabilities,
            agents=Agents(),
            runners=Runners({}),
            secrets=InMemorySecrets({"mail": b"hunter2", "raw": b"\xff"}),
        )
        self.operator = server_kit.caller(DAEMON.agent, operator=True)
        self.rows: list[tuple[str, str, dict[str, Any]]] = []
        self.audit.listen(lambda event: self.rows.append((event.kind["type"], event.issuer.display, event.kind)))

    async def enroll(self, agent: AgentId, *actions: str) -> Caller:
        """Enroll a peer and return it as a caller."""
        asked = requests.EnrollPeer(display=agent.display, pubkey=agent.pubkey, actions=actions)
        answer = await self.ask(self.operator, asked)
        self.rows.clear()
        return Caller(agent=agent, operator=False, token_prefix=answer.token_b58[:6], transport="ipc")

    async def ask(self, caller: Caller, request: requests.Request) -> Any:
        """The answer, as a client reads it."""
        answer: responses.Response = await HANDLERS[request.kind](self.server, caller, request)
        return type(answer).model_validate_json(answer.model_dump_json())

    async def refused(self, caller: Caller, request: requests.Request) -> errors.CovenantError:
        """The refusal."""
        try:
            answer = await self.ask(caller, request)
        except errors.CovenantError as e:
            return e
        raise AssertionError(f"not refused: {answer}")

    def kinds(self) -> list[str]:
        """The kinds of the rows since this was asked last."""
        found = [kind for kind, _, _ in self.rows]
        self.rows.clear()
        return found
