"""Servers of the transport http: reached by a sandbox of their own, with their secret added at its gate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from tests import tools_kit as kit
from tests.kernel.fake_host import SECRET, FakeHost
from tests.kernel.injecting import NAME, PORT, InjectWorld, carried, host, net, world
from tests.kernel.test_credentials import vault
from tests.kernel.test_tools_endpoint import AGENT, request, text_of

__all__ = ["host", "net", "world"]

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOL = {"name": "today", "description": "The weather", "input_schema": SCHEMA, "side_effect_class": "network"}
ALIASES = ("plain", "events", "old", "two")
GRANTS = f"""
[permissions.credentials]
grants = ["weather", "key"]

[[permissions.network]]
host = "{NAME}"
ports = [{PORT}]
protocol = "tls"

[permissions.skills]
allow = {json.dumps([f"matrix://tool/mcp/{alias}/today@3" for alias in ALIASES])}
side_effects = ["network"]
"""


class McpHost:
    """Answers of an MCP server over streamable HTTP, by the path: JSON, a stream of events, and none at all."""

    def __init__(self, host: FakeHost) -> None:
        self.sessions: list[str] = []
        handler: Any = host.RequestHandlerClass
        answers = self

        def plain(this: Any, given: str, body: bytes) -> None:
            said = answers.said(this, body)
            this.say(json.dumps(said).encode() if said else b"", status=200 if said else 202, Mcp_Session="x")

        def events(this: Any, given: str, body: bytes) -> None:
            said = answers.said(this, body)
            progress = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
            parts = [f"event: message\ndata: {json.dumps(one)}\n\n".encode() for one in (progress, said) if said]
            this.parts(parts or [b""], kind="text/event-stream")

        def old(this: Any, given: str, body: bytes) -> None:
            this.say(b"", status=405)

        handler.at_mcp_plain, handler.at_mcp_events, handler.at_mcp_old = plain, events, old
        handler.at_mcp_two = plain

    def said(self, this: Any, body: bytes) -> dict[str, Any] | None:
        asked = json.loads(body)
        if "id" not in asked:
            return None
        result: dict[str, Any] = {"tools": [{"name": "today", "description": "The weather", "inputSchema": SCHEMA}]}
        if asked["method"] == "initialize":
            result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}
        if asked["method"] == "tools/call":
            self.sessions.append(this.headers.get("MCP-Protocol-Version", ""))
            result = {"content": [{"type": "text", "text": asked["params"]["arguments"]["text"].upper()}]}
        return {"jsonrpc": "2.0", "id": asked["id"], "result": result}


def package(
    tmp_path: Path,
    grants: str = GRANTS,
    port: int = PORT,
    aliases: Sequence[str] = ALIASES,
    headers: Mapping[str, str] = {"Authorization": "$credential:weather", "X-Plain": "kept"},
) -> Path:
    servers = [
        {
            "alias": alias, "transport": "http", "endpoint": f"https://{NAME}:{port}/mcp/{alias}", "version": "3",
            "headers": headers, "tools": [TOOL],
        }
        for alias in aliases
    ]  # fmt: skip
    if "two" in aliases:
        servers[-1]["headers"] = {"Authorization": "$credential:weather", "X-Key": "$credential:key"}
    document = {
        "schema_version": 1, "agent": "matrix://agent/hello", "allowed_side_effects": ["network"], "servers": servers,
    }  # fmt: skip
    made = kit.written(tmp_path / "hello", kit.package(document, grants=grants, files={"main.py": AGENT.encode()}))
    manifest = made / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[resources]", "[resources]\ncpu_ms_per_task = 120000"))
    return made


def test_server_over_http_is_called_with_secret_of_gate(world: InjectWorld, host: FakeHost, tmp_path: Path) -> None:
    McpHost(host)
    vault(world, "put", "hello", "weather", secret=SECRET)
    vault(world, "put", "hello", "key", secret="second-key\n")
    calls = [["/mcp", request("tools/call", name=f"{one}__today", arguments={"text": one})] for one in ALIASES]
    before = len(world.rows())
    answer = world.run(world.sign(package(tmp_path)), json.dumps(calls))
    assert answer.result is not None, (answer.error, answer.stderr)
    plain, events, old, two = json.loads(answer.result.text)
    assert [text_of(plain), text_of(events), text_of(two)] == ["PLAIN", "EVENTS", "TWO"]
    assert old[1]["result"]["isError"]
    assert set(carried(host)) == {SECRET}
    assert {value for one in host.seen for name, value in one["headers"] if name == "x-plain"} == {"kept"}
    rows: Sequence[dict[str, Any]] = [row["kind"] for row in world.rows()[before:]]
    assert {value for one in host.seen for name, value in one["headers"] if name == "x-key"} == {"second-key"}
    assert {row["name"] for row in rows if row["type"] == "credential_injected"} == {"weather"}
    assert {row["name"] for row in rows if row["type"] == "credential_granted"} == {"key"}
    assert SECRET not in json.dumps(rows)


def test_host_that_is_not_granted_is_refused(world: InjectWorld, tmp_path: Path) -> None:
    with pytest.raises(errors.ToolsError, match=r"port 444.*\(tools\.json:") as refused:
        world.run(world.sign(package(tmp_path, port=444)), "[]")
    assert "[[permissions.network]]" in refused.value.hint
