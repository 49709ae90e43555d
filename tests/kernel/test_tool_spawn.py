"""The tool `spawn` at http://tools.covenant/mcp: children by the run's own delegation, with its denials and limits."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import revoking
from tests.kernel.families import SMALL
from tests.kernel.live_runs import until
from tests.kernel.test_attacked_tree import ELDER
from tests.kernel.test_tool_servers import ADVERTISED, GRANTS, package, server
from tests.kernel.test_tools_endpoint import AGENT, call, request, text_of
from tests.kernel.world import World

SPAWN = "\n[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 1\n"
WORKER = """
import json, sys, time
text = json.loads(sys.stdin.readline())["text"]
if text == "sleep":
    time.sleep(600)
if text == "fail":
    sys.exit(3)
print(json.dumps({"text": text[::-1] * (100_000 if text == "long" else 1), "sources": ["of-it"]}))
"""

# Gives two calls of a child up, each once the test says that the child runs; another child has its place only then.
GIVES_UP = """
import http.client, json, os, time

def begin(message):
    line = http.client.HTTPConnection("tools.covenant", timeout=120)
    line.request("POST", "/mcp", json.dumps(message), {"Content-Type": "application/json"})
    return line

def spawn(number, text):
    arguments = {"agent": "worker", "text": text}
    params = {"name": "spawn", "arguments": arguments}
    return begin({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})

def read(line):
    return json.loads(line.getresponse().read())

def answered(text):
    while (found := read(spawn(1, text))["result"])["isError"]:
        time.sleep(0.2)
    return found["content"][0]["text"]

def runs(name):
    while not os.path.exists("PLACE/" + name):
        time.sleep(0.05)

first = spawn(5, "sleep")
runs("first")
first.close()
said = [answered("abc")]
second = spawn(6, "sleep")
runs("second")
params = {"requestId": 6, "reason": "too long"}
said.append(begin({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}).getresponse().status)
said += [read(second)["error"]["code"], answered("def")]
print(json.dumps({"text": json.dumps(said)}))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that an agent can be granted."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def elder(world: World, code: str, more: str = "") -> Path:
    """Write an agent with tools that may have one child."""
    made = package(world.base / "packages", server(), GRANTS + SPAWN + more)
    (made / "main.py").write_text(code)
    manifest = made / "agent.toml"
    limits = f"cpu_ms_per_task = 250000\nmemory_mb = {ELDER['memory_mb']}\n{ELDER['resources']}"
    text = manifest.read_text().replace("[resources]", f"[resources]\n{limits}")
    manifest.write_text(text.replace("[sandbox]", '[sandbox]\nfilesystem = "ephemeral"'))
    return world.sign(made)


def spawn(agent: str, text: str, **more: str) -> list[Any]:
    arguments = {"agent": agent, "text": text, **more}
    return ["/mcp", request("tools/call", name="spawn", arguments=arguments)]


def test_child_of_tool_call_answers_and_is_held(world: World) -> None:
    world.sign(world.package({"main.py": WORKER}, name="worker", id="worker", cpu_ms=200_000, **SMALL))
    world.sign(world.package({"main.py": WORKER}, name="wide", id="wide", **{**SMALL, "memory_mb": 1024}))
    asked = [
        ["/mcp", request("tools/list")],
        ["/mcp/loud", request("tools/list")],
        spawn("worker", "abc"),
        spawn("worker", "long"),
        spawn("worker", "fail"),
        spawn("nobody", "abc"),
        spawn("wide", "abc"),
        spawn("worker", "abc", timeout_ms="5"),
        ["/mcp/loud", request("tools/call", name="spawn", arguments={"agent": "worker", "text": "abc"})],
        call("still"),
    ]
    before = len(world.rows())
    answer = world.run(elder(world, AGENT), json.dumps(asked))
    assert answer.result is not None, (answer.error, answer.stderr)
    found = json.loads(answer.result.text)
    assert [one["name"] for one in found[0][1]["result"]["tools"]] == ["spawn", "loud__shout"]
    assert found[1][1]["result"]["tools"] == ADVERTISED
    assert text_of(found[2]) == "cba"
    assert found[2][1]["result"]["structuredContent"]["sources"] == ["of-it"]
    assert text_of(found[3]) == "gnol" * 100_000
    assert [one[1]["result"]["isError"] for one in found[4:9]] == [True] * 5
    assert text_of(found[4]).startswith("agent_failed:")
    assert "nobody" in text_of(found[5])
    assert text_of(found[6]).startswith("rule_")
    assert "both texts" in text_of(found[7])
    assert "no tool" in text_of(found[8])
    assert text_of(found[9]) == "STILL"
    rows = [row["kind"] for row in world.rows()[before:]]
    children = [row for row in rows if row["type"] == "run_started" and row["agent_id"] == "worker"]
    assert {row["parent"] for row in children} == {answer.run_id}
    assert found[2][1]["result"]["structuredContent"]["run"] == children[0]["run_id"]


def _has(found: Callable[[], list[str]], number: int) -> bool:
    return len(found()) == number


def test_child_of_call_that_was_given_up_is_stopped(world: World, place: Path) -> None:
    world.sign(world.package({"main.py": WORKER}, name="worker", id="worker", cpu_ms=200_000, **SMALL))
    grant = f'\n[permissions.filesystem]\nread = ["{place}"]\n'
    made = elder(world, GIVES_UP.replace("PLACE", str(place)), grant)
    before = len(world.rows())

    def rows(kind: str) -> list[dict[str, Any]]:
        return [row["kind"] for row in world.rows()[before:] if row["kind"]["type"] == kind]

    def children() -> list[str]:
        return [row["run_id"] for row in rows("run_started") if row["agent_id"] == "worker"]

    with revoking.running(world, made) as run:
        for name, number in (("first", 1), ("second", 3)):
            until(functools.partial(_has, children, number))
            (place / name).touch()
        out, err = run.process.communicate(timeout=120)
    assert json.loads(json.loads(out)["text"]) == ["cba", 202, -32800, "fed"], err
    stopped = [children()[0], children()[2]]
    cancelled = rows("child_cancelled")
    assert [(row["child"], row["child_agent_id"], row["agent_id"]) for row in cancelled] == [
        (child, "worker", "hello") for child in stopped
    ]
    ends = {row["run_id"]: row["code"] for row in rows("run_ended")}
    assert [ends[child] for child in children()] == ["interrupted", None, "interrupted", None]
    order = [
        row["kind"].get("child", row["kind"]["run_id"])
        for row in world.rows()[before:]
        if row["kind"]["type"] in ("child_cancelled", "run_ended") and stopped[0] in row["kind"].values()
    ]
    assert order == [stopped[0]] * 2
