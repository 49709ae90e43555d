"""http://tools.covenant/mcp: an agent calls the tools of its package's servers, each in a sandbox of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home
from tests.kernel.test_tool_servers import ADVERTISED, GRANTS, HOSTILE, TOOL, URI, package, server
from tests.kernel.world import World

AGENT = """
import http.client, json, sys

def ask(path, message, headers=None, method="POST"):
    line = http.client.HTTPConnection("tools.covenant", timeout=60)
    line.request(method, path, json.dumps(message), {"Content-Type": "application/json", **(headers or {})})
    reply = line.getresponse()
    body = reply.read()
    return [reply.status, json.loads(body) if body else None]

asked = json.loads(json.loads(sys.stdin.readline())["text"])
print(json.dumps({"text": json.dumps([ask(*one) for one in asked])}))
"""


# The same calls over descriptor 3, the broker.
BY_BROKER = """
import json, os, sys

answers = open(3, "rb", closefd=False)
asked = json.loads(json.loads(sys.stdin.readline())["text"])
said = {}
for number, (path, message) in enumerate(asked):
    server = path.removeprefix("/mcp").strip("/")
    more = {"server": server} if server else {}
    line = json.dumps({"id": number, "kind": "mcp", "message": json.dumps(message), **more})
    os.write(3, line.encode() + b"\\n")
while len(said) < len(asked):
    answer = json.loads(answers.readline())
    said[answer["id"]] = answer.get("ok") or answer
