"""The client's side of MCP over stdio: what it sends, and what of a server it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from policy import errors
from sandbox.network.tools import mcp_session, revisions
from sandbox.network.tools.mcp_session import McpSession, ToolCall

ONE = {"name": "add", "description": "Add", "inputSchema": {"type": "object"}}
TWO = {"name": "sub"}


def line(**message: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode()


def sent(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(one) for one in data.splitlines()]


def begun(session: McpSession) -> McpSession:
    """Return the session after `initialize`."""
    (first,) = sent(session.start())
    assert (first["method"], first["params"]["protocolVersion"]) == ("initialize", mcp_session.PROTOCOL)
    answer = session.take(line(id=1, result={"protocolVersion": "2025-03-26", "capabilities": {}}))
    assert [one["method"] for one in sent(answer)] == ["notifications/initialized", "tools/list"]
    return session


def test_list_of_one_page() -> None:
    session = begun(McpSession())
    assert session.take(line(id=2, result={"tools": [ONE, TWO]})) == b""
    assert session.done
    assert [one.document() for one in session.tools] == [
        {"name": "add", "description": "Add", "input_schema": {"type": "object"}},
        {"name": "sub", "description": "", "input_schema": None},
    ]


def test_list_of_pages() -> None:
    session = begun(McpSession())
    (second,) = sent(session.take(line(id=2, result={"tools": [ONE], "nextCursor": "c"})))
    assert (second["method"], second["params"]) == ("tools/list", {"cursor": "c"})
    session.take(line(id=3, result={"tools": [TWO]}))
    assert (session.done, [one.name for one in session.tools]) == (True, ["add", "sub"])


def test_call_after_approval() -> None:
    asked: list[list[str]] = []
    session = begun(McpSession(ToolCall("add", {"a": 1}), lambda tools: asked.append([one.name for one in tools])))
    (request,) = sent(session.take(line(id=2, result={"tools": [ONE]})))
    assert asked == [["add"]]
    assert (request["method"], request["params"]) == ("tools/call", {"name": "add", "arguments": {"a": 1}})
    session.take(line(id=3, result={"content": [], "structuredContent": {"sum": 1.5}}))
    assert session.done
    assert session.result == {"content": [], "structuredContent": {"sum": 1.5}}


def test_call_that_is_not_approved_is_not_sent() -> None:
    def refuse(tools: object) -> None:
        raise errors.ToolServerError("no")

    session = begun(McpSession(ToolCall("add", {}), refuse))
    with pytest.raises(errors.ToolServerError, match="no"):
        session.take(line(id=2, result={"tools": [ONE]}))


def test_requests_of_server_are_answered_and_refused() -> None:
    session = begun(McpSession())
    assert sent(session.take(line(id="x", method="ping"))) == [{"jsonrpc": "2.0", "id": "x", "result": {}}]
    for method in ("sampling/createMessage", "roots/list", "elicitation/create", "tools/call"):
        (answer,) = sent(session.take(line(id=2, method=method, params={})))
        assert answer["error"]["code"] == -32601, method
    assert session.take(line(method="notifications/tools/list_changed")) == b""
    assert not session.done


def test_answer_to_nothing_is_dropped() -> None:
    session = begun(McpSession())
    for number in (1, 3, "2", None):
        assert session.take(line(id=number, result={"tools": []})) == b""
    assert session.take(b"  ") == b""
    assert not session.done


WRONG = {
    "no JSON": (b"Server is running", "not JSON"),
    "no object": (b"[1]", "no JSON-RPC"),
    "no version": (b'{"id": 2, "result": {}}', "no JSON-RPC"),
    "key twice": (b'{"jsonrpc": "2.0", "id": 2, "id": 2, "result": {}}', "stands twice"),
    "deep": (b'{"jsonrpc": "2.0", "id": 2, "result": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "nested"),
    "error": (line(id=2, error={"code": 1, "message": "broken"}), "refused `tools/list`: `broken`"),
    "error of no shape": (line(id=2, error=7), "refused"),
    "no result": (line(id=2), "no result"),
    "no tools": (line(id=2, result={}), "no list"),
    "tool without name": (line(id=2, result={"tools": [{}]}), "no name"),
    "tool is a text": (line(id=2, result={"tools": ["add"]}), "no name"),
    "description of wrong type": (line(id=2, result={"tools": [{**ONE, "description": 1}]}), "wrong type"),
    "schema of wrong type": (line(id=2, result={"tools": [{**ONE, "inputSchema": []}]}), "wrong type"),
    "twice": (line(id=2, result={"tools": [ONE, ONE]}), "twice"),
    "too many": (line(id=2, result={"tools": [{"name": str(n)} for n in range(1001)]}), "more than"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_server(name: str) -> None:
    raw, said = WRONG[name]
    with pytest.raises(errors.ToolServerError, match=said):
        begun(McpSession()).take(raw)


@pytest.mark.parametrize("revision", ["1999-01-01", {}, [], None, 7])
def test_unknown_revision(revision: Any) -> None:
    session = McpSession()
    session.start()
    with pytest.raises(errors.ToolServerError, match="revision"):
        session.take(line(id=1, result={"protocolVersion": revision}))


def take_all(session: McpSession, lines: Iterable[bytes]) -> None:
    for one in lines:
        session.take(one)


def test_endless_pages_end() -> None:
    session = begun(McpSession())
    pages = (line(id=number, result={"tools": [], "nextCursor": "again"}) for number in range(2, 1_000))
    with pytest.raises(errors.ToolServerError, match="pages"):
        take_all(session, pages)


def test_endless_notifications_end() -> None:
    session = begun(McpSession())
    with pytest.raises(errors.ToolServerError, match="messages"):
        take_all(session, [line(method="notifications/message")] * 20_000)


DISCOVERED = {"supportedVersions": [revisions.NEWEST], "capabilities": {"tools": {"listChanged": True}}}


def test_server_of_newest_revision_alone_is_asked_so() -> None:
    session = McpSession(ToolCall("add", {}))
    session.start()
    (asked,) = sent(session.take(line(id=1, error={"code": -32601, "message": "no initialize"})))
    assert (asked["method"], asked["params"]) == ("server/discover", {"_meta": revisions.meta()})
    (listed,) = sent(session.take(line(id=2, result=DISCOVERED)))
    assert (listed["method"], listed["params"]) == ("tools/list", {"_meta": revisions.meta()})
    (called,) = sent(session.take(line(id=3, result={"tools": [ONE]})))
    assert called["params"] == {"name": "add", "arguments": {}, "_meta": revisions.meta()}
    assert (session.alone, session.is_changing) == (True, True)


def test_server_of_no_known_revision_is_refused_by_first_error() -> None:
    session = McpSession()
    session.start()
    session.take(line(id=1, error={"code": -32601, "message": "no initialize"}))
    with pytest.raises(errors.ToolServerError, match="refused `initialize`: `no initialize`"):
        session.take(line(id=2, error={"code": -32601, "message": "no discover"}))


@pytest.mark.parametrize(
    "answer", [{"error": {"code": -32601}}, {"result": {}}, {"error": "x"}, {"error": {"data": 1}}]
)
def test_server_over_http_may_be_of_earlier_revision(answer: dict[str, Any]) -> None:
    session = McpSession(over_http=True)
    assert sent(session.start())[0]["method"] == "server/discover"
    (asked,) = sent(session.take(line(id=1, **answer)))
    assert (asked["method"], "_meta" in asked["params"]) == ("initialize", False)
    session.take(line(id=2, result={"protocolVersion": "2025-03-26", "capabilities": {}}))
    session.take(line(id=3, result={"tools": [ONE]}))
    assert (session.done, session.alone) == (True, False)


def test_refusal_that_names_newest_revision_is_asked_once_more() -> None:
    refused = {"code": revisions.UNSUPPORTED, "message": "no", "data": {"supported": [revisions.NEWEST]}}
    session = McpSession(over_http=True)
    session.start()
    (again,) = sent(session.take(line(id=1, error=refused)))
    assert again["method"] == "server/discover"
    with pytest.raises(errors.ToolServerError, match="refused"):
        session.take(line(id=2, error=refused))


def test_tool_with_wrong_headers_is_not_advertised_over_http() -> None:
    wrong = {"name": "bad", "inputSchema": {"properties": {"a": {"type": "string", "x-mcp-header": "a b"}}}}
    session = McpSession(over_http=True)
    session.start()
    session.take(line(id=1, result=DISCOVERED))
    session.take(line(id=2, result={"tools": [ONE, wrong]}))
    assert [one.name for one in session.tools] == ["add"]
