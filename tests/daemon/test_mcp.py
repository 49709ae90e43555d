"""The daemon as an MCP server: `/mcp` with tokens and Origin checks, and `covenant mcp` over stdin and stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from covenant.wire.types import AgentId
from tests import daemon_kit
from tests.daemon_kit import Daemon

pytestmark = pytest.mark.anyio

PEER = AgentId(display="peer@local", pubkey="8opHzTAnfzRpPEx21XtnrVTX28YQuCpAjcn1PczScKh")


async def post(daemon: Daemon, message: Any, token: str | None, **headers: str) -> tuple[int, dict[str, Any] | None]:
    authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{daemon.http_port}/mcp"
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json=message, headers={**authorization, **headers}) as answer,
    ):
        raw = await answer.read()
        return answer.status, json.loads(raw) if raw else None


def call(tool: str, number: int = 1, /, **arguments: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


def token_of(daemon: Daemon) -> str:
    return (daemon.home / "peers" / "operator.token").read_text().strip()


async def test_http_serves_tools_behind_token_and_grants(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        token = token_of(daemon)
        initialize = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
        assert (await post(daemon, initialize, None))[0] == 401
        assert (await post(daemon, initialize, "wrong"))[0] == 401
        assert (await post(daemon, initialize, token, Origin="https://evil.example"))[0] == 403
        assert (await post(daemon, initialize, token, Host="evil.example"))[0] == 421
        assert (await post(daemon, {"id": 1}, token))[0] == 400
        assert (await post(daemon, initialize, token, **{"MCP-Protocol-Version": "1"}))[0] == 400
        status, found = await post(daemon, initialize, token)
        assert status == 200
        assert found is not None
        assert found["result"]["protocolVersion"] == "2025-06-18"
        assert await post(daemon, {"jsonrpc": "2.0", "method": "notifications/initialized"}, token) == (202, None)
        await daemon.grant("memory.write", "memory.read")
        _, stored = await post(daemon, call("memory_put", tier="working", text="seccomp is a filter"), token)
        assert stored is not None
        assert stored["result"]["isError"] is False, stored
        _, listed = await post(daemon, call("memory_recent", limit=5), token)
        assert "seccomp is a filter" in json.dumps(listed)


async def test_peer_without_grant_is_refused_where_it_succeeds_with(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        actions = ["tool.call.clock"]
        made = await daemon.ask("enroll_peer", display=PEER.display, pubkey=PEER.pubkey, actions=actions)
        denied = []
        for one in (call("tools_call", name="clock", arguments={}), call("memory_put", tier="working", text="x")):
            _, found = await post(daemon, one, made["token_b58"])
            assert found is not None
            denied.append(found["result"]["isError"])
        assert denied == [False, True]


async def test_stdio_speaks_to_daemon(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("tool.call.clock")
        lines = [
            {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}},
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
            call("agents_list", 3),
            call("tools_call", 4, name="clock", arguments={}),
            call("tools_call", 5, name="absent", arguments={}),
        ]
        done = await anyio.run_process(
            [sys.executable, "-m", "covenant", "mcp"],
            input="".join(json.dumps(one) + "\n" for one in lines).encode(),
            stderr=subprocess.PIPE,
            env={**os.environ, "COVENANT_HOME": str(daemon.home)},
        )
        answers = {one["id"]: one for one in map(json.loads, done.stdout.splitlines())}
        assert sorted(answers) == [1, 2, 3, 4, 5]
        assert answers[3]["result"]["structuredContent"]["kind"] == "agents"
        assert "epoch_ms" in answers[4]["result"]["content"][0]["text"]
        assert answers[5]["result"]["isError"] is True
