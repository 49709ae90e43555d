#!/usr/bin/env python3
"""A request to a host by TLS through the inject gate, beside the same host asked directly.

    .venv/bin/python benchmarks/inject_gate.py [requests]

    direct   client -> host, by TLS over the loopback
    gate     client -> a pair of sockets, by TLS -> the gate's process, sealed -> host, by TLS
    body     an answer of 64 MiB, both ways

One after the other and in turn, over connections that are kept; by http.client. No vault is read, and no row written.
As root. Medians.
"""

from __future__ import annotations

import http.client
import http.server
import select
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy.grants.credentials import InjectRule, InjectSet
from sandbox.network.inject import gate
from tests.kernel.tls_servers import Certificates

HOST, BODY = "api.example.com", 64 << 20
_PLAN = InjectSet.of([InjectRule(HOST, "s", "Authorization", "Bearer {}", "", "GET", "/*")]).canonical()
_PART = b"0123456789abcdef" * 4096


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *words: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Two bytes, or many."""
        size = BODY if self.path == "/body" else 2
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        for _ in range(size // len(_PART)):
            self.wfile.write(_PART)
        self.wfile.write(b"x" * (size % len(_PART)))


class _Client(http.client.HTTPSConnection):
    """A client on a connection that is made."""

    def __init__(self, made: socket.socket, trusts: ssl.SSLContext) -> None:
        super().__init__(HOST, 443, context=trusts)
        self.sock = trusts.wrap_socket(made, server_hostname=HOST)

    def get(self, path: str) -> float:
        begun = time.perf_counter()
        self.request("GET", path)
        found = self.getresponse()
        while found.read(1 << 20):
            pass
        return time.perf_counter() - begun


def main(count: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        real = Certificates(Path(folder), HOST)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.daemon_threads = True
        server.socket = real.server().wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = ("127.0.0.1", server.server_port)
        pems: list[bytes] = []
        terms = gate.InjectTerms(
            ask=lambda host, name, then: then(1, memoryview(b"planted-secret-0123")),
            still=lambda host, name, then: then(True),
            told=lambda row: None,
            bundles=[str(real.path)],
            seconds=3600,
            trust=pems.append,
        )
        hands, takes = gate.line()
        with gate.open(_PLAN, terms, takes.fileno(), denied=print) as opened:
            takes.close()
            opened.ready()
            threading.Thread(target=_serve, args=(opened,), daemon=True).start()
            trusts = ssl.create_default_context(cadata=pems[0].decode())
            near, far = socket.socketpair()
            made = socket.create_connection(place)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socket.send_fds(hands, [f"{HOST}:443".encode()], [far.fileno(), made.fileno()])
            far.close()
            made.close()
            plain = socket.create_connection(place)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            clients = {"direct": _Client(plain, real.client()), "gate": _Client(near, trusts)}
            times: dict[str, list[float]] = {name: [] for name in clients}
            for _ in range(count):
                for name, client in clients.items():
                    times[name].append(client.get("/small"))
            bodies = {name: [client.get("/body") for _ in range(3)] for name, client in clients.items()}
    medians = {name: statistics.median(found) * 1000 for name, found in times.items()}
    for name, value in medians.items():
        print(f"{name:8} {value:8.3f} ms")
    print(f"added    {medians['gate'] - medians['direct']:8.3f} ms")
    for name, found in bodies.items():
        print(f"body {name:8} {BODY / statistics.median(found) / 2**20:8.0f} MiB/s")


def _serve(opened: gate.InjectGate) -> None:
    poll = select.poll()
    for fd in opened.watches:
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if opened.watches[fd]() is not None:
                return


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
