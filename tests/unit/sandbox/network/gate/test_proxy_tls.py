"""The relay of connections by a proxy over TLS: they carry both ways, and end as the other side ends."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from sandbox.network.gate.proxy_tls import ProxyRelay
from tests.kernel.tls_servers import Certificates

MUCH = bytes(range(256)) * 20_000


def received(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (piece := line.recv(65536)):
        found += piece
    return found


def relayed(folder: Path, says: Callable[[ssl.SSLSocket], None]) -> tuple[socket.socket, threading.Thread]:
    """The end in clear of a connection to a server that says this, and the server's thread."""
    certificates = Certificates(folder, "localhost")
    near, far = socket.socketpair()

    def serve() -> None:
        far.settimeout(60)
        with certificates.server().wrap_socket(far, server_side=True) as tls:
            says(tls)

    thread = threading.Thread(target=serve)
    thread.start()
    near.settimeout(60)
    made = ProxyRelay().plain(certificates.client().wrap_socket(near, server_hostname="localhost"))
    made.settimeout(60)
    return made, thread


def test_connection_carries_both_ways_to_its_end(tmp_path: Path) -> None:
    heard: list[bytes] = []

    def says(tls: ssl.SSLSocket) -> None:
        heard.append(received(tls, len(MUCH)))
        tls.sendall(MUCH)
        heard.append(tls.recv(10))  # the end: the other side is closed

    made, thread = relayed(tmp_path, says)
    with made:
        made.sendall(MUCH)
        assert received(made, len(MUCH)) == MUCH
    thread.join(60)
    assert heard == [MUCH, b""]


def test_server_that_ends_is_an_end_of_file(tmp_path: Path) -> None:
    made, thread = relayed(tmp_path, lambda tls: tls.sendall(b"last words"))
    with made:
        assert received(made, 1000) == b"last words"
    thread.join(60)


def test_bytes_left_by_a_closed_side_arrive(tmp_path: Path) -> None:
    heard: list[bytes] = []
    goes_on = threading.Event()

    def says(tls: ssl.SSLSocket) -> None:
        goes_on.wait(60)
        heard.append(received(tls, len(MUCH) + 1))

    made, thread = relayed(tmp_path, says)
    with made:
        made.setblocking(False)
        sent = made.send(MUCH)  # what fits into the buffers
    goes_on.set()
    thread.join(60)
    assert heard == [MUCH[:sent]]
