"""The daemon as an MCP server, message by message."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from covenant.wire import mcp_server, requests
from covenant.wire.mcp_server import McpCall, McpReply
from policy import errors
from policy.manifest.tools import advertised, document
from sandbox.network.tools import revisions

NAMED: dict[str, dict[str, Any]] = {
    "memory_search": {"query": "a", "limit": 1},
    "tools_call": {"name": "clock"},
    "tools_list": {},
    "intent_submit": {"text": "a"},
}


def taken(**message: Any) -> Any:
    found = mcp_server.take(json.dumps({"jsonrpc": "2.0", **message}).encode())
    return json.loads(found.message) if isinstance(found, McpReply) else found


def called(name: str, arguments: Any = None, number: Any = 1) -> Any:
    params = {"name": name} if arguments is None else {"name": name, "arguments": arguments}
    return taken(id=number, method="tools/call", params=params)


@pytest.mark.parametrize(("said", "spoken"), [("2025-06-18", "2025-06-18"), ("1.0", None), (7, None)])
def test_initialize_agrees_on_revision(said: Any, spoken: Any) -> None:
    result = taken(id=1, method="initialize", params={"protocolVersion": said})["result"]
    assert result["protocolVersion"] == (spoken or "2025-11-25")
    assert result["capabilities"] == {"tools": {}}


def test_each_tool_is_request_of_wire_with_valid_schema() -> None:
    listed = taken(id="a", method="tools/list")["result"]["tools"]
    assert {tool["name"] for tool in listed} == set(mcp_server.TOOLS)
    for tool in listed:
        jsonschema.Draft202012Validator.check_schema(tool["inputSchema"])
        assert "prefer_stream" not in tool["inputSchema"]["properties"]
        assert tool["description"]


def test_call_is_request_of_wire() -> None:
    found = called("memory_search", {"query": "seccomp", "limit": 3}, "x")
    assert isinstance(found, McpCall)
    assert found.id == "x"
    assert isinstance(found.request, requests.SearchMemory)
    assert (found.request.query, found.request.limit) == ("seccomp", 3)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"query": 1}, {"query": "a", "limit": "x"}, {"query": "a", "kind": "purge_memory"}, {"query": "a", "x": 1},
     {"query": "a", "prefer_stream": True}, [], "x"],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_error_of_tool(arguments: Any) -> None:
    result = called("memory_search", arguments)["result"]
    assert result["isError"] is True
    assert "memory_search" in result["content"][0]["text"]


@pytest.mark.parametrize("name", ["purge_memory", "search_memory", "rotate_operator_token", "", "memory_search "])
def test_request_outside_of_table_is_no_tool(name: str) -> None:
    assert called(name, {})["error"]["code"] == -32602


@pytest.mark.parametrize(
    "raw",
    [
        b"{", b"\xff", b"", b"[" * 80, b'{"jsonrpc":"2.0","id":1,"id":2}', b"[]", b"1", b"null",
        b'{"jsonrpc":"1.0","id":1,"method":"ping"}', b'{"jsonrpc":"2.0","id":1}',
        b'{"jsonrpc":"2.0","id":null,"method":"ping"}', b'{"jsonrpc":"2.0","id":true,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}',
        b'{"jsonrpc":"2.0","method":"x","params":1}', b'{"jsonrpc":"2.0","method":7,"result":{}}',
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(errors.MalformedRequestError) as caught:
        mcp_server.take(raw)
    assert json.loads(mcp_server.malformed(caught.value))["error"]["code"] == -32600


def test_unknown_method_is_error() -> None:
    assert taken(id=1, method="resources/list")["error"]["code"] == -32601
    assert called(7)["error"]["code"] == -32602  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message", [{"method": "notifications/initialized"}, {"method": "tools/call"}, {"id": 1, "result": {}}]
)
def test_message_without_reply(message: Any) -> None:
    assert taken(**message) is None


def test_error_of_daemon_is_error_of_tool() -> None:
    asked = called("memory_recent", {})
    document = {"kind": "error", "message": "no", "code": "capability_missing"}
    result = json.loads(mcp_server.answer(asked, document))["result"]
    assert result["isError"] is True
    assert "capability_missing" in result["content"][0]["text"]
    assert "structuredContent" not in result


def test_answer_of_tool_is_passed_on() -> None:
    asked = called("tools_call", {"name": "clock", "arguments": {}})
    content = [{"type": "text", "text": "now"}]
    done = {"kind": "tool_result", "content": content, "is_error": True}
    assert json.loads(mcp_server.answer(asked, done))["result"] == {"content": content, "isError": True}


META = {revisions.VERSION: revisions.NEWEST, revisions.CAPABILITIES: {}}


def alone(method: str, headers: dict[str, str] | None = None, **params: Any) -> Any:
    """The reply to a message of revision 2026-07-28, or its call."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": META, **params}}
    return mcp_server.take(json.dumps(message).encode(), headers)


