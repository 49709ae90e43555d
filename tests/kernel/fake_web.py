"""Providers of searches in each of their forms, and a host of pages by https, on the loopback."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests import loopback_server
from tests.kernel.tls_servers import Certificates

KEY: Final = "bs-planted-0123456789abcdef"
PAGE: Final = (
    "<html><head><title>A &amp; B</title><style>p { color: red }</style></head><body><nav>menu</nav>"
    "<h1>Heading</h1><p>One <b>bold</b> word.</p><script>alert('never')</script><ul><li>x</li><li>y</li></ul></body>"
)


class Web(loopback_server.LoopbackServer):
    """One server, at ``listener`` or a port of the loopback; ``seen`` has path, query and headers of each request."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        super().__init__(_Handler, listener)
        self.seen: list[dict[str, Any]] = []
        self.status = 200
        self.body: bytes | None = None
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.wait_seconds = 0.0

    @property
    def place(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_port}"


class _Handler(loopback_server.QuietHandler):
    server: Web

    def do_GET(self) -> None:
        """Answer a search, or a page."""
        parts = urlsplit(self.path)
        query = {name: value[0] for name, value in parse_qs(parts.query, keep_blank_values=True).items()}
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
            self._say(*_answer(parts.path, query, headers))

    def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "text/html", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _answer(path: str, query: dict[str, str], headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Answer as the provider of this path does. SerpApi and SearXNG share a path, and differ by the key."""
    if path == "/res/v1/web/search":
        return _brave(query, headers)
    if path == "/search.json" or "api_key" in query:
        return _serpapi(query)
    if query.get("format") != "json":
        return 200, {"Content-Type": "text/html; charset=utf-8"}, b"<html><body>SearXNG</body></html>"
    return _searxng(query)


def _document(status: int, document: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/json"}, json.dumps(document).encode()


def _brave(query: dict[str, str], headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Source: the API reference of Brave Search, web/search: WebSearchApiResponse and ErrorResponse."""
    if not headers.get("x-subscription-token"):
        problem = {"status": 422, "code": "SUBSCRIPTION_TOKEN_INVALID", "detail": "The provided token is invalid."}
        return _document(422, {"type": "ErrorResponse", "error": {"id": "0", **problem}})
    words = query.get("q", "")
    rows = [
        {
            "type": "search_result",
            "title": f"<strong>{words}</strong> {n}",
            "url": f"https://b.example/{n}",
            "description": "a &amp; <b>b</b>",
            "is_source_local": False,
            "is_source_both": False,
            "family_friendly": True,
            "language": "en",
            "profile": {"name": "B", "url": f"https://b.example/{n}", "long_name": "b.example"},
            "meta_url": {"scheme": "https", "netloc": "b.example", "hostname": "b.example", "path": f"> {n}"},
        }
        for n in range(int(query.get("count", "20")))
    ]
    asked = {"original": words, "show_strict_warning": False, "is_navigational": False, "more_results_available": True}
    web = {"type": "search", "results": rows, "family_friendly": True}
    return _document(200, {"type": "search", "query": asked, "web": web})


def _serpapi(query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Source: SerpApi's reference of the Google Search API, and of its status and error codes."""
    if not query.get("api_key"):
        return _document(
            401, {"error": "Invalid API key. Your API key should be here: https://serpapi.com/manage-api-key"}
        )
    words = query.get("q", "")
    if not words:
        return _document(400, {"error": "Missing query `q` parameter."})
    rows = [
        {"position": 1, "title": words, "link": "https://s.example/", "displayed_link": "s.example", "snippet": "serp"},
        {"position": 2, "title": "x", "link": "ftp://x/"},
    ]
    return _document(
        200,
        {
            "search_metadata": {"id": "0", "status": "Success", "total_time_taken": 0.1},
            "search_parameters": {name: value for name, value in query.items() if name != "api_key"},
            "search_information": {"organic_results_state": "Results for exact spelling"},
            "organic_results": rows,
        },
    )


def _searxng(query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Source: SearXNG's search API and ``searx.webutils.get_json_response``."""
    row = {
        "title": query.get("q", ""),
        "url": "https://x.example/",
        "content": "searx",
        "engine": "mock",
        "engines": ["mock"],
        "parsed_url": ["https", "x.example", "/", "", "", ""],
        "positions": [1],
        "score": 1.0,
        "category": "general",
        "template": "default.html",
    }
    rest: dict[str, Any] = {
        "answers": [],
        "corrections": [],
        "infoboxes": [],
        "suggestions": [],
        "unresponsive_engines": [],
    }
    return _document(200, {"query": query.get("q", ""), "number_of_results": 1, "results": [row], **rest})


@contextmanager
def serving(*names: str, listener: socket.socket | None = None) -> Iterator[tuple[Web, Path]]:
    """A server while the block lasts, by https where it has names; with the file of its certificate."""
    with tempfile.TemporaryDirectory(prefix="covenant-test-") as folder:
        certificates, made = Certificates(Path(folder), *(names or ("unused.example",))), Web(listener)
        if names:
            context = certificates.server()
            made.socket = context.wrap_socket(made.socket, server_side=True, do_handshake_on_connect=False)
        with loopback_server.serving(made):
            yield made, certificates.path
