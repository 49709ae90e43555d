"""Idle tool servers: frozen until the next call, ended with their agent, by a kill and by a revocation."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.control import manager
from sandbox.rundir import registry
from sandbox.supervisor import RunResult
from tests.kernel import revoking
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import until
from tests.kernel.test_attacked_tree import ASKER, _leaf
from tests.kernel.test_tool_servers import GRANTS, package, server
from tests.kernel.world import World

# Calls for each file that comes into a directory, until `end` comes.
AGENT = """
import http.client, json, os, sys, time

def call(text):
    line = http.client.HTTPConnection("tools.covenant", timeout=60)
    params = {"name": "shout", "arguments": {"text": text}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    line.request("POST", "/mcp/loud", json.dumps(message), {"Content-Type": "application/json"})
    return json.load(line.getresponse())["result"]["content"][0]["text"]

place, said = json.loads(sys.stdin.readline())["text"], []
for word in ("first", "second", "third", "fourth", "end"):
    while not os.path.exists(os.path.join(place, word)):
        time.sleep(0.05)
    if word != "end":
        said.append(call(word))
print(json.dumps({"text": json.dumps(said)}))
"""


class Agent:
    """An agent in a thread, whose calls the test begins."""

    def __init__(self, world: World, place: Path, made: Path) -> None:
        self.world, self.place, self.answers = world, place, list[RunResult]()
        self.thread = threading.Thread(target=lambda: self.answers.append(world.run(made, str(place))))
        self.thread.start()

    def begins(self, word: str) -> None:
        (self.place / word).touch()

    def server(self) -> registry.Entry | None:
        found = [one for one in registry.live(self.world.state / "runs") if one.agent_id == "hello.loud"]
        return found[0] if found else None

    def states(self) -> list[str]:
        rows = (row["kind"] for row in self.world.rows() if row["kind"]["type"] == "run_state")
        return [row["state"] for row in rows if row["agent_id"] == "hello.loud"]

    def rests(self, times: int) -> registry.Entry:
        """Wait until the server was frozen so often, and is now."""

        def frozen() -> registry.Entry | None:
            one = self.server()
            there = one is not None and self.states().count("Suspended") >= times
            return one if one is not None and there and _leaf(one).frozen() else None

        found: registry.Entry = until(frozen)
        return found

    def ends(self) -> RunResult:
        self.thread.join(120)
        assert self.server() is None, "it ended with its agent"
        return self.answers[0]


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def made(world: World, place: Path, tmp_path: Path) -> Path:
    grants = f'\n[permissions.filesystem]\nread = ["{place}"]\n{GRANTS}'
    found = package(tmp_path, server(), grants)
    (found / "main.py").write_text(AGENT)
    manifest = found / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[resources]", "[resources]\ncpu_ms_per_task = 250000"))
    return world.sign(found)


def test_idle_server_is_frozen_until_next_call(world: World, place: Path, made: Path) -> None:
    agent = Agent(world, place, made)
    agent.begins("first")
    first = agent.rests(1)
    agent.begins("second")
    again = agent.rests(2)
    assert again.run_id == first.run_id, "no second start"
    # An operator's kill ends a frozen server; the next call starts another.
    manager.operate(world.state, ASKER, "kill", again.run_id, reason="enough")
    until(lambda: agent.server() is None)
    agent.begins("third")
    third = agent.rests(3)
    assert third.run_id != first.run_id
    # A suspension by an operator is one: no call ends it.
    manager.operate(world.state, ASKER, "suspend", third.run_id)
    agent.begins("fourth")
    until(lambda: [row for row in world.rows() if row["kind"]["type"] == "tool_called"][3:])
    assert _leaf(third).frozen()
    manager.operate(world.state, ASKER, "resume", third.run_id)
    agent.rests(5)  # the suspension by the operator is a row as well
    agent.begins("end")
    answer = agent.ends()
    assert answer.result is not None, (answer.error, answer.stderr)
    assert json.loads(answer.result.text) == ["FIRST", "SECOND", "THIRD", "FOURTH"]
    assert leftovers(world) == []


def test_revocation_ends_frozen_server(world: World, place: Path, made: Path) -> None:
    agent = Agent(world, place, made)
    agent.begins("first")
    agent.rests(1)
    payload = next(one for one in registry.live(world.state / "runs") if one.agent_id == "hello").payload_digest
    revoking.revoke(world, revoking.next_root(world, revoking.manifest_of(world, payload)))
    answer = agent.ends()
    assert answer.error is not None
    assert answer.error.code == "revoked"
    assert leftovers(world) == []
