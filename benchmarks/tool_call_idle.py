#!/usr/bin/env python3
"""A call to a tool server that is frozen because it was idle, beside one to a server that runs; and what idle costs.

    .venv/bin/python benchmarks/tool_call_idle.py [calls]

    running   agent in its sandbox -> gates -> server in its sandbox, and back, one call after the other
    rested    the same, each after a pause that is too short for the server to be frozen: nothing is warm
    frozen    the same, each after a pause in which the server was frozen
    memory    of our process that keeps an idle server: private, and its share of what it shares with its parent

As root, with worlds of our own. The answer of the server is a text of its own; the time is seen by the agent.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.network.tools import server as tool_gate
from tests.kernel.test_tool_servers import GRANTS, package, server
from tests.kernel.world import World

AGENT = """
import http.client, json, sys, time

line = http.client.HTTPConnection("tools.covenant", timeout=60)
def call():
    params = {"name": "shout", "arguments": {"text": "x"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    begin = time.perf_counter()
    line.request("POST", "/mcp/loud", json.dumps(message), {"Content-Type": "application/json"})
    assert not json.load(line.getresponse())["result"].get("isError")
    return (time.perf_counter() - begin) * 1000

calls, short, long = json.loads(json.loads(sys.stdin.readline())["text"])
for _ in range(5):
    call()
running, rested, frozen = [], [], []
for _ in range(calls):
    running.append(call())
    time.sleep(short)
    rested.append(call())
    time.sleep(long)
    frozen.append(call())
print(json.dumps({"text": json.dumps([running, rested, frozen])}))
"""


def _kept() -> dict[str, int]:
    """KiB of the smallest child of this process, which keeps the server."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
                is_ours = "python" in Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            values = {line.split(":")[0]: int(line.split()[1]) for line in rollup}
            values["private"] = values["Private_Clean"] + values["Private_Dirty"]
            if is_ours:
                found.append(values)
    return min(found, key=lambda one: one["Pss"]) if found else {}


def main() -> None:
    """Run one agent and print the medians."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    short, long = tool_gate.IDLE_SECONDS - 1, tool_gate.IDLE_SECONDS + 2
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        made = package(Path(folder), server(), GRANTS)
        (made / "main.py").write_text(AGENT)
        manifest = made / "agent.toml"
        manifest.write_text(manifest.read_text().replace("[resources]", "[resources]\ncpu_ms_per_task = 290000"))
        answers: list[Any] = []
        text = json.dumps([calls, short, long])
        thread = threading.Thread(target=lambda: answers.append(world.run(world.sign(made), text)))
        thread.start()
        kept: dict[str, int] = {}
        states: list[str] = []
        while thread.is_alive():
            time.sleep(0.5)
            rows = [row["kind"] for row in world.rows() if row["kind"]["type"] == "run_state"]
            states = [row["state"] for row in rows if row["agent_id"] == "hello.loud"]
            if states and states[-1] == "Suspended":
                kept = _kept() or kept
    assert answers[0].result is not None, (answers[0].error, answers[0].stderr)
    running, rested, frozen = json.loads(answers[0].result.text)
    assert states.count("Suspended") >= calls, states
    print(f"running  median {statistics.median(running):.2f} ms, most {max(running):.2f} ms")
    print(f"rested   median {statistics.median(rested):.2f} ms, most {max(rested):.2f} ms")
    print(f"frozen   median {statistics.median(frozen):.2f} ms, most {max(frozen):.2f} ms")
    print(f"added    {statistics.median(frozen) - statistics.median(rested):.2f} ms by the thaw")
    print(f"memory   {kept.get('private', 0)} KiB private, {kept.get('Pss', 0)} KiB with its share of what is shared")


if __name__ == "__main__":
    main()
