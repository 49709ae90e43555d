#!/usr/bin/env python3
"""The daemon's HTTP gateway beside a bare aiohttp server that answers the same bytes, in the same run.

    bare        one handler of aiohttp.web, without middlewares, that returns a constant
    tools       `GET /tools` of the daemon: guard, token, route, request, dispatch, count, headers
    refused     a request that the guard refuses by its Host, on a connection of its own each, for both

Server and client are processes of their own; the rounds alternate and the medians are compared.

.venv/bin/python benchmarks/http_gateway.py [rounds] [trips a round]
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from covenant.wire import client


def bare(port: int, body: bytes) -> None:
    """Serve until killed."""
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/tools", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None, access_log=None)


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def process(arguments: list[str], port: int, **environment: str) -> Iterator[None]:
    """Run a server in its own process; enter when it accepts connections."""
    env = {**os.environ, **environment}
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, stderr=subprocess.DEVNULL) as popen:
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield
        finally:
            popen.terminate()
            popen.wait(60)


def ask(port: int, token: str, host: str | None = None) -> bytes:
    """A request's bytes."""
    head = f"GET /tools HTTP/1.1\r\nHost: {host or f'127.0.0.1:{port}'}\r\nAuthorization: Bearer {token}\r\n\r\n"
    return head.encode()


def answer(sock: socket.socket) -> bytes:
    """One whole response."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: ([0-9]+)", head)
    assert length, head
    while len(body) < int(length[1]):
        body += sock.recv(65536)
    return body


def trips(sock: socket.socket, request: bytes, count: int) -> float:
    """The median of a round trip, in seconds."""
    seen = []
    for _ in range(count):
        began = time.perf_counter()
        sock.sendall(request)
        answer(sock)
        seen.append(time.perf_counter() - began)
    return statistics.median(seen)


def connections(port: int, request: bytes, count: int) -> float:
    """The median of a connection with one request, in seconds."""
    seen = []
    for _ in range(count):
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(request)
            answer(sock)
        seen.append(time.perf_counter() - began)
    return statistics.median(seen)


def main() -> None:
    """Measure, and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    daemon_port, bare_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        daemon = ["-c", "from covenant.start import entry; entry()", "--allow-root"]
        where = {"COVENANT_HOME": str(home), "COVENANT_HTTP_PORT": str(daemon_port)}
        stack.enter_context(process(daemon, daemon_port, **where))
        token = client.operator_token(home)
        one = stack.enter_context(socket.create_connection(("127.0.0.1", daemon_port)))
        one.sendall(ask(daemon_port, token))
        body = answer(one)
        stack.enter_context(process([__file__, "bare", str(bare_port), body.decode()], bare_port))
        other = stack.enter_context(socket.create_connection(("127.0.0.1", bare_port)))
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            found.setdefault("bare", []).append(trips(other, ask(bare_port, token), count))
            found.setdefault("tools", []).append(trips(one, ask(daemon_port, token), count))
            found.setdefault("bare, connected", []).append(connections(bare_port, ask(bare_port, token), count // 4))
            refused = ask(daemon_port, token, host="evil.example")
            found.setdefault("refused, connected", []).append(connections(daemon_port, refused, count // 4))
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, value in medians.items():
        print(f"{name:20} {value * 1e6:8.0f} us")
    print(f"tools / bare          {medians['tools'] / medians['bare']:.2f}")
    print(f"refused / bare        {medians['refused, connected'] / medians['bare, connected']:.2f}")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        bare(int(sys.argv[2]), sys.argv[3].encode())
    else:
        main()
