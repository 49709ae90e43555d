"""The daemon as the MCP server of a run: lines of a gate on a pair of sockets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from covenant.adapters.ipc import run_tools
from covenant.adapters.ipc.run_tools import RunTools
from covenant.providers.tools import Answer
from covenant.settings import PeerRate
from covenant.wire.types import ToolSpec
from policy import errors
from policy.rules import tool_calls
from tests import daemon_kit, runtime_kit
from tests.daemon_kit import Daemon
from tests.doubles import async_client

pytestmark = pytest.mark.anyio


class Gate:
    """The end of a tool gate."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._rest = sock, b""

    async def send(self, raw: bytes) -> None:
        view = memoryview(raw)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(self.sock)

    async def line(self) -> Any:
        """Return the next line; None at the end."""
        with anyio.fail_after(60):
            while b"\n" not in self._rest:
                await anyio.wait_readable(self.sock)
                if not (data := self.sock.recv(1 << 20)):
                    return None
                self._rest += data
        one, _, self._rest = self._rest.partition(b"\n")
        return json.loads(one)

    async def call(self, name: str, number: int = 1, /, **arguments: Any) -> Any:
        params = {"name": name, "arguments": arguments}
        message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
        await self.send(json.dumps(message).encode() + b"\n")
        return (await self.line())["result"]


@contextlib.asynccontextmanager
async def served(daemon: Daemon, caller: Any) -> AsyncIterator[Gate]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)

        async def serve() -> None:
            with ours:
                await RunTools(daemon.server).serve(ours, caller, intent_id="i", agent_id="keeper")

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            yield Gate(theirs)
            theirs.close()


async def rows(daemon: Daemon) -> list[dict[str, Any]]:
    events = (await daemon.ask("recent_audit", limit=100))["events"]
    return [one["kind"] for one in reversed(events) if one["kind"]["type"] == "run_tool_asked"]


