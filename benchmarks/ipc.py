#!/usr/bin/env python3
"""The daemon's socket beside a bare echo over a Unix socket in asyncio, in the same run.

    echo        a protocol that sends back what it is given, and an asyncio.start_unix_server that does
    ping        one request and its answer: read, parsed, dispatched, counted, written; nothing of a store
    tools       the same for a request that goes through a handler of a store (`list_tools`)
    pipelined   requests on one connection without waiting for answers

Server and client are processes of their own; the rounds alternate and the medians are compared. Goals of the project:
a round trip of at most 8 times the echo's, and at least 5,000 requests a second pipelined.

.venv/bin/python benchmarks/ipc.py [rounds] [trips a round]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from covenant.wire import client, frames

PIPELINED = 20_000


class Echo(asyncio.Protocol):
    """The least that a server in asyncio does."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio.BaseProtocol."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio.Protocol."""
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.write(data)


async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The echo as asyncio's own documentation writes it."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def echo(path: str, kind: str) -> None:
    """Serve until killed."""
    if kind == "streams":
        server = await asyncio.start_unix_server(streams, path)
    else:
        server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    await server.serve_forever()


@contextlib.contextmanager
def process(arguments: list[str], path: Path, **environment: str) -> Iterator[None]:
    """A server of its own, from when its socket takes connections."""
    env = {**os.environ, **environment}
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, stderr=subprocess.DEVNULL) as popen:
        try:
            while True:
                with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
                    sock.connect(str(path))
                    break
                time.sleep(0.05)
            yield
        finally:
            popen.terminate()
            popen.wait(60)


def trips(sock: socket.socket, request: bytes, answer_bytes: int, count: int) -> float:
    """The median of a round trip, in seconds."""
    seen = []
    for _ in range(count):
        began = time.perf_counter()
        sock.sendall(request)
        left = answer_bytes
        while left:
            left -= len(sock.recv(left))
        seen.append(time.perf_counter() - began)
    return statistics.median(seen)


def rate(sock: socket.socket, request: bytes, answer_bytes: int, count: int) -> float:
    """Requests a second, none waiting for another's answer."""
    began = time.perf_counter()
    sender = threading.Thread(target=lambda: sock.sendall(request * count))
    sender.start()
    left = answer_bytes * count
    while left:
        left -= len(sock.recv(min(left, 1 << 20)))
    sender.join()
    return count / (time.perf_counter() - began)


def frame(kind: str) -> bytes:
    """A request."""
    return frames.encode(json.dumps({"kind": kind}).encode())


def main() -> None:
    """Measure, and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        socks = {}
        for kind in ("protocol", "streams"):
            path = Path(folder) / kind
            stack.enter_context(process([__file__, "echo", str(path), kind], path))
            socks[kind] = stack.enter_context(socket.socket(socket.AF_UNIX))
            socks[kind].connect(str(path))
        daemon = ["-c", "from covenant.start import entry; entry()", "--allow-root"]
        stack.enter_context(process(daemon, home / "sock", COVENANT_HOME=str(home), COVENANT_HTTP_PORT="off"))
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.connect(str(home / "sock"))
        one = client.Client(sock)
        one.ask("authenticate", token_b58=client.operator_token(home))
        sizes = {}
        for kind in ("ping", "list_tools"):
            sock.sendall(frame(kind))
            size = frames.length(sock.recv(4, socket.MSG_WAITALL))
            sock.recv(size, socket.MSG_WAITALL)
            sizes[kind] = size + 4
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for kind, echoing in socks.items():
                found.setdefault(kind, []).append(trips(echoing, frame("ping"), len(frame("ping")), count))
            for kind, size in sizes.items():
                found.setdefault(kind, []).append(trips(sock, frame(kind), size, count))
            for kind, size in sizes.items():
                found.setdefault(f"{kind} pipelined", []).append(rate(sock, frame(kind), size, PIPELINED))
        show({name: statistics.median(values) for name, values in found.items()})


def show(found: dict[str, float]) -> None:
    """Print the medians and their ratios."""
    for name in ("protocol", "streams"):
        print(f"echo, {name:8}   {found[name] * 1e6:7.1f} µs")
    for name in ("ping", "list_tools"):
        ratios = ", ".join(f"{found[name] / found[echo]:.2f} x {echo}" for echo in ("protocol", "streams"))
        print(f"{name:14}   {found[name] * 1e6:7.1f} µs   {ratios}")
    for name in ("ping", "list_tools"):
        print(f"{name} pipelined   {found[f'{name} pipelined']:9.0f} a second")


if __name__ == "__main__":
    if sys.argv[1:2] == ["echo"]:
        asyncio.run(echo(sys.argv[2], sys.argv[3]))
    else:
        main()
