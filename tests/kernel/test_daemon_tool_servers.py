"""The daemon as a client of MCP: it lists and calls the tools of signed packages, which the supervisor runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from covenant.handlers import tool_servers
from covenant.handlers.caller import Caller
from covenant.wire import requests, responses
from policy import errors
from tests import daemon_kit, runtime_kit
from tests.daemon_kit import Daemon
from tests.kernel import revoking, serving
from tests.kernel.serving import Served
from tests.kernel.test_serve import eventually, live
from tests.kernel.test_tool_servers import GRANTS, hostile
from tests.kernel.world import ROOT, SLOWNESS, World

pytestmark = pytest.mark.anyio

PAGE = (ROOT / "docs" / "tool-calls.md").read_text()
ENTRY = """
[[mcp.server]]
name = "loud"
package = "hello"
tool_prefix = "a.b"

[[mcp.server]]
name = "missing"
package = "missing"

[[mcp.server]]
name = "old"
command = "npx"
args = ["-y", "secret-word"]
"""
NAME = "mcp_a_b_shout"


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        yield made
        made.quiet()


def bridge() -> str:
    """The program of the page."""
    section = PAGE[PAGE.index("## Tools of packages, called by the daemon") :]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def home_of(world: World, tmp_path: Path, entries: str = ENTRY) -> Path:
    """Write a home whose agents are the signed package of a tool server."""
    home = world.base / "daemon"
    (home / "agents").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    made = hostile(tmp_path, GRANTS, timeout_ms=300_000)
    manifest = (made / "agent.toml").read_text()
    (made / "agent.toml").write_text(manifest + '\n[process]\ncontract = "stdio"\n')
    (made / "main.py").write_text(bridge())
    shutil.copytree(world.sign(made), home / "agents" / "hello")
    (home / "secrets.toml").write_text(entries)
    (home / "secrets.toml").chmod(0o600)
    return home


async def until(daemon: Daemon, state: str | None) -> dict[str, Any]:
    """Wait until the tool is listed in this state; None: until it is not listed."""
    with anyio.fail_after(120 * SLOWNESS):
        while True:
            listed = {one["name"]: one for one in (await daemon.ask("list_tools"))["tools"]}
            if (listed.get(NAME) or {}).get("state") == state:
                return listed
            await anyio.sleep(0.2)


async def shout(daemon: Daemon, words: str) -> dict[str, Any]:
    return await daemon.ask("call_tool", name=NAME, arguments={"text": words})


async def test_tools_are_called_lost_and_removed(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = served.world
    home = home_of(world, tmp_path)
    async with daemon_kit.running(home, socket=served.path) as daemon:
        listed = await until(daemon, "ready")
        assert sorted(listed) == ["clock", "echo", NAME]
        assert {"source": "loud", "prefix": "a.b"}.items() <= listed[NAME].items()
        assert "source" not in listed["echo"]
        with pytest.raises(errors.CapabilityMissingError):
            await shout(daemon, "hi")
        await daemon.grant(f"tool.call.{NAME}")
        assert text_of(await shout(daemon, "hi")) == "hi"
        with pytest.raises(errors.ToolArgumentsError):
            await daemon.ask("call_tool", name=NAME, arguments={"text": 7})
        # The server is killed during a call: the gate says so, and starts it again for the next one.
        died = await shout(daemon, "hdie")
        assert (died["is_error"], "ended" in text_of(died)) == (True, True)
        assert text_of(await shout(daemon, "ho")) == "ho"
        # The shim of the session is killed during a call.
        (entry,) = live(world, "hello")
        count = calls_of(world)
        async with anyio.create_task_group() as group:
            group.start_soon(lost_call, daemon)
            await until_called(world, count)
            os.kill(entry.keeper, signal.SIGKILL)
        await until(daemon, "ready")
        assert text_of(await shout(daemon, "he")) == "he"
        # It advertises more than is pinned: no more is listed, and it is called no more.
        await shout(daemon, "hgrow")
        assert "does not have" in text_of(await shout(daemon, "hi"))
        assert sorted(await until(daemon, "ready")) == ["clock", "echo", NAME]
        # The operator revokes the package.
        (digest,) = {one.payload_digest for one in live(world, "hello")}
        await anyio.to_thread.run_sync(
            revoking.revoke, world, revoking.next_root(world, revoking.manifest_of(world, digest))
        )
        await until(daemon, None)
        with pytest.raises(errors.NoToolError):
            await shout(daemon, "hi")
        rows = [row["kind"] for row in (await daemon.ask("recent_audit", limit=100))["events"]]
    changed = [row for row in reversed(rows) if row["type"] == "tool_server_changed"]
    states = [row["state"] for row in changed if row["server"] == "loud"]
    assert states == ["ready", "reconnecting", "ready", "refused"]
    outcomes = [row["outcome"] for row in reversed(rows) if row["type"] == "tool_call_completed"]
    assert outcomes == ["ok", "error", "ok", "failed", "ok", "ok", "error"]
    said = caplog.text
    assert "[[mcp.server]] `old` was left out" in said
    assert "docs/tool-calls.md" in said
    assert "secret-word" not in said
    assert "tool server `missing` is refused: the package cannot be read" in said


async def test_hanging_calls_of_one_caller_block_no_other(served: Served, tmp_path: Path) -> None:
    home = home_of(served.world, tmp_path)
    async with daemon_kit.running(home, socket=served.path) as daemon:
        await until(daemon, "ready")
        await daemon.grant(f"tool.call.{NAME}")
        alice = runtime_kit.ALICE
        await daemon.ask("enroll_peer", display=alice.display, pubkey=alice.pubkey, actions=[f"tool.call.{NAME}"])
        caller = Caller(agent=alice, operator=False, token_prefix="", transport="ipc")
        answers: list[str] = []

        async def hang() -> None:
            asked = requests.CallTool(name=NAME, arguments={"text": "hwait"})
            response = await daemon.server.respond(caller, asked)
            assert isinstance(response, responses.Error)
            answers.append(response.code or "")

        async with anyio.create_task_group() as group:
            for _ in range(64):
                group.start_soon(hang)
            await until_called(served.world, tool_servers.CALLS_OF_ONE - 1)
            # The operator's calls pass through the same bridge, gate and server.
            assert text_of(await shout(daemon, "hi")) == "hi"
            assert text_of(await shout(daemon, "ho")) == "ho"
            assert set(answers) == {errors.BusyError.code}
            assert len(answers) == 64 - tool_servers.CALLS_OF_ONE
            group.cancel_scope.cancel()
        # The calls that were given up hold no thread of the bridge, and no place.
        response = await daemon.server.respond(caller, requests.CallTool(name=NAME, arguments={"text": "hi"}))
        assert isinstance(response, responses.ToolResult)


async def lost_call(daemon: Daemon) -> None:
    with pytest.raises(errors.ToolError, match="ended"):
        await shout(daemon, "hwait")


async def until_called(world: World, count: int) -> None:
    """Wait until the gate let more calls pass than this."""
    await anyio.to_thread.run_sync(lambda: eventually(lambda: calls_of(world) > count))


def calls_of(world: World) -> int:
    return sum(row["kind"]["type"] == "tool_called" for row in world.rows())


def text_of(result: dict[str, Any]) -> str:
    said: str = result["content"][0]["text"]
    return said