async def test_call_is_request_of_caller_and_its_row_comes_first(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        operator = daemon.server.identity.agent
        tools = RunTools(daemon.server)
        assert "memory_search" not in tools.allowed(operator)
        assert {"audit_recent", "tools_call"} <= set(tools.allowed(operator))
        asked: dict[str, Any] = {"query": "harbour", "limit": 2}
        async with served(daemon, operator) as gate:
            refused = await gate.call("memory_search", **asked)
            assert refused["isError"]
            assert "memory.read" in refused["content"][0]["text"]
            await daemon.grant("memory.read", "memory.write")
            assert {"memory_search", "memory_put"} <= set(tools.allowed(operator))
            put = await gate.call("memory_put", text="the harbour is blue", tier="working", metadata={})
            assert not put["isError"], put
            found = await gate.call("memory_search", **asked)
            assert "the harbour is blue" in found["content"][0]["text"]
        first, _, last = await rows(daemon)
        assert (first["intent_id"], first["agent_id"], first["tool"]) == ("i", "keeper", "memory_search")
        # The digest of the tool gate's own row.
        digest = hashlib.sha256(tool_calls.encoded(asked)).hexdigest()
        assert first["arguments_hash_hex"] == last["arguments_hash_hex"] == digest


async def test_scoped_grant_of_one_tier_is_listed(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.read", scope={"version": 1, "tiers": ["working"]})
        assert "memory_search" in RunTools(daemon.server).allowed(daemon.server.identity.agent)
        assert "memory_search" not in RunTools(daemon.server).allowed(runtime_kit.ALICE)


async def test_other_peer_has_own_capabilities(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.read")
        async with served(daemon, runtime_kit.ALICE) as gate:
            assert (await gate.call("memory_search", query="a", limit=1))["isError"]


async def test_intent_is_no_tool_of_run(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.write")
        async with served(daemon, daemon.server.identity.agent) as gate:
            refused = await gate.call("intent_submit", text="x")
        assert refused["isError"]
        assert "no tool of a run" in refused["content"][0]["text"]
        assert await rows(daemon) == []


async def test_wrong_line_is_answered_and_longest_ends_line(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        async with served(daemon, daemon.server.identity.agent) as gate:
            for raw in (b"{", b"[]", b"\xff", b'{"jsonrpc": "2.0"}'):
                await gate.send(raw + b"\n")
                assert (await gate.line())["error"]["code"] == -32600
            await gate.send(b'{"jsonrpc": "2.0", "method": "notifications/cancelled"}\n')
            assert not (await gate.call("agents_list"))["isError"]
            with contextlib.suppress(OSError):
                await gate.send(b"x" * (run_tools.LINE_BYTES + 2))
            assert await gate.line() is None
        assert await daemon.ask("recent_audit", limit=1)


async def test_many_calls_are_each_answered(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon, served(daemon, daemon.server.identity.agent) as gate:
        count = 5 * run_tools.AT_ONCE
        call = {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "agents_list"}}
        await gate.send(b"".join(json.dumps({**call, "id": n}).encode() + b"\n" for n in range(count)))
        assert {(await gate.line())["id"] for _ in range(count)} == set(range(count))


async def test_peer_whose_token_was_revoked_is_refused(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        alice = runtime_kit.ALICE
        made = await daemon.ask("enroll_peer", display=alice.display, pubkey=alice.pubkey, actions=["memory.read"])
        async with served(daemon, alice) as gate:
            assert not (await gate.call("memory_recent", limit=1))["isError"]
            await daemon.ask("revoke_peer", token_prefix=made["token_b58"][:6])
            for name, given in (("memory_recent", {"limit": 1}), ("agents_list", {})):
                refused = await gate.call(name, **given)
                assert refused["isError"]
                assert "the token was revoked" in refused["content"][0]["text"]
        # A line that is opened later is of the same peer.
        async with served(daemon, alice) as gate:
            assert (await gate.call("agents_list"))["isError"]


class Held:
    """A tool whose calls last until the test releases them. ``ended`` counts the calls that were given up."""

    spec = ToolSpec(name="held", description="held", input_schema={"type": "object"})

    def __init__(self) -> None:
        self.begun, self.release, self.given_up = anyio.Event(), anyio.Event(), anyio.Event()

    async def call(self, arguments: Mapping[str, Any]) -> Answer:
        self.begun.set()
        try:
            await self.release.wait()
        except BaseException:
            self.given_up.set()
            raise
        return Answer(({"type": "text", "text": "a secret"},))


async def completed(daemon: Daemon, caller: Any) -> list[str]:
    """Wait for a row of a call of a tool, and return the outcomes."""
    found: list[str] = []
    with anyio.fail_after(60):
        while not found:
            events = await daemon.server.audit.recent(100, issuer_pubkey=caller.pubkey)
            found = [one.kind["outcome"] for one in events if one.kind["type"] == "tool_call_completed"]
            await anyio.sleep(0.02)
    return found


async def test_run_that_ends_during_call_ends_the_call(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        held, operator = Held(), daemon.server.identity.agent
        daemon.server.tools.add(held)
        await daemon.grant("tool.call.held")
        call = {"name": "tools_call", "arguments": {"name": "held", "arguments": {}}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        async with served(daemon, operator) as gate:
            await gate.send(json.dumps(message).encode() + b"\n")
            with anyio.fail_after(60):
                await held.begun.wait()
        assert held.given_up.is_set()
        assert await completed(daemon, operator) == ["failed"]
        assert [one["tool"] for one in await rows(daemon)] == ["tools_call"]
        held.release.set()
        assert await completed(daemon, operator) == ["failed"]


@pytest.mark.parametrize("ends", ["token", "capability"])
async def test_answer_after_revocation_is_withheld(covenant_home: Path, ends: str) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        held, alice = Held(), runtime_kit.ALICE
        daemon.server.tools.add(held)
        actions = ["tool.call.held"]
        made = await daemon.ask("enroll_peer", display=alice.display, pubkey=alice.pubkey, actions=actions)
        async with served(daemon, alice) as gate, anyio.create_task_group() as group:

            async def end() -> None:
                await held.begun.wait()
                if ends == "token":
                    await daemon.ask("revoke_peer", token_prefix=made["token_b58"][:6])
                else:
                    (mine,) = daemon.server.capabilities.candidates(
                        alice.pubkey, "tool.call.held", daemon.server.now_ms()
                    )
                    await daemon.ask("revoke_capability", signature_b58=mine.signature)
                held.release.set()

            group.start_soon(end)
            found = await gate.call("tools_call", name="held", arguments={})
            assert found["isError"]
            assert "a secret" not in json.dumps(found)
        assert await completed(daemon, alice) == (["withheld"] if ends == "capability" else ["ok"])


@pytest.mark.parametrize("transport", ["ipc", "http"])
async def test_answer_to_peer_after_revocation_is_withheld(covenant_home: Path, transport: str) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon, contextlib.AsyncExitStack() as stack:
        held = Held()
        daemon.server.tools.add(held)
        token = (await daemon.ask("enroll_peer", display="bob@local", actions=["tool.call.held"]))["token_b58"]
        found: list[str] = []

        async def by_ipc() -> None:
            one = await stack.enter_async_context(async_client.connected(covenant_home, token=token))
            with pytest.raises(errors.AuthenticationError):
                found.append(str(await one.ask("call_tool", name="held", arguments={})))
            found.append("refused")

        async def by_http() -> None:
            base, headers = f"http://127.0.0.1:{daemon.running.http_port}", {"Authorization": f"Bearer {token}"}
            one = await stack.enter_async_context(aiohttp.ClientSession(base, headers=headers))
            async with one.post("/tools/call", json={"name": "held", "arguments": {}}) as answer:
                found.append(await answer.text())

        async with anyio.create_task_group() as group:
            group.start_soon(by_ipc if transport == "ipc" else by_http)
            with anyio.fail_after(60):
                await held.begun.wait()
            await daemon.ask("revoke_peer", token_prefix=token[:6])
            held.release.set()
        assert found
        assert "a secret" not in found[0]


async def test_answer_that_no_gate_reads_is_refused(covenant_home: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(61):
        deep = {"a": deep}
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.read", "memory.write")
        for metadata in (*2 * [{"many": [0] * 20_000}], {}):
            await daemon.ask("put_memory", text="x", tier="working", metadata=metadata)
        async with served(daemon, daemon.server.identity.agent) as gate:
            for limit, said in ((1, '"kind"'), (2, '"kind"'), (3, "more than 32768 values"), (1, '"kind"')):
                found = await gate.call("memory_recent", limit=limit)
                assert said in found["content"][0]["text"], limit
            await daemon.ask("put_memory", text="x", tier="working", metadata=deep)
            found = await gate.call("memory_recent", limit=1)
            assert (found["isError"], "64 levels" in found["content"][0]["text"]) == (True, True)
            assert not (await gate.call("agents_list"))["isError"]


async def test_gate_that_leaves_answers_unread_is_no_fault(
    covenant_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
            async with anyio.create_task_group() as group:

                async def serve() -> None:
                    operator = daemon.server.identity.agent
                    await RunTools(daemon.server).serve(ours, operator, intent_id="i", agent_id="keeper")

                group.start_soon(serve)
                await anyio.wait_readable(theirs)
                theirs.close()
        assert "fault of the daemon" not in caplog.text


async def test_run_of_operator_is_held_to_rate_of_rows(covenant_home: Path) -> None:
    rate = PeerRate(requests_per_second=0, burst=3)
    async with daemon_kit.running(covenant_home, peer_rate=rate) as daemon:
        async with served(daemon, daemon.server.identity.agent) as gate:
            found = [await gate.call("agents_list") for _ in range(5)]
        assert [one["isError"] for one in found] == [False] * 3 + [True] * 2
        assert "COVENANT_PEER_REQUESTS_PER_SECOND" in found[-1]["content"][0]["text"]
        assert len(await rows(daemon)) == 3


async def test_large_answer_passes_up_to_a_line(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon:
        await daemon.grant("memory.read", "memory.write")
        for _ in range(5):
            await daemon.ask("put_memory", text="x" * 1_000_000, tier="working", metadata={})
        async with served(daemon, daemon.server.identity.agent) as gate:
            for limit, is_error in ((2, False), (3, True), (5, True), (1, False)):
                found = await gate.call("memory_recent", limit=limit)
                assert found["isError"] is is_error, limit
