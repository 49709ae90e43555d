"""Keep sessions with tool packages: pins bound what is listed, ends and refusals change it, calls end with a session.

The double starts a program without a sandbox in the place of the supervisor; tests/kernel/test_daemon_tool_servers.py
asks the real one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from covenant.handlers import tool_servers
from covenant.handlers.tool_servers import KeptServer
from covenant.providers.mcp_servers import McpServer
from covenant.providers.tools import ToolRegistry, native
from covenant.runtime import tool_session
from policy import errors
from tests import tools_kit

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
NAMES = ("shout", "sing", "hide")
# What the endpoint of the package lists: a tool as it is pinned, a changed one, one that is not granted or unknown.
PROGRAM = """
import json, sys
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}

def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

def tool(name, about=None):
    return {"name": "loud__" + name, "description": about or name, "inputSchema": SCHEMA}

tools = [tool("shout"), tool("sing", "changed"), tool("hide"), tool("evil")]
lists = 0
for line in sys.stdin:
    request = json.loads(line)
    method, number, params = request.get("method"), request.get("id"), request.get("params", {})
    if method == "initialize":
        say(id=number, result={"protocolVersion": params["protocolVersion"], "capabilities": {}, "serverInfo": {}})
    elif method == "tools/list":
        lists += 1
        say(id=number, result={"tools": tools})
    elif method == "notifications/cancelled":
        print("cancelled", params["requestId"], file=sys.stderr, flush=True)
    elif method == "tools/call":
        text = params["arguments"]["text"]
        if text == "change":
            tools = [tool("sing"), tool("evil"), tool("more")]
            say(method="notifications/tools/list_changed")
        if text == "storm":
            for _ in range(50):
                say(method="notifications/tools/list_changed")
        if text == "lists":
            text = str(lists)
        if text == "end":
            sys.exit(0)
        if text == "babble":
            print("no message", flush=True)
        if text == "long":
            print("x" * 33_600_000, flush=True)
        if text == "error":
            say(id=number, error={"code": -32000, "message": "no"})
        elif text == "empty":
            say(id=number, result={})
        elif text == "number":
            say(id=number, result={"content": [1]})
        elif text == "half":
            say(id=number, result={"content": [{"type": "text", "text": "\\ud800"}]})
        elif text not in ("wait", "babble", "long"):
            say(id=number, result={"content": [{"type": "text", "text": text}], "isError": text == "fail"})
"""


class Audit:
    """A log that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []

    async def append(self, kind: str, fields: Mapping[str, Any]) -> str:
        self.rows.append((kind, dict(fields)))
        return ""


class SessionDouble:
    """Sessions with ``program``; ``refusal`` is raised in their place while it is set."""

    def __init__(self) -> None:
        self.program, self.refusal, self.count = PROGRAM, None, 0

    refusal: errors.CovenantError | None

    def refuse(self, directory: int) -> None:
        if self.refusal is not None:
            raise self.refusal

    @contextlib.asynccontextmanager
    async def session(
        self, directory: int, pipes: Sequence[int]
    ) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
        self.count += 1
        self.refuse(directory)
        stdin, stdout, stderr = pipes
        command = [sys.executable, "-c", self.program]
        with subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr) as process:

            async def heard() -> dict[str, Any]:
                await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
                return {"kind": "answer", "error": None}

            try:
                yield heard
            finally:
                process.kill()


class FirstRefused(SessionDouble):
    """Refuses the sessions of one package alone."""

    def __init__(self, package: Path) -> None:
        super().__init__()
        self._package = package.stat().st_ino
        self.refusal = errors.RevokedError("it was revoked")

    def refuse(self, directory: int) -> None:
        if os.fstat(directory).st_ino == self._package:
            super().refuse(directory)


class Kept:
    """A server that is kept while the block lasts."""

    def __init__(self, package: Path, **entry: Any) -> None:
        self.double, self.audit, self.registry = SessionDouble(), Audit(), native(lambda: 1)
        server = McpServer("loud", package, **entry)
        self.kept = KeptServer(server, self.double, self.registry, self.audit, {})  # type: ignore[arg-type]

    async def until(self, state: str, count: int = 0) -> None:
        with anyio.fail_after(60):
            while (self.kept.state, self.double.count > count) != (state, True):  # noqa: ASYNC110
                await anyio.sleep(0.02)

    def names(self) -> list[str]:
        return [spec.name for spec in self.registry.specs() if spec.source is not None]

    async def say(self, text: str, name: str = "shout", caller: str = "alice") -> Any:
        return await self.registry.call(name, {"text": text}, caller=caller)

    @property
    def states(self) -> list[tuple[str, int, str]]:
        return [(row["state"], row["tools"], row["reason"]) for _, row in self.audit.rows]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    uris = [f"matrix://tool/mcp/loud/{name}@1.0" for name in NAMES if name != "hide"]
    server = {
        "alias": "loud", "transport": "stdio", "command": "python3", "args": ["server.py"], "version": "1.0",
        "package_digest": tools_kit.FILLER,
        "tools": [
            {"name": name, "description": name, "input_schema": SCHEMA, "side_effect_class": "read"} for name in NAMES
        ],
    }  # fmt: skip
    document = {
        "schema_version": 1, "agent": "matrix://agent/hello", "allowed_side_effects": ["read"], "servers": [server],
    }  # fmt: skip
    grants = f'[permissions.skills]\nallow = {uris!r}\nside_effects = ["read"]\n'.replace("'", '"')
    files = {"tools/loud/server.py": b""}
    return tools_kit.written(tmp_path / "hello", tools_kit.package(document, grants=grants, files=files))


