"""HTTP servers of tests: on a free port of the loopback or a listener, and without a word on stderr."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
