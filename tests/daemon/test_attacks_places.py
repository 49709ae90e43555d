"""Clients that hold places to keep others out: strangers at the port, peers at the socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import select
import socket
from pathlib import Path

import anyio
import pytest

from covenant.adapters.ipc import limits
from covenant.handlers.intents import submit
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult
from covenant.wire import frames, requests
from policy import base58, errors
from tests import daemon_kit, http_kit, intents_kit, runtime_kit, server_kit
from tests.daemon_kit import Daemon
from tests.doubles import async_client
from tests.intents_kit import ALICE, rows

pytestmark = pytest.mark.anyio


async def test_strangers_at_port_hold_no_place_against_who_has_token(tmp_path: Path) -> None:
    server = server_kit.make(
        home=tmp_path, identity=http_kit.Identity(), peers=http_kit.Peers(), handlers=http_kit.Echo()
    )
    async with http_kit.serving(server, connections=4) as gateway, contextlib.AsyncExitStack() as stack:
        mine = await stack.enter_async_context(http_kit.client(gateway))
        async with mine.get("/tools") as first:
            assert first.status == 200
        strangers = []
        for _ in range(12):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            stack.callback(writer.close)
            writer.write(b"GET /tools HTTP/1.1\r\n")
            strangers.append(reader)
        # The first strangers are disconnected. A client with a token gets in, and its open connection is untouched.
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await strangers[0].read() == b""
        async with mine.get("/tools") as again:
            assert again.status == 200
        other = await stack.enter_async_context(http_kit.client(gateway))
        async with other.get("/tools") as second:
            assert second.status == 200


async def test_known_connections_are_not_ended_for_others(tmp_path: Path) -> None:
    server = server_kit.make(
        home=tmp_path, identity=http_kit.Identity(), peers=http_kit.Peers(), handlers=http_kit.Echo()
    )
    async with http_kit.serving(server, connections=2) as gateway, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(http_kit.client(gateway)) for _ in range(2)]
        for _ in range(3):
            for one in clients:
                async with one.get("/tools") as answer:
                    assert answer.status == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            async with asyncio.timeout(60):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()


async def test_peers_at_port_keep_neither_others_nor_operator_out(tmp_path: Path) -> None:
    peers = http_kit.Peers()
    third = base58.encode(bytes([3] * 32))
    peers.tokens[third] = runtime_kit.ALICE
    server = server_kit.make(home=tmp_path, identity=http_kit.Identity(), peers=peers, handlers=http_kit.Echo())
    async with http_kit.serving(server, connections=8) as gateway, contextlib.AsyncExitStack() as stack:

        async def statuses(token: str, count: int) -> list[int]:
            found = []
            for _ in range(count):
                reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                stack.callback(writer.close)
                writer.write(http_kit.head(gateway, "GET /tools HTTP/1.1", token=token))
                async with asyncio.timeout(60):
                    found += http_kit.statuses(await reader.readuntil(b"\r\n"))
            return found

        assert await statuses(http_kit.OTHER_TOKEN, 6) == [200] * 4 + [429] * 2
        assert await statuses(third, 3) == [200] * 2 + [429]
        assert await statuses(http_kit.TOKEN, 2) == [200] * 2
        # A connection that ends leaves its place.
        await stack.aclose()
        found: list[int] = []
        async with asyncio.timeout(60):
            while found != [200]:
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    found = await statuses(third, 1)


async def test_revoked_peer_keeps_no_place_at_port(tmp_path: Path) -> None:
    """Paths that need no token keep its connections open."""
    peers = http_kit.Peers()
    server = server_kit.make(home=tmp_path, identity=http_kit.Identity(), peers=peers, handlers=http_kit.Echo())
    async with http_kit.serving(server, connections=4) as gateway, contextlib.AsyncExitStack() as stack:
        clients = []
        for token in (http_kit.OTHER_TOKEN, http_kit.OTHER_TOKEN, http_kit.TOKEN, http_kit.TOKEN):
            clients.append(await stack.enter_async_context(http_kit.client(gateway, token=token)))
            async with clients[-1].get("/tools") as answer:
                assert answer.status == 200
        del peers.tokens[http_kit.OTHER_TOKEN]
        for one in clients[:2]:
            async with one.get("/health") as answer:
                assert answer.status == 200
        other = await stack.enter_async_context(http_kit.client(gateway))
        async with asyncio.timeout(60), other.get("/tools") as answer:
            assert answer.status == 200


async def test_slow_large_bodies_of_peer_leave_places_for_others(tmp_path: Path) -> None:
    server = server_kit.make(
        home=tmp_path, identity=http_kit.Identity(), peers=http_kit.Peers(), handlers=http_kit.Echo()
    )
    body = json.dumps({"text": "x" * 1000}).encode()
    length = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
    async with (
        http_kit.serving(server, large_bytes=100, large_bodies=2, body_seconds=600.0) as gateway,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            stack.callback(writer.close)
            writer.write(
                http_kit.head(gateway, "POST /intent HTTP/1.1", *length, token=http_kit.OTHER_TOKEN) + body[:9]
            )
        async with asyncio.timeout(60):
            while gateway.busy < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        whole = http_kit.head(gateway, "POST /intent HTTP/1.1", *length) + body
        assert http_kit.statuses(await http_kit.raw(gateway, whole, seconds=30)) == [200]


async def _enrolled(daemon: Daemon, display: str) -> str:
    token: str = (await daemon.ask("enroll_peer", display=display))["token_b58"]
    return token


async def test_peers_together_do_not_keep_operator_out(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon, contextlib.AsyncExitStack() as stack:
        gateway = daemon.running.socket
        gateway.bounds = dataclasses.replace(gateway.bounds, connections=8, of_one_peer=4, of_others=5, strangers=2)
        tokens = [await _enrolled(daemon, f"peer{number}@local") for number in range(3)]
        let_in = 0
        for token in tokens * 4:
            with contextlib.suppress(errors.CovenantError):
                await stack.enter_async_context(async_client.connected(covenant_home, token=token))
                let_in += 1
        assert let_in == 5
        async with async_client.connected(covenant_home) as operator:
            assert (await operator.ask("ping"))["kind"] == "pong"
        # A released place can be taken again.
        await stack.aclose()
        async with asyncio.timeout(60), async_client.connected(covenant_home, token=tokens[2]) as peer:
            assert (await peer.ask("ping"))["kind"] == "pong"


async def test_revoked_peer_keeps_no_place_at_socket(covenant_home: Path) -> None:
    """Its connections send nothing, so no request of theirs is refused."""
    async with daemon_kit.running(covenant_home) as daemon, contextlib.AsyncExitStack() as stack:
        gateway = daemon.running.socket
        gateway.bounds = dataclasses.replace(gateway.bounds, of_others=3)
        tokens = [await _enrolled(daemon, f"peer{number}@local") for number in range(2)]
        for token in (tokens[0], tokens[0], tokens[1]):
            await stack.enter_async_context(async_client.connected(covenant_home, token=token))
        with pytest.raises(errors.BusyError):
            await stack.enter_async_context(async_client.connected(covenant_home, token=tokens[1]))
        revoked = await daemon.ask("revoke_peer", token_prefix=tokens[0][:6])
        assert revoked["outcome"]["type"] == "revoked"
        mine = [await stack.enter_async_context(async_client.connected(covenant_home, token=tokens[1])) for _ in "ab"]
        for one in mine:
            assert (await one.ask("ping"))["kind"] == "pong"
        assert gateway.others == 3


async def test_revoked_token_keeps_no_place_of_its_peer(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home) as daemon, contextlib.AsyncExitStack() as stack:
        gateway = daemon.running.socket
        gateway.bounds = dataclasses.replace(gateway.bounds, of_one_peer=2)
        who = {"display": runtime_kit.ALICE.display, "pubkey": runtime_kit.ALICE.pubkey}
        token = (await daemon.ask("enroll_peer", **who))["token_b58"]
        for _ in range(2):
            await stack.enter_async_context(async_client.connected(covenant_home, token=token))
        await daemon.ask("revoke_peer", token_prefix=token[:6])
        token = (await daemon.ask("enroll_peer", **who))["token_b58"]
        mine = await stack.enter_async_context(async_client.connected(covenant_home, token=token))
        assert (await mine.ask("ping"))["kind"] == "pong"


@pytest.mark.parametrize("place", ["displaced", "one too many"])
async def test_client_without_place_reads_why(covenant_home: Path, place: str) -> None:
    """Its request fails with EPIPE; the answer is there all the same."""
    async with daemon_kit.running(covenant_home) as daemon:
        gateway = daemon.running.socket
        most = {"strangers": 1} if place == "displaced" else {"connections": len(gateway.connections) + 1}
        gateway.bounds = dataclasses.replace(gateway.bounds, **most)
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
            for one in (first, second):
                await anyio.to_thread.run_sync(one.connect, str(covenant_home / "sock"))
            refused = first if place == "displaced" else second
            ends = select.poll()
            ends.register(refused, 0)
            assert await anyio.to_thread.run_sync(ends.poll, 60_000) == [(refused.fileno(), select.POLLHUP)]
            refused.settimeout(10)
            with pytest.raises(BrokenPipeError):
                refused.sendall(frames.encode(b'{"kind":"protocol_info"}'))
            size = frames.length(refused.recv(frames.HEADER_BYTES))
            answer = json.loads(refused.recv(size))
        assert (answer["kind"], answer["code"]) == ("error", errors.BusyError.code)
        gateway.bounds = limits.IpcBounds()
        async with async_client.connected(covenant_home) as operator:
            assert (await operator.ask("ping"))["kind"] == "pong"


async def test_sources_ignored_are_not_kept(tmp_path: Path) -> None:
    async def named(card: Card, asked: Intent) -> RunResult:
        return RunResult(text="done", sources=("notes.md", "/home/u/secrets.toml"))

    runtime_kit.package(tmp_path, "a")
    server = intents_kit.make(tmp_path, acts=runtime_kit.Acts(named))
    await server.agents.reload()
    await intents_kit.granted(server, ALICE, "memory.write")
    result = await submit.submit_intent(server, ALICE, requests.SubmitIntent(text="x", agent="a"))
    assert result.sources == ("notes.md", "/home/u/secrets.toml")
    assert await server.memory.recent(None, 10) == []
    (row,) = await rows(server, "memory_write_ignored")
    assert row["matched_pattern"] == intents_kit.SECRET