@contextlib.asynccontextmanager
async def keeping(package: Path, **entry: Any) -> AsyncIterator[Kept]:
    one = Kept(package, **entry)
    async with anyio.create_task_group() as group:
        group.start_soon(one.kept.run)
        try:
            yield one
        finally:
            group.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_servers, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(tool_servers, "REFUSED_PAUSE", 0.01)


async def test_pins_bound_what_is_listed(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with keeping(package) as one:
        await one.until("ready")
        assert one.names() == ["shout"]
        assert caplog.text.count("were left out, 3: `") == 1, "one line, with the names"
        answer = await one.say("fail")
        assert (answer.is_error, answer.content[0]["text"]) == (True, "fail")
        # The list changes: a tool goes, another is as it is pinned now, and none is added.
        await one.say("change")
        with anyio.fail_after(60):
            while one.names() != ["sing"]:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        with pytest.raises(errors.NoToolError):
            await one.say("hi")
        assert (await one.say("hi", "sing")).content[0]["text"] == "hi"


@pytest.mark.parametrize("text", ["end", "babble", "long"])
async def test_session_that_ends_fails_calls_and_is_started_again(package: Path, text: str) -> None:
    async with keeping(package, tool_prefix="a") as one:
        await one.until("ready")
        with pytest.raises(errors.ToolError, match="ended"):
            await one.say(text, "mcp_a_shout")
        await one.until("ready", 1)
        assert one.names() == ["mcp_a_shout"]
        assert (await one.say("hi", "mcp_a_shout")).content[0]["text"] == "hi"
    assert [state for state, _, _ in one.states] == ["ready", "reconnecting", "ready"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("error", "refused the call: no"), ("empty", "content"), ("number", "con"), ("half", "no Unicode")],
)
async def test_reply_without_content_is_error_of_the_call(package: Path, text: str, said: str) -> None:
    async with keeping(package) as one:
        await one.until("ready")
        with pytest.raises(errors.ToolError, match=said):
            await one.say(text)
        assert (await one.say("hi")).content[0]["text"] == "hi"


async def test_large_calls_pass_up_to_the_bound(package: Path) -> None:
    async with keeping(package) as one:
        await one.until("ready")
        text = "x" * 4_000_000
        assert (await one.say(text)).content[0]["text"] == text
        with pytest.raises(errors.ToolError, match="at most 4194304 bytes"):
            await one.say("x" * 4_194_304)
        refused: list[str] = []
        async with anyio.create_task_group() as group:
            for number in range(tool_session.CALLS + 1):
                group.start_soon(_refused_or_waits, one, refused, f"caller-{number % 4}")
            with anyio.fail_after(60):
                while not refused:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            group.cancel_scope.cancel()
        assert "one caller has at most 16" in refused[0]
        assert (await one.say("hi")).content[0]["text"] == "hi"