def test_newest_revision_needs_no_initialize() -> None:
    about = json.loads(alone("server/discover").message)["result"]
    assert about["supportedVersions"] == list(revisions.SPOKEN)
    listed = json.loads(alone("tools/list").message)["result"]
    assert (len(listed["tools"]), listed["resultType"]) == (len(mcp_server.TOOLS), "complete")
    found = alone("tools/call", name="memory_search", arguments={"query": "seccomp"})
    document = {"kind": "memory", "records": []}
    result = json.loads(mcp_server.answer(found, document))["result"]
    assert (result["structuredContent"], result["resultType"]) == (document, "complete")
    wrong = json.loads(alone("tools/call", name="memory_search", arguments={}).message)["result"]
    assert (wrong["isError"], wrong["resultType"]) == (True, "complete")


def test_newest_revision_is_refused_with_status() -> None:
    headers = {"mcp-protocol-version": revisions.NEWEST, "mcp-method": "tools/list"}
    assert alone("tools/list", headers).status == 200
    assert alone("tools/call", headers, name="memory_search", arguments={}).status == 400
    assert alone("ping", {**headers, "mcp-method": "ping"}).status == 404
    unknown = alone(
        "tools/list", {"mcp-protocol-version": "2030-01-01"}, _meta={**META, revisions.VERSION: "2030-01-01"}
    )
    assert (unknown.status, json.loads(unknown.message)["error"]["code"]) == (400, revisions.UNSUPPORTED)


def test_runs_have_no_intent_and_schemas_of_tools_json() -> None:
    names = {one.name for one in mcp_server.advertised()}
    assert names == mcp_server.OF_RUNS.keys() == mcp_server.TOOLS.keys() - {"intent_submit"}
    declared = [{**one.document(), "side_effect_class": "read"} for one in mcp_server.advertised()]
    server = {"alias": "covenant", "transport": "daemon", "version": "1", "tools": declared}
    whole = {"schema_version": 1, "agent": "matrix://agent/hello", "servers": [server]}
    tools = document.parse(json.dumps(whole).encode())
    assert list(advertised.compare(tools, tools.servers[0], mcp_server.advertised())) == []
    # The others are not the agent's, and no finding; a changed one is.
    fewer = document.parse(json.dumps({**whole, "servers": [{**server, "tools": declared[:1]}]}).encode())
    assert list(advertised.compare(fewer, fewer.servers[0], mcp_server.advertised())) == []
    changed = [{**declared[0], "description": "Other words."}]
    other = document.parse(json.dumps({**whole, "servers": [{**server, "tools": changed}]}).encode())
    found = advertised.compare(other, other.servers[0], mcp_server.advertised())
    assert [one.code for one in found] == ["tool_changed"]


def test_name_of_call_is_its_tool() -> None:
    assert {mcp_server.name_of(called(name, arguments)) for name, arguments in NAMED.items()} == NAMED.keys()
