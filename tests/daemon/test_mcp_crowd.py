"""A crowd of MCP clients at `/mcp`: some end in the middle of a request, some never read their stream of events. Other
callers are answered meanwhile, and memory does not grow with the number of rounds.

COVENANT_CROWD_ROUNDS sets the number of rounds after the first ones, which fill caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from tests import daemon_kit
from tests.daemon.test_mcp import call, post, token_of
from tests.daemon_kit import Daemon

pytestmark = pytest.mark.anyio

ROUNDS = int(os.environ.get("COVENANT_CROWD_ROUNDS", "2"))
WARM_ROUNDS = 2
DEAD, SLOW, WHOLE = 100, 40, 60
# What stays of 400 sessions would be much more: one connection alone has buffers of this size.
MOST_GROWTH = 8 * 1024 * 1024
SECONDS = 120


class Crowd:
    """The clients of one round, each with the token of one of three peers."""

    def __init__(self, daemon: Daemon, tokens: list[str]) -> None:
        self._daemon, self._tokens = daemon, tokens
        self.statuses: list[int] = []

    async def _open(self, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._daemon.http_port)
        token = self._tokens[number % len(self._tokens)]
        return reader, writer, f"Host: 127.0.0.1:{self._daemon.http_port}\r\nAuthorization: Bearer {token}\r\n"

    async def dead(self, number: int) -> None:
        """Send a part of a request, or a request without a reader of its answer, and end by a reset."""
        _, writer, headers = await self._open(number)
        body = json.dumps(call("tools_call", name="clock", arguments={})).encode()
        kind = "Content-Type: application/json\r\n"
        whole = f"POST /mcp HTTP/1.1\r\n{headers}{kind}Content-Length: {len(body)}\r\n\r\n".encode() + body
        with contextlib.suppress(ConnectionError):
            writer.write(whole[: len(whole) * (number % 5) // 4] or b"POST")
            await writer.drain()
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def slow(self, number: int, done: asyncio.Event) -> None:
        """Follow the log and read nothing of it until the round is over."""
        reader, writer, headers = await self._open(number)
        writer.write(f"GET /audit/recent?extended=true HTTP/1.1\r\n{headers}Accept: text/event-stream\r\n\r\n".encode())
        self.statuses.append(int((await reader.readuntil(b"\r\n")).split()[1]))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await done.wait()
        writer.transport.abort()

    async def whole(self, number: int) -> None:
        """Hold one session: initialize, list, call."""
        token = self._tokens[number % len(self._tokens)]
        for method, params in (("initialize", {"protocolVersion": "2025-06-18"}), ("tools/list", {})):
            message: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            assert (await post(self._daemon, message, token))[0] == 200
        status, found = await post(self._daemon, call("tools_call", name="clock", arguments={}), token)
        assert (status, found and found["result"]["isError"]) == (200, False)


async def crowd(daemon: Daemon, tokens: list[str]) -> None:
    one, done = Crowd(daemon, tokens), asyncio.Event()
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        for number in range(SLOW):
            group.create_task(one.slow(number, done))
        async with asyncio.TaskGroup() as others:
            for number in range(DEAD):
                others.create_task(one.dead(number))
            for number in range(WHOLE):
                others.create_task(one.whole(number))
            # The operator is answered in the middle of it.
            for _ in range(5):
                assert (await post(daemon, call("agents_list"), token_of(daemon)))[0] == 200
        done.set()
    assert one.statuses == [200] * SLOW
    async with asyncio.timeout(SECONDS):
        while daemon.server.feed.subscribers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_crowd_of_mcp_clients_leaves_nothing(covenant_home: Path) -> None:
    async with daemon_kit.running(covenant_home, http_port=0) as daemon:
        actions = ["tool.call.clock", "audit.read"]
        tokens = []
        for number in range(3):
            made = await daemon.ask("enroll_peer", display=f"peer{number}@local", actions=actions)
            tokens.append(made["token_b58"])
        sizes = []
        for _ in range(WARM_ROUNDS + ROUNDS):
            await crowd(daemon, tokens)
            await settled()
            gc.collect()
            sizes.append((resident(), *open_now()))
        first, last = sizes[WARM_ROUNDS - 1], sizes[-1]
        assert last[0] - first[0] < MOST_GROWTH, sizes
        assert last[1:] <= (first[1] + 2, first[2] + 2), sizes


def open_now() -> tuple[int, int]:
    """Return the numbers of tasks and of descriptors."""
    return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))


async def settled() -> None:
    """Wait until both stay as they are: the daemon hears of the ends of connections in its own time."""
    same, last = 0, (0, 0)
    async with asyncio.timeout(SECONDS):
        while same < 20:
            await asyncio.sleep(0.05)
            now = open_now()
            same, last = (same + 1 if now == last else 0), now


def resident() -> int:
    """Return the resident memory of this process, which is that of daemon and clients."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
