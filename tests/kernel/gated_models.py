"""A service gate in its real processes, sealed, without a sandbox: the test itself is the agent."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from policy import denials
from sandbox.kernel.net import netns
from sandbox.network import addresses, namespaces
from sandbox.network.service import gate, providers
from sandbox.network.service.ledger import Asked, Row, WebAsked

PLAN: dict[str, Any] = {
    "listen": 80,
    "names": ["models.covenant"],
    "models": [{"provider": "local", "pattern": "test-*"}],
    "requests_per_minute": None,
    "tokens_per_hour": None,
    "max_output_tokens": None,
}


class Gated:
    """An open gate: its denials and rows, and sockets of the agent's namespace to it."""

    def __init__(self, spaces: namespaces.Spaces, opened: gate.ServiceGate, told: list[denials.Denial]) -> None:
        self._spaces, self.gate, self._told = spaces, opened, told
        self.rows: list[Row] = []

    @property
    def asked(self) -> list[Asked]:
        """The requests to models that were passed on."""
        return [one for one in self.rows if isinstance(one, Asked)]

    @property
    def read(self) -> list[WebAsked]:
        """The searches and pages."""
        return [one for one in self.rows if isinstance(one, WebAsked)]

    @property
    def agent(self) -> int:
        """A descriptor of the agent's network namespace."""
        return self._spaces.agent

    def connect(self) -> socket.socket:
        """A connection of the agent's."""
        made = netns.within(self._spaces.agent, lambda: socket.create_connection((addresses.GATEWAY4, 80), 20))
        made.settimeout(20)
        return made

    def look(self) -> None:
        """Take what the gate reports."""
        for watch in self.gate.watches.values():
            watch()

    def has(self, count: int) -> bool:
        """Whether the gate has reported so many requests to models by now."""
        self.look()
        return len(self.asked) == count

    def codes(self) -> list[str]:
        """The codes of the denials that were told since the last look."""
        for one in self.gate.processes:
            one.tell_rest()
        found = [one.code for one in self._told]
        self._told.clear()
        return found

    def lives(self) -> bool:
        """Whether both processes are there."""
        return all(netns_alive(one.pid) for one in self.gate.processes)


def netns_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def opened(
    text: str = '[providers.local]\nkind = "mock"\n', keys: Mapping[str, str] | None = None, **plan: Any
) -> Iterator[Gated]:
    """A gate with the providers of ``text`` while the block lasts."""
    told: list[denials.Denial] = []
    asked: list[Row] = []
    found = providers.parse_all(text.encode(), file="providers.toml")
    with namespaces.made() as made:
        namespaces.connect(made)
        namespaces.open_link(made)
        terms = gate.Terms(
            found.providers,
            keys or {},
            asked.append,
            pages=found.pages,
            credits=plan.pop("credits", None),
            meter=plan.pop("meter", None),
            proxy=plan.pop("proxy", None),
            collector=plan.pop("collector", None),
        )
        with gate.open({**PLAN, **plan}, terms, inside=made.inside, denied=told.append) as opened_gate:
            for one in opened_gate.processes:
                one.ready(120)
            gated = Gated(made, opened_gate, told)
            gated.rows = asked
            yield gated
