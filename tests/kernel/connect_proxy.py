"""A proxy of HTTP's CONNECT on the loopback, which records what it is asked for (RFC 9110, sections 9.3.6 and 11.7)."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator


class ConnectProxy:
    """Carries connections for clients with the credentials. ``asked`` are the places, ``says`` replaces its answer.

    ``answers`` are answers by port, and ``names`` the addresses of names that it looks up. ``last`` is when the last
    byte of a client came.
    """

    def __init__(self, credentials: str) -> None:
        self._wanted = "Basic " + base64.b64encode(credentials.encode()).decode()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.asked: list[tuple[str, int]] = []
        self.says: bytes | None = None
        self.answers: dict[int, bytes] = {}
        self.names: dict[str, str] = {}
        self.last = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self.listener.accept()[0],), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            client.settimeout(30)
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1) or b"\r\n\r\n"
            first, *lines = head.decode("latin-1").split("\r\n")
            method, where, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if method != "CONNECT" or headers.get("proxy-authorization") != self._wanted:
                client.sendall(b"HTTP/1.1 407 No\r\nProxy-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n")
                return
            host, _, port = where.rpartition(":")
            self.asked.append((host.strip("[]"), int(port)))
            if (said := self.answers.get(int(port), self.says)) is not None:
                client.sendall(said)
                client.recv(1)
                return
            host = self.names.get(host, host).strip("[]")
            with socket.create_connection((host, int(port)), 10) as made:
                client.sendall(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 double\r\n\r\n")
                back = threading.Thread(target=_carry, args=(made, client))
                back.start()
                _carry(client, made, self._sent)
                back.join()

    def _sent(self) -> None:
        self.last = time.monotonic()


def _carry(source: socket.socket, to: socket.socket, moved: Callable[[], None] = lambda: None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            moved()
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def serving(credentials: str) -> Iterator[ConnectProxy]:
    """A proxy while the block lasts."""
    made = ConnectProxy(credentials)
    try:
        yield made
    finally:
        made.listener.close()