found = [json.loads(said[at]["message"]) if "message" in said[at] else said[at] for at in range(len(asked))]
print(json.dumps({"text": json.dumps(found)}))
"""


RULE = f"""
[[permissions.skills.rule]]
tool = "{URI}"
argument = "text"
matches = "probe|h[a-z]+"
"""


def request(method: str, number: int | str = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def call(text: str, name: str = "loud__shout") -> list[Any]:
    return ["/mcp", request("tools/call", name=name, arguments={"text": text})]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("endpoint"))
    yield made
    assert leftovers(made.world) == []


def agent(tmp_path: Path, code: str, grants: str = GRANTS, **changes: Any) -> Path:
    made = package(tmp_path, code, grants, **changes)
    (made / "main.py").write_text(AGENT)
    return made


def ran(home: Home, made: Path, asked: list[Any]) -> list[Any]:
    done = home.covenant("dev", made, json.dumps(asked), "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    found: list[Any] = json.loads(json.loads(done.stdout)["text"])
    return found


def rows(home: Home) -> list[dict[str, Any]]:
    return [row["kind"] for row in home.world.rows() if row["kind"]["type"].startswith("tool_")]


def text_of(reply: list[Any]) -> str:
    said: str = reply[1]["result"]["content"][0]["text"]
    return said


def test_agent_lists_and_calls_its_tools(home: Home, tmp_path: Path) -> None:
    made = agent(tmp_path, server(), GRANTS + RULE)
    about: dict[str, Any] = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}
    notification = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    before = len(rows(home))
    found = ran(
        home,
        made,
        [
            ["/mcp", request("initialize", **about)],
            ["/mcp", notification],
            ["/mcp", request("tools/list", 7)],
            ["/mcp/loud", request("tools/list")],
            call("hi"),
            call("probe"),
            call("secret-word"),
            call("hi", "loud__whisper"),
            # The longest name that a row can have: in JSON it has twelve bytes for each of its characters.
            ["/mcp/loud", request("tools/call", name="\U0001f600" * 600, arguments={})],
            ["/mcp/loud", request("tools/call", "x", name="shout", arguments={"text": "ha"})],
            ["/mcp", request("sampling/createMessage")],
        ],
    )
    assert [status for status, _ in found] == [200, 202, *[200] * 9]
    assert found[0][1]["result"]["protocolVersion"] == "2025-11-25"
    assert found[2][1]["id"] == 7
    assert found[2][1]["result"]["tools"] == [{**ADVERTISED[0], "name": "loud__shout"}]
    assert found[3][1]["result"]["tools"] == ADVERTISED
    assert text_of(found[4]) == "HI"
    seen = json.loads(text_of(found[5]))
    assert seen["own file"] == "worked", "control"
    assert (seen["host file"], seen["network"]) == ("FileNotFoundError", "PermissionError")
    assert found[6][1]["result"]["isError"]
    assert "permissions.skills.rule" in text_of(found[6])
    assert found[7][1]["error"]["code"] == -32602
    assert "is no tool of a server" in text_of(found[8])
    assert (found[9][1]["id"], text_of(found[9])) == ("x", "HA")
    assert found[10][1]["error"]["code"] == -32601
    told = rows(home)[before:]
    kinds = ["tool_called", "tool_answered"]
    assert [row["type"] for row in told] == [*kinds, *kinds, *["tool_refused"] * 3, *kinds]
    assert len({row["run_id"] for row in told}) == 1
    assert "secret-word" not in str(told)
    # The row of the call and `covenant denials` name one id.
    (refused,) = [row["denial"] for row in told if row.get("code") == "arguments"]
    assert refused in {row["kind"]["denial"] for row in home.world.rows() if row["kind"]["type"] == "denied"}


def test_request_that_is_no_message_is_refused(home: Home, tmp_path: Path) -> None:
    made = agent(tmp_path, server())
    listed = request("tools/list")
    found = ran(
        home,
        made,
        [
            ["/mcp", listed, {}, "GET"],
            ["/mcp", listed, {}, "DELETE"],
            ["/mcp", [listed]],
            ["/mcp", "text"],
            ["/mcp/quiet", listed],
            ["/other", listed],
            # The longest target of a denial, in JSON.
            ["/" + "%F0%9F%98%80" * 200, listed],
            ["/mcp", listed, {"Content-Type": "text/plain"}],
            ["/mcp", listed, {"Origin": "http://evil.example"}],
            ["/mcp", listed, {"MCP-Protocol-Version": "1999-01-01"}],
            ["/mcp", listed, {"Host": "models.covenant"}],
            ["/mcp", listed, {"Origin": "http://tools.covenant", "MCP-Protocol-Version": "2025-11-25"}],
        ],
    )
    assert [status for status, _ in found] == [405, 405, 400, 400, 404, 404, 404, 415, 403, 400, 421, 200]


def test_server_that_lies_or_dies_is_error_and_next_call_works(home: Home, tmp_path: Path) -> None:
    tool = {**TOOL, "timeout_ms": 1500}
    made = agent(tmp_path, f"TOOLS = {ADVERTISED!r}\n{HOSTILE}", GRANTS, tools=[tool])
    before, starts = len(rows(home)), home.starts()
    found = ran(
        home,
        made,
        [
            call("hi"),
            call("hdie"),
            call("again"),
            call("hwait"),
            call("hgrow"),
            ["/mcp", request("tools/list")],
            call("x"),
        ],
    )
    assert text_of(found[0]) == "hi"
    assert "ended" in text_of(found[1])
    assert text_of(found[2]) == "again"
    assert "timeout_ms" in text_of(found[3])
    assert "evil" not in str(found[5])
    assert "does not have" in text_of(found[6]), "no call while the list differs"
    ends = [row["code"] for row in rows(home)[before:] if row["type"] == "tool_answered"]
    assert ends[:4] == [None, "server_ended", None, "timeout_ms"]
    assert home.starts() == starts + 3, "the agent, the server and its second start"
    assert leftovers(home.world) == []


def test_package_with_changed_server_does_not_start(home: Home, tmp_path: Path) -> None:
    made = agent(tmp_path, server())
    assert ran(home, made, [call("hi")])[0][0] == 200, "control"
    (made / "tools" / "loud" / "server.py").write_text(server() + "\n# changed\n")
    starts = home.starts()
    done = home.covenant("dev", made, "[]", "--json")
    assert json.loads(done.stdout)["code"] == "tools_invalid"
    assert home.starts() == starts


def test_signed_package_runs_its_servers(world: World, tmp_path: Path) -> None:
    """With the operator's key, whose scope does not name the server's id."""
    made = agent(tmp_path, server())
    answer = world.run(world.sign(made), json.dumps([call("hi"), call("ho")]))
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert [text_of(one) for one in json.loads(answer.result.text)] == ["HI", "HO"]
    assert leftovers(world) == []


def test_line_agent_has_the_same_tools_by_its_broker(home: Home, tmp_path: Path) -> None:
    made = agent(tmp_path, server(), GRANTS + RULE)
    (made / "main.py").write_text(BY_BROKER)
    before = len(rows(home))
    found = ran(
        home,
        made,
        [
            ["/mcp", request("initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={})],
            ["/mcp", {"jsonrpc": "2.0", "method": "notifications/initialized"}],
            ["/mcp", request("tools/list")],
            ["/mcp/loud", request("tools/list")],
            ["/mcp/none", request("tools/list")],
            call("hi"),
            call("secret-word"),
            ["/mcp/loud", request("tools/call", "x", name="shout", arguments={"text": "ha"})],
            ["/mcp", []],
        ],
    )
    assert found[0]["result"]["protocolVersion"] == "2025-11-25"
    assert found[1] == {"id": 1, "ok": {}}
    assert found[2]["result"]["tools"] == [{**ADVERTISED[0], "name": "loud__shout"}]
    assert found[3]["result"]["tools"] == ADVERTISED
    assert found[4]["error"]["code"] == "malformed_request"
    assert found[5]["result"]["content"][0]["text"] == "HI"
    assert "permissions.skills.rule" in found[6]["result"]["content"][0]["text"]
    assert (found[7]["id"], found[7]["result"]["content"][0]["text"]) == ("x", "HA")
    assert found[8]["error"]["code"] == -32600
    kinds = [row["type"] for row in rows(home)[before:]]
    assert sorted(kinds) == ["tool_answered"] * 2 + ["tool_called"] * 2 + ["tool_refused"]
