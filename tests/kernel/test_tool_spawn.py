"""The tool `spawn` at http://tools.covenant/mcp: children by the run's own delegation, with its denials and limits."""

from __future__ import annotations

import json
from typing import Any

from tests.kernel.families import SMALL
from tests.kernel.test_attacked_tree import ELDER
from tests.kernel.test_tool_servers import ADVERTISED, GRANTS, package, server
from tests.kernel.test_tools_endpoint import AGENT, call, request, text_of
from tests.kernel.world import World

SPAWN = "\n[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 1\n"
WORKER = """
import json, sys
text = json.loads(sys.stdin.readline())["text"]
if text == "fail":
    sys.exit(3)
print(json.dumps({"text": text[::-1] * (100_000 if text == "long" else 1), "sources": ["of-it"]}))
"""


def spawn(agent: str, text: str, **more: str) -> list[Any]:
    arguments = {"agent": agent, "text": text, **more}
    return ["/mcp", request("tools/call", name="spawn", arguments=arguments)]


def test_child_of_tool_call_answers_and_is_held(world: World) -> None:
    world.sign(world.package({"main.py": WORKER}, name="worker", id="worker", cpu_ms=200_000, **SMALL))
    world.sign(world.package({"main.py": WORKER}, name="wide", id="wide", **{**SMALL, "memory_mb": 1024}))
    made = package(world.base / "packages", server(), GRANTS + SPAWN)
    (made / "main.py").write_text(AGENT)
    manifest = made / "agent.toml"
    limits = f"cpu_ms_per_task = 250000\nmemory_mb = {ELDER['memory_mb']}\n{ELDER['resources']}"
    text = manifest.read_text().replace("[resources]", f"[resources]\n{limits}")
    manifest.write_text(text.replace("[sandbox]", '[sandbox]\nfilesystem = "ephemeral"'))
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
    answer = world.run(world.sign(made), json.dumps(asked))
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
