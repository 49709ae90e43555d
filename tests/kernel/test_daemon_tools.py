"""Tools of the daemon at http://tools.covenant/mcp, for runs that it starts: docs/tool-calls.md."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from covenant.wire import mcp_server
from policy.manifest.tools import document, pins
from sandbox.storage import package_reader
from tests import daemon_kit
from tests.doubles import async_client
from tests.kernel import serving
from tests.kernel.serving import Served
from tests.kernel.world import HEAD, ROOT, SLOWNESS, TAIL, World

pytestmark = pytest.mark.anyio

PAGE = (ROOT / "docs" / "tool-calls.md").read_text().partition("## Tools of the daemon")[2].partition("\n## ")[0]
(GRANTS,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SERVER,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
CLASSES = {"memory_search": "read", "memory_put": "write", "audit_recent": "read"}
CODE = """
import http.client, time

def ask(method, **params):
    line = http.client.HTTPConnection("tools.covenant", timeout=60)
    message = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
    line.request("POST", "/mcp", message, {"Content-Type": "application/json"})
    return json.loads(line.getresponse().read())

def call(name, **arguments):
    return ask("tools/call", name="covenant__" + name, arguments=arguments).get("result", {})

def text(result):
    return [result.get("isError"), result["content"][0]["text"] if result else ""]

answer = {
    "listed": [one["name"] for one in ask("tools/list")["result"]["tools"]],
    "put": text(call("memory_put", text="the harbour is blue", tier="working", metadata={})),
    "search": text(call("memory_search", query="harbour", limit=3)),
    "ungranted": text(call("audit_recent", limit=1)),
    "undeclared": text(call("intent_submit", text="x")),
}
if intent["text"] == "until revoked":
    until = time.monotonic() + 300
    while time.monotonic() < until and not answer["search"][0]:
        time.sleep(0.2)
        answer["search"] = text(call("memory_search", query="harbour", limit=3))
"""


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        yield made
        made.quiet()


def tools() -> dict[str, Any]:
    advertised = [one.document() for one in mcp_server.advertised() if one.name in CLASSES]
    server = json.loads(SERVER)
    assert [one["name"] for one in server.pop("tools")] == ["memory_search"]
    return {
        "schema_version": 1,
        "agent": "matrix://agent/keeper",
        "allowed_side_effects": ["read", "write"],
        "servers": [{**server, "tools": [{**one, "side_effect_class": CLASSES[one["name"]]} for one in advertised]}],
    }


def keeper(world: World) -> Path:
    """Return the signed package of an agent with the grants of the page, and one tool more that writes."""
    more = GRANTS.replace('search@1"', 'search@1", "matrix://tool/mcp/covenant/memory_put@1"')
    more = more.replace('["read"]', '["read", "write"]')
    raw = json.dumps(tools())
    files = {"main.py": HEAD + CODE + TAIL, document.FILE: raw}
    made = world.package(files, name="keeper", id="keeper", more=more, cpu_ms=300_000 * SLOWNESS)
    lock = pins.pin(package_reader.read(made), document.parse(raw.encode()))[1]
    (made / pins.LOCK).write_bytes(lock)
    return world.sign(made)


async def submitted(daemon: daemon_kit.Daemon, words: str = "once") -> dict[str, Any]:
    result = await daemon.ask("submit_intent", text=words, agent="keeper")
    assert result["status"] == "ok", result
    said: dict[str, Any] = json.loads(result["text"])
    return said


async def asked(daemon: daemon_kit.Daemon) -> list[dict[str, Any]]:
    events = (await daemon.ask("recent_audit", limit=200))["events"]
    return [one["kind"] for one in reversed(events) if one["kind"]["type"] == "run_tool_asked"]


async def test_run_has_what_manifest_and_caller_allow(served: Served) -> None:
    world = served.world
    package = keeper(world)
    home = world.base / f"home-{os.urandom(4).hex()}"
    (home / "agents").mkdir(parents=True)
    home.chmod(0o700)
    shutil.copytree(package, home / "agents" / "keeper")
    async with daemon_kit.running(home, socket=served.path) as daemon:
        await daemon.grant("memory.write")
        # The manifest grants both tools, and the caller may use one.
        said = await submitted(daemon)
        assert said["listed"] == ["covenant__memory_put"]
        assert said["put"][0] is False
        assert said["search"][0] is True
        assert "no capability" in said["search"][1]
        assert said["ungranted"][0] is True
        assert "allow" in said["ungranted"][1]
        assert said["undeclared"] == [None, ""]

        grant = (await daemon.ask("grant_capability", action="memory.read", scope={}))["signature_b58"]
        said = await submitted(daemon)
        assert said["listed"] == ["covenant__memory_search", "covenant__memory_put"]
        assert "the harbour is blue" in said["search"][1]
        assert {row["tool"] for row in await asked(daemon)} == {"memory_put", "memory_search"}

        # A run under way loses a tool with its caller's capability.
        before = len(await asked(daemon))
        async with anyio.create_task_group() as group:
            late: list[dict[str, Any]] = []

            async def wait() -> None:
                late.append(await submitted(daemon, "until revoked"))

            group.start_soon(wait)
            async with async_client.connected(home) as another:
                looking = daemon_kit.Daemon(home, daemon.running, another)
                for _ in range(1200 * SLOWNESS):
                    if len(await asked(looking)) >= before + 3:
                        break
                    await anyio.sleep(0.1)
                await another.ask("revoke_capability", signature_b58=grant)
        assert late[0]["search"][0] is True
        assert "memory.read" in late[0]["search"][1]
        rows = await asked(daemon)

    # No daemon started this run.
    run = await anyio.to_thread.run_sync(world.run, package)
    assert run.error is None, run.stderr[-300:]
    assert run.result is not None
    alone = json.loads(run.result.text)
    assert alone["listed"] == []
    assert alone["put"][0] is True
    assert "no daemon started this run" in alone["put"][1]

    theirs = [row["kind"] for row in world.rows()]
    called = {row["arguments_hash_hex"] for row in theirs if row["type"] == "tool_called"}
    assert {row["arguments_hash_hex"] for row in rows} <= called
    refused = [(row["uri"].rpartition("/")[2], row["code"]) for row in theirs if row["type"] == "tool_refused"]
    assert ("memory_search@1", "not_offered") in refused
    assert ("memory_put@1", "not_offered") in refused
    assert ("audit_recent@1", "not_granted") in refused
    assert "harbour" not in json.dumps([*theirs, *rows])
