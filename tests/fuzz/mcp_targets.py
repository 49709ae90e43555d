"""Messages of MCP: the daemon's server, the proxy's client, and a tool server in front of the proxy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from covenant.wire import mcp_server, requests
from sandbox.network.tools.mcp_session import LINE_BYTES, McpSession, ToolCall
from sandbox.network.tools.proxy import Output, ToolProxy
from tests import tool_call_kit as kit
from tests.fuzz.drive import Target

_WORDS = (
    b'"jsonrpc":"2.0"', b'"id":1', b'"id":"a"', b'"id":null', b'"id":true', b'"method":"tools/call"', b'"result":{}',
    b'"method":"tools/list"', b'"method":"initialize"', b'"error":{"code":1,"message":"x"}', b'"params":{}',
    b'"tools":[]',
    b'"method":"notifications/tools/list_changed"', b'"method":"sampling/createMessage"', b'"content":[]',
    b'"name":"open"',
    b'"arguments":{}', b'"nextCursor":"x"', b"\\ud800", b"1e999", b"[[[[", b'"isError":true', b'"name":"ruled"',
    b'"path":"/data/a"', b'"path":"/etc/passwd"', b'"requestId":1',
)  # fmt: skip
_ADVERTISED = [
    {"name": t["name"], "description": t["description"], "inputSchema": t["input_schema"]} for t in kit.TOOLS
]
_GRANTED = {"open", "ruled", "listed", "moded", "stat", "do_read"}


def _line(**message: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode()


def _proxy() -> tuple[kit.Guarded, ToolProxy]:
    guarded = kit.Guarded(kit.MANIFEST.replace("calls_per_minute = 5", "calls_per_minute = 1000000"))
    proxy = ToolProxy(guarded.guard, guarded.tools, guarded.tools.servers[0], clock=guarded.clock)
    proxy.start()
    out = proxy.from_server(_line(id=1, result={"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}))
    number = json.loads(out.server.splitlines()[-1])["id"]
    proxy.from_server(_line(id=number, result={"tools": _ADVERTISED}))
    return guarded, proxy


def _messages(raw: bytes) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in raw.splitlines()]
    assert all(one["jsonrpc"] == "2.0" for one in found)
    return found


def server(raw: bytes) -> str:
    """A message of a client of the daemon: a reply, or a request of the table."""
    found = mcp_server.take(raw)
    if found is None:
        return "none"
    if isinstance(found, mcp_server.McpReply):
        (one,) = _messages(found.message)
        return f"reply {sorted(one)}"
    assert isinstance(found.request, requests.Request)
    assert found.request.kind in {kind for kind, _, _ in mcp_server.TOOLS.values()}
    return found.request.kind


def client(raw: bytes) -> str:
    """A line of a client of the proxy: nothing but a granted call reaches the server, and each is in the log before."""
    guarded, proxy = _proxy()
    out = proxy.from_client(raw)
    for one in _messages(out.server):
        assert one["method"] == "tools/call"
        assert one["params"]["name"] in _GRANTED
        assert guarded.rows[-1][0] == "tool_called"
    _messages(out.client)
    return f"{len(out.server) > 0} {len(out.client) > 0} {[kind for kind, _ in guarded.rows]}"


def tool_server(raw: bytes) -> str:
    """A line of a tool server during a call: the client gets the answer to its call, or nothing."""
    guarded, proxy = _proxy()
    proxy.from_client(_line(id="mine", method="tools/call", params={"name": "open", "arguments": {}}))
    before = proxy.from_client(_line(id=2, method="tools/list")).client
    out: Output = proxy.from_server(raw)
    answers = _messages(out.client)
    assert len(answers) <= 1
    assert all(
        one["id"] == "mine" and set(one["result"]) <= {"content", "structuredContent", "isError"} for one in answers
    )
    assert proxy.from_client(_line(id=2, method="tools/list")).client == before, "no tool was added"
    return f"{len(answers)} {[one.get('method') for one in _messages(out.server)]} {len(guarded.rows)}"


def session(raw: bytes) -> str:
    """Lines of a tool server from the start: the call is sent only after the list is approved."""
    approved: list[int] = []
    one = McpSession(ToolCall("open", {}), lambda tools: approved.append(len(tools)))
    sent = one.start()
    for line in raw.split(b"\n"):
        assert len(line) < LINE_BYTES
        if one.done:
            break
        sent += one.take(line)
    assert (b"tools/call" not in sent) or approved
    return f"{one.done} {len(approved)}"


def _clients() -> Sequence[bytes]:
    return (
        _line(id=1, method="initialize", params={"protocolVersion": "2025-06-18"}),
        _line(id=1, method="tools/list"), _line(id="a", method="ping"), _line(method="notifications/initialized"),
        _line(id=1, method="tools/call", params={"name": "memory_search", "arguments": {"query": "a", "limit": 3}}),
        _line(id=1, method="tools/call", params={"name": "tools_call", "arguments": {"name": "clock"}}),
        _line(id=1, method="tools/call", params={"name": "open", "arguments": {"path": "x"}}),
        _line(id=1, method="tools/call", params={"name": "ruled", "arguments": {"path": "/data/a"}}),
        _line(method="notifications/cancelled", params={"requestId": 1}),
    )  # fmt: skip


def _servers() -> Sequence[bytes]:
    number = 111
    return (
        _line(id=number, result={"content": [{"type": "text", "text": "x"}], "structuredContent": {}, "_meta": {}}),
        _line(id=number, error={"code": 1, "message": "no"}), _line(method="notifications/tools/list_changed"),
        _line(id=1, method="sampling/createMessage", params={}), _line(id=3, result={"tools": _ADVERTISED}),
    )  # fmt: skip


def _sessions() -> Sequence[bytes]:
    about = _line(id=1, result={"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}})
    listed = _line(id=2, result={"tools": _ADVERTISED[:2]})
    answered = _line(id=3, result={"content": []})
    return b"\n".join((about, listed, answered)), b"\n".join(
        (about, _line(id=2, result={"tools": [], "nextCursor": "a"}))
    )


TARGETS = (
    Target("mcp daemon", server, _clients, _WORDS),
    Target("mcp daemon tree", server, _clients, _WORDS, share=5, json=True),
    Target("mcp client", client, _clients, _WORDS, share=5),
    Target("mcp client tree", client, _clients, _WORDS, share=5, json=True),
    Target("mcp server", tool_server, _servers, _WORDS, share=5),
    Target("mcp server tree", tool_server, _servers, _WORDS, share=5, json=True),
    Target("mcp session", session, _sessions, _WORDS),
)
