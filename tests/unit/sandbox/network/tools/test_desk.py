"""The desk of a run's tools: clients over HTTP, several servers, and calls that end in every way."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from sandbox.network.tools import desk, revisions, wire
from sandbox.network.tools.desk import Effects, ToolDesk
from tests import tool_call_kit as kit

SECOND = {**copy.deepcopy(kit.DOCUMENT["servers"][0]), "alias": "other", "tools": [kit.tool("open")]}
WHOLE = {**kit.DOCUMENT, "servers": [*kit.DOCUMENT["servers"], SECOND]}
MANIFEST = kit.MANIFEST.replace("allow = [", 'allow = ["matrix://tool/mcp/other/open@1.0", ')


class Desk:
    """A desk whose servers a test plays."""

    def __init__(self) -> None:
        self.guarded = kit.Guarded(MANIFEST, WHOLE)
        self.desk = ToolDesk(self.guarded.guard, self.guarded.tools, clock=self.guarded.clock)
        self.number = 0

    def ask(self, method: str, alias: str = "", ident: Any = 1, **params: Any) -> Effects:
        self.number += 1
        message = {"jsonrpc": "2.0", "id": ident, "method": method, "params": params}
        return self.desk.take(self.number, alias, json.dumps(message).encode())

    def call(self, name: str, alias: str = "", ident: Any = 1, **arguments: Any) -> Effects:
        return self.ask("tools/call", alias, ident, name=name, arguments=arguments)

    def say(self, alias: str, **message: Any) -> Effects:
        return self.desk.from_server(alias, json.dumps({"jsonrpc": "2.0", **message}).encode())

    def lists(self, alias: str) -> Effects:
        """Play the server up to its list. Returns what the list leads to."""
        about = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}
        self.say(alias, id=1, result=about)
        (server,) = (one for one in WHOLE["servers"] if one["alias"] == alias)
        tools = [
            {"name": one["name"], "description": one["description"], "inputSchema": one["input_schema"]}
            for one in server["tools"]
        ]
        return self.say(alias, id=2, result={"tools": tools})


def reply(effects: Effects) -> dict[str, Any]:
    ((_, said, message),) = effects.replies
    assert said == wire.ANSWER
    found: dict[str, Any] = json.loads(message)
    return found


def test_tools_of_all_servers_have_their_alias() -> None:
    one = Desk()
    names = {tool["name"] for tool in reply(one.ask("tools/list"))["result"]["tools"]}
    assert {"fs__open", "other__open", "fs__do_read"} <= names
    assert "fs__hidden" not in names
    assert "fs__do_shell" not in names
    (only,) = reply(one.ask("tools/list", "other"))["result"]["tools"]
    assert only["name"] == "open"
    assert one.ask("tools/list", "none").replies[0][1] == wire.UNKNOWN


def test_first_allowed_call_starts_its_server_alone() -> None:
    one = Desk()
    denied = one.call("fs__ruled", path="/etc/shadow")
    assert reply(denied)["result"]["isError"]
    assert denied.starts == []
    first, second = one.call("fs__open", ident="a"), one.call("fs__open", ident=2)
    assert (first.starts, second.starts, first.replies) == (["fs"], [], [])
    sent = one.lists("fs").lines
    numbers = [json.loads(line)["id"] for _, data in sent for line in data.splitlines() if b"tools/call" in line]
    assert len(numbers) == 2
    done = [reply(one.say("fs", id=number, result={"content": []})) for number in reversed(numbers)]
    assert [one["id"] for one in done] == [2, "a"]
    assert all(one["result"] == {"content": []} for one in done)


def test_ids_of_clients_may_be_equal() -> None:
    one = Desk()
    one.call("fs__open")
    one.call("other__open")
    one.call("fs__open")
    one.lists("fs")
    one.lists("other")
    assert len(one.desk.ended("fs").replies) == 2
    assert len(one.desk.ended("other").replies) == 1


def test_server_that_ended_starts_again_some_times() -> None:
    one = Desk()
    for _ in range(desk.STARTS):
        assert one.call("other__open").starts == ["other"]
        assert reply(one.desk.ended("other"))["result"]["isError"]
    one.guarded.clock.now += 1
    late = one.call("other__open")
    assert (late.starts, reply(late)["result"]["isError"]) == ([], True)
    one.guarded.clock.now += 60
    assert one.call("other__open").starts == ["other"]


def test_cancelled_call_has_no_reply_and_an_end() -> None:
    one = Desk()
    one.call("fs__open")
    sent = one.lists("fs").lines
    (number,) = (json.loads(line)["id"] for _, data in sent for line in data.splitlines() if b"tools/call" in line)
    effects = one.desk.cancel(one.number)
    assert effects.replies == []
    assert b"notifications/cancelled" in effects.lines[0][1]
    assert one.say("fs", id=number, result={"content": []}).replies == []
    assert one.guarded.rows[-1][1]["code"] == "cancelled"
    assert one.desk.cancel(one.number) == Effects()


def test_call_that_waits_may_be_cancelled() -> None:
    one = Desk()
    one.call("fs__open")
    assert one.desk.cancel(one.number).replies == []
    assert one.guarded.rows[-1][1]["code"] == "cancelled"
    assert b"tools/call" not in b"".join(data for _, data in one.lists("fs").lines)


def test_late_call_is_ended_by_its_clock() -> None:
    one = Desk()
    one.call("fs__stat")
    one.lists("fs")
    due = one.desk.due()
    assert due == one.guarded.clock.now + 2
    one.guarded.clock.now = due
    assert "call_ms" in reply(one.desk.tick())["result"]["content"][0]["text"]
    assert one.desk.due() is None


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', b"{" * 100, b"\xff"])
def test_no_message_is_malformed(raw: bytes) -> None:
    assert Desk().desk.take(1, "", raw).replies[0][1] == wire.MALFORMED


def test_notification_has_no_reply() -> None:
    raw = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
    assert Desk().desk.take(1, "", raw).replies == [(1, wire.NOTHING, b"")]


def test_methods_that_need_no_server() -> None:
    one = Desk()
    assert reply(one.ask("ping"))["result"] == {}
    about = reply(one.ask("initialize", protocolVersion="2025-11-25"))["result"]
    assert (about["protocolVersion"], about["capabilities"]) == ("2025-11-25", {"tools": {}})
    assert reply(one.ask("initialize", protocolVersion=["x"]))["result"]["protocolVersion"] == "2025-11-25"
    assert reply(one.ask("resources/list"))["error"]["code"] == -32601
    assert reply(one.ask("tools/call", name=3))["error"]["code"] == -32602


def test_call_of_a_tool_that_is_not_there_is_written_as_refused() -> None:
    one = Desk()
    names = ("open", "fs__none", "none__open", "spawn", "x__" + "y" * 5000, "\ud800`")
    for name in names:
        assert reply(one.call(name, path="secret"))["error"]["code"] == -32602
    rows = [row for kind, row in one.guarded.rows if kind == "tool_refused"]
    assert [row["code"] for row in rows] == ["unknown_tool"] * len(names)
    assert rows[1]["uri"] == "matrix://tool/mcp/fs/none@?"
    assert all(len(row["uri"]) < 200 for row in rows)
    assert "secret" not in str(rows)


def notified(one: Desk, ident: Any, method: str = "notifications/cancelled") -> Effects:
    one.number += 1
    message = {"jsonrpc": "2.0", "method": method, "params": {"requestId": ident}}
    return one.desk.take(one.number, "", json.dumps(message).encode())


def test_notification_ends_its_call_alone() -> None:
    one = Desk()
    one.call("fs__open", ident=7)
    one.call("fs__open", ident="7")
    one.lists("fs")
    other = [notified(one, ident) for ident in (8, None, True, 7.0)]
    assert all(effects.replies[1:] == [] and effects.lines == [] for effects in other)
    ended = notified(one, 7)
    (nothing, (number, said, raw)) = ended.replies
    assert (nothing[1], number, said) == (wire.NOTHING, 1, wire.ANSWER)
    assert json.loads(raw)["error"]["code"] == -32800
    assert b"notifications/cancelled" in ended.lines[0][1]
    assert notified(one, 7).replies[1:] == []
    assert len(one.desk.ended("fs").replies) == 1


def test_notification_for_two_calls_ends_neither() -> None:
    one = Desk()
    one.call("fs__open", ident=7)
    one.call("other__open", ident=7)
    assert notified(one, 7).replies[1:] == []
    raw = b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":[7]}'
    assert one.desk.take(99, "", raw).replies == [(99, wire.NOTHING, b"")]
    assert len(one.desk.ended("fs").replies) == 1


def test_child_is_stopped_with_its_call() -> None:
    one = Desk()
    one.desk = ToolDesk(one.guarded.guard, one.guarded.tools, clock=one.guarded.clock, spawns=True)
    for ident in (7, 8):
        one.call("spawn", ident=ident, agent="worker", text="hi")
    ended = notified(one, 7)
    assert (ended.children, ended.replies[1][0]) == ([(1, b"")], 1)
    assert one.desk.cancel(2).children == [(2, b"")]
    assert one.desk.child_ended(1, b"{}") == Effects()


def alone(one: Desk, method: str, headers: dict[str, str] | None = None, **params: Any) -> Effects:
    """Ask as a client of revision 2026-07-28, over HTTP where ``headers`` are given."""
    given = {"_meta": {revisions.VERSION: revisions.NEWEST, revisions.CAPABILITIES: {}}, **params}
    if headers is not None:
        headers = {"mcp-protocol-version": revisions.NEWEST, "mcp-method": method, **headers}
    one.number += 1
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": given}
    return one.desk.take(one.number, "", json.dumps(message).encode(), headers)


def test_client_of_newest_revision_needs_no_initialize() -> None:
    one = Desk()
    about = reply(alone(one, "server/discover", {}))["result"]
    assert about["supportedVersions"] == list(revisions.SPOKEN)
    assert about["_meta"][revisions.SERVER] == {"name": "covenant", "version": "1"}
    assert "fs__open" in {tool["name"] for tool in reply(alone(one, "tools/list", {}))["result"]["tools"]}
    assert reply(alone(one, "tools/list"))["result"]["resultType"] == "complete", "over the broker"
    alone(one, "tools/call", {"mcp-name": "fs__open"}, name="fs__open", arguments={})
    (number,) = (
        json.loads(line)["id"]
        for _, data in one.lists("fs").lines
        for line in data.splitlines()
        if b"tools/call" in line
    )
    result = reply(one.say("fs", id=number, result={"content": []}))["result"]
    assert result == {"content": [], **revisions.stamp("covenant", "1")}
    denied = alone(one, "tools/call", {"mcp-name": "fs__ruled"}, name="fs__ruled", arguments={"path": "/etc/shadow"})
    assert (reply(denied)["result"]["isError"], reply(denied)["result"]["resultType"]) == (True, "complete")


@pytest.mark.parametrize(
    ("method", "headers", "said", "code"),
    [
        ("ping", {}, wire.NO_METHOD, revisions.NO_METHOD),
        ("initialize", {}, wire.NO_METHOD, revisions.NO_METHOD),
        ("tools/list", {"mcp-method": "ping"}, wire.MALFORMED, revisions.MISMATCH),
        ("tools/list", {"mcp-protocol-version": "2025-11-25"}, wire.MALFORMED, revisions.MISMATCH),
    ],
)
def test_request_that_its_revision_lacks_is_refused(method: str, headers: Any, said: int, code: int) -> None:
    ((_, found, message),) = alone(Desk(), method, headers).replies
    assert (found, json.loads(message)["error"]["code"], json.loads(message)["id"]) == (said, code, 1)
