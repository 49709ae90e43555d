"""Providers of searches in each of their forms, and a host of pages by https, on the loopback."""

from __future__ import annotations

import http.server
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.kernel.tls_servers import Certificates

KEY: Final = "bs-planted-0123456789abcdef"
PAGE: Final = (
    "<html><head><title>A &amp; B</title><style>p { color: red }</style></head><body><nav>menu</nav>"
    "<h1>Heading</h1><p>One <b>bold</b> word.</p><script>alert('never')</script><ul><li>x</li><li>y</li></ul></body>"
)


class Web(http.server.ThreadingHTTPServer):
    """One server; ``seen`` has path, query and headers of each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[dict[str, Any]] = []
        self.status = 200
        self.body: bytes | None = None
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.wait_seconds = 0.0

    @property
    def place(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that leaves is part of a test."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Web

    def log_message(self, *words: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer a search, or a page."""
        parts = urlsplit(self.path)
        query = {name: value[0] for name, value in parse_qs(parts.query).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append({"path": parts.path, "query": query, "headers": headers})
        time.sleep(self.server.wait_seconds)
        if parts.path in self.server.pages:
            self._say(*self.server.pages[parts.path])
        elif self.server.status != 200:
            self._say(self.server.status, {}, json.dumps({"error": f"no: {headers}"}).encode())
        elif self.server.body is not None:
            self._say(200, {}, self.server.body)
        else:
            self._say(200, {"Content-Type": "application/json"}, json.dumps(_answer(parts.path, query)).encode())

    def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "text/html", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _answer(path: str, query: dict[str, str]) -> dict[str, Any]:
    words = query.get("q", "")
    if path == "/res/v1/web/search":
        rows = [
            {
                "title": f"<strong>{words}</strong> {n}",
                "url": f"https://b.example/{n}",
                "description": "a &amp; <b>b</b>",
            }
            for n in range(int(query["count"]))
        ]
        return {"web": {"results": rows}}
    if path == "/search.json":
        rows = [{"title": words, "link": "https://s.example/", "snippet": "serp"}, {"title": "x", "link": "ftp://x/"}]
        return {"organic_results": rows}
    return {"results": [{"title": words, "url": "https://x.example/", "content": "searx"}]}


@contextmanager
def serving(*names: str) -> Iterator[tuple[Web, Path]]:
    """A server while the block lasts, by https where it has names; with the file of its certificate."""
    with tempfile.TemporaryDirectory(prefix="covenant-test-") as folder, Web() as made:
        certificates = Certificates(Path(folder), *(names or ("unused.example",)))
        if names:
            context = certificates.server()
            made.socket = context.wrap_socket(made.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=made.serve_forever, name="web")
        thread.start()
        try:
            yield made, certificates.path
        finally:
            made.shutdown()
            thread.join()


def unused_port() -> int:
    """A port of the loopback on which nothing listens."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])