async def test_call_that_no_gate_reads_is_refused(package: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(62):
        deep = {"a": deep}
    async with keeping(package) as one:
        await one.until("ready")
        for more, said in ((deep, "64 levels"), ([0] * 32_768, "32768 values")):
            with pytest.raises(errors.ToolError, match=said):
                await one.registry.call("shout", {"text": "hi", "more": more})
        assert (await one.registry.call("shout", {"text": "hi", "more": deep["a"]["a"]})).content[0]["text"] == "hi"


async def _refused_or_waits(one: Kept, refused: list[str], caller: str) -> None:
    try:
        await one.say("wait", caller=caller)
    except errors.BusyError as e:
        refused.append(e.message)


async def test_hanging_calls_of_one_caller_block_no_other(package: Path) -> None:
    async with keeping(package) as one:
        await one.until("ready")
        refused: list[str] = []
        async with anyio.create_task_group() as group:
            for number in range(3 * tool_session.CALLS):
                group.start_soon(_refused_or_waits, one, refused, f"caller-{number % 2}")
            with anyio.fail_after(60):
                while len(refused) < 3 * tool_session.CALLS - 2 * tool_servers.CALLS_OF_ONE:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            for caller in ("caller-2", "operator"):
                assert (await one.say("hi", caller=caller)).content[0]["text"] == "hi"
            group.cancel_scope.cancel()
        # What ended leaves its place.
        assert (await one.say("hi", caller="caller-0")).content[0]["text"] == "hi"


async def test_call_that_is_given_up_is_cancelled(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger=tool_session.__name__)
    async with keeping(package) as one:
        await one.until("ready")
        with anyio.move_on_after(0.2):
            await one.say("wait")
        with anyio.fail_after(60):
            while "cancelled" not in caplog.text:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        assert (await one.say("hi")).content[0]["text"] == "hi"


async def test_agent_that_reads_no_reply_ends_its_session(package: Path) -> None:
    # Each reply repeats the id. Without a bound the daemon would keep 10,000 of them.
    flood = """
import json, sys, time
sys.stdin.readline()
for number in range(40):
    print(json.dumps({"jsonrpc": "2.0", "id": str(number) + "x" * 1_000_000, "method": "ping"}), flush=True)
time.sleep(600)
"""
    one = Kept(package)
    one.double.program = flood
    async with anyio.create_task_group() as group:
        group.start_soon(one.kept.run)
        await one.until("reconnecting")
        group.cancel_scope.cancel()
    assert one.states == [("reconnecting", 0, errors.ToolServerError.code)]


async def test_storm_of_changes_lists_once_a_pause(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_session, "RELIST_SECONDS", 3600.0)
    async with keeping(package) as one:
        await one.until("ready")
        for _ in range(20):
            await one.say("storm")
        # The first change is listed at once. The others wait together.
        with anyio.fail_after(60):
            while (await one.say("lists")).content[0]["text"] == "1":  # noqa: ASYNC110
                await anyio.sleep(0.02)
        for _ in range(20):
            await one.say("storm")
        assert (await one.say("lists")).content[0]["text"] == "2"


async def test_refused_package_is_removed_and_comes_back(package: Path) -> None:
    async with keeping(package) as one:
        await one.until("ready")
        one.double.refusal = errors.ServiceError("the supervisor is away")
        with pytest.raises(errors.ToolError):
            await one.say("end")
        await one.until("reconnecting", 2)
        assert one.names() == ["shout"]
        with pytest.raises(errors.ToolError, match="does not run now"):
            await one.say("hi")
        one.double.refusal = errors.RevokedError("it was revoked")
        await one.until("refused", 3)
        assert one.names() == []
        one.double.refusal = None
        await one.until("ready")
        assert one.names() == ["shout"]
    code = errors.RevokedError.code
    changed = [one for one in one.states if one[0] != "reconnecting"]
    assert changed == [("ready", 1, ""), ("refused", 0, code), ("ready", 1, "")]


async def test_name_that_is_taken_stays(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with keeping(package) as one:
        other = Kept(package)
        other.kept = KeptServer(McpServer("second", package), other.double, one.registry, other.audit, {})  # type: ignore[arg-type]
        await one.until("ready")
        async with anyio.create_task_group() as group:
            group.start_soon(other.kept.run)
            await other.until("ready")
            group.cancel_scope.cancel()
        assert [spec.source for spec in one.registry.specs() if spec.name == "shout"] == ["loud"]
    assert "a second tool `shout` was ignored" in caplog.text


async def test_name_of_earlier_entry_is_never_a_later_ones(package: Path, tmp_path: Path) -> None:
    later = Path(shutil.copytree(package, tmp_path / "later"))
    audit, registry = Audit(), native(lambda: 1)
    double: Any = FirstRefused(package)
    entries = [McpServer("absent", tmp_path / "absent"), McpServer("first", package), McpServer("second", later)]

    async def until(row: tuple[str, str, int]) -> list[tuple[str, str | None]]:
        with anyio.fail_after(60):
            while row not in [(one["server"], one["state"], one["tools"]) for _, one in audit.rows]:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        return [(one.name, one.source) for one in registry.specs() if one.source is not None]

    async with anyio.create_task_group() as group:
        group.start_soon(tool_servers.keep, entries, double, registry, audit)
        # The first one is refused, and its name is not free for that.
        await until(("first", "refused", 0))
        assert await until(("second", "ready", 0)) == []
        double.refusal = None
        assert await until(("first", "ready", 1)) == [("shout", "first")]
        group.cancel_scope.cancel()


async def test_package_without_tools_is_refused(tmp_path: Path) -> None:
    registry = ToolRegistry()
    audit = Audit()
    kept = KeptServer(McpServer("none", tmp_path / "none"), SessionDouble(), registry, audit, {})  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(kept.run)
        with anyio.fail_after(60):
            while not audit.rows:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        await anyio.sleep(0.3)
        group.cancel_scope.cancel()
    # One row, however often it is tried.
    assert audit.rows == [
        ("tool_server_changed", {"server": "none", "state": "refused", "tools": 0, "reason": errors.PackageError.code})
    ]
