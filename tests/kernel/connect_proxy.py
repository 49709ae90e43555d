"""A proxy of HTTP's CONNECT on the loopback, which records what it is asked for (RFC 9110, sections 9.3.6 and 11.7).

With a context it speaks TLS with its clients.
"""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator


class ConnectProxy:
    """Carries connections for clients with the credentials. ``asked`` are the places, ``says`` replaces its answer.

    ``answers`` are answers by port, and ``names`` the addresses of names that it looks up. ``last`` is when the last
    byte of a client came.
    """

    def __init__(self, credentials: str, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self.accept(credentials)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.asked: list[tuple[str, int]] = []
        self.says: bytes | None = None
        self.answers: dict[int, bytes] = {}
        self.names: dict[str, str] = {}
        self.last = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def accept(self, credentials: str) -> None:
        """Take clients with these credentials alone."""
        self._wanted = "Basic " + base64.b64encode(credentials.encode()).decode()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self.listener.accept()[0],), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            client.settimeout(30)
            if self._context is not None:
                client = _in_clear(self._context.wrap_socket(client, server_side=True))
            with client:
                self._speak(client)

    def _speak(self, client: socket.socket) -> None:
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


def _in_clear(tls: ssl.SSLSocket) -> socket.socket:
    """One end of a pair with the bytes of a connection. One thread carries them: TLS is not written beside a read."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=_turns, args=(tls, theirs), daemon=True).start()
    return ours


def _turns(tls: ssl.SSLSocket, plain: socket.socket) -> None:
    tls.settimeout(30)
    with tls, plain, contextlib.suppress(OSError):
        while True:
            ready = [tls] if tls.pending() else select.select([tls, plain], [], [])[0]
            for source, to in ((tls, plain), (plain, tls)):
                if source in ready:
                    if not (data := source.recv(65536)):
                        return
                    to.sendall(data)


def _carry(source: socket.socket, to: socket.socket, moved: Callable[[], None] = lambda: None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            moved()
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def serving(credentials: str, context: ssl.SSLContext | None = None) -> Iterator[ConnectProxy]:
    """A proxy while the block lasts."""
    made = ConnectProxy(credentials, context)
    try:
        yield made
    finally:
        made.listener.close()
