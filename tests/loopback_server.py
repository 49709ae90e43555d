"""HTTP servers of tests: on a free port of the loopback or a listener, and without a word on stderr."""

from __future__ import annotations

import contextlib
import http.server
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

_Server = TypeVar("_Server", bound=http.server.HTTPServer)


class LoopbackServer(http.server.ThreadingHTTPServer):
    """A thread for each connection. A client that leaves is part of a test."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(
        self, handler: type[http.server.BaseHTTPRequestHandler], listener: socket.socket | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self.server_name, self.server_port = listener.getsockname()[:2]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing."""


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Keeps connections open, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Say nothing."""


@contextmanager
def serving(made: _Server) -> Iterator[_Server]:
    """Serve while the block lasts."""
    with made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


def free_port() -> int:
    """Return a free port of loopback that the kernel gives only to a process that asks for its number (ip(7)).

    An ephemeral port was once taken by another connection before the server had it, or while a server was restarted.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    beyond = [port for port in range(10_000, 65_536) if not low <= port <= high]
    assert len(beyond) > 1_000
    for port in random.SystemRandom().sample(beyond, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port of a hundred is free")
