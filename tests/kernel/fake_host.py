"""A host of the world that speaks HTTPS, records what it is sent, and answers by the path."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# What a test plants as the secret; no part of it stands anywhere else.
SECRET = "ghp_planted/0123456789+abcdefZQ"
TOKEN = "gho_token.0123456789abcdefghijklmnopqrstuv"
REFRESH = "ghr_refresh-9876543210zyxwvutsrqponm"


class FakeHost(http.server.ThreadingHTTPServer):
    """Serves the listeners; ``seen`` has each request: method, path, headers as they came, body."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = context.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        self.server_name, self.server_port = "host", 0
        self.seen: list[dict[str, Any]] = []
        self.connections = 0
        # The directory that holds git/NAME.git, for `git http-backend`.
        self.repositories: Path | None = None
        # Called in the middle of a request to /hook, with its number.
        self.hook: Callable[[int], None] = lambda number: None

    def get_request(self) -> tuple[socket.socket, Any]:
        taken, peer = super().get_request()
        self.connections += 1
        taken.settimeout(30)
        return taken, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none of ours."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHost

    def log_message(self, *words: object) -> None:
        """Say nothing."""

    def parse_request(self) -> bool:
        """Every method has one answer."""
        if not super().parse_request():
            return False
        setattr(self, f"do_{self.command}", self._answer)
        return True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self) -> None:
        body = self._body()
        headers = [(name.lower(), value) for name, value in self.headers.items()]
        self.server.seen.append({"method": self.command, "path": self.path, "headers": headers, "body": body})
        path = self.path.partition("?")[0]
        given = dict(headers).get("authorization", "")
        if path.startswith("/git/") and self.server.repositories is not None:
            self._git(given, body, self.server.repositories)
            return
        answer = getattr(self, "at_" + path.strip("/").replace("/", "_").replace("-", "_"), None)
        if answer is not None:
            answer(given, body)
        else:
            self.say(b'{"ok": true}')

    def _git(self, given: str, body: bytes, top: Path) -> None:
        """An answer of git's own program (git-http-backend(1)), to requests with the secret alone."""
        if given != f"Bearer {SECRET}":
            self.say(b"no secret", kind="text/plain", status=401)
            return
        path, _, query = self.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(top),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "REMOTE_USER": "probe",
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=True)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        named = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        status = int(named.get("Status", "200").split()[0])
        self.say(content, kind=named.get("Content-Type", "text/plain"), status=status)

    def say(self, body: bytes, *, kind: str = "application/json", status: int = 200, **more: str) -> None:
        """A whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def parts(self, parts: Sequence[bytes], *, kind: str, gap: float = 0.0) -> None:
        """An answer in chunks."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.flush()
            time.sleep(gap)
        self.wfile.write(b"0\r\n\r\n")

    def at_hook(self, given: str, body: bytes) -> None:
        """An answer after the test has looked at the world."""
        self.server.hook(int(self.path.partition("?")[2]))
        self.say(b"looked", kind="text/plain")

    # --- answers by path ------------------------------------------------------------------------------------

    def at_echo(self, given: str, body: bytes) -> None:
        """All that came, in the body and in headers."""
        headers = dict(self.headers.items())
        text = json.dumps({"headers": headers, "given": given}).encode()
        self.say(text, X_Echo=given, Set_Cookie=f"session={given[-8:]}", Location=f"https://{given[7:15]}/{given[7:]}")

    def at_split(self, given: str, body: bytes) -> None:
        """The secret in parts of three bytes."""
        text = f"<p>{given}</p>".encode()
        self.parts([text[at : at + 3] for at in range(0, len(text), 3)], kind="text/html")

    def at_stream(self, given: str, body: bytes) -> None:
        """Events, one after the other."""
        self.parts([f"data: part{n} {given}\n\n".encode() for n in range(3)], kind="text/event-stream", gap=0.4)

    def at_drip(self, given: str, body: bytes) -> None:
        """A stream of half a minute."""
        self.parts([f"data: part{n}\n\n".encode() for n in range(300)], kind="text/event-stream", gap=0.1)

    def at_token(self, given: str, body: bytes) -> None:
        """A token answer, in two parts."""
        text = json.dumps({"access_token": TOKEN, "refresh_token": REFRESH, "expires_in": 60}).encode()
        self.parts([text[:30], text[30:]], kind="application/json")

    def at_formtoken(self, given: str, body: bytes) -> None:
        """A token answer as a form."""
        self.say(f"scope=a&access_token={TOKEN}&token_type=bearer".encode(), kind="application/x-www-form-urlencoded")

    def at_elsewhere(self, given: str, body: bytes) -> None:
        """A redirect to another host."""
        self.say(b"", status=302, Location="https://other.example.com:4443/landed")

    def at_zipped(self, given: str, body: bytes) -> None:
        """An encoding that was not asked for."""
        self.say(b"\x1f\x8b" + given.encode(), Content_Encoding="gzip")

    def at_upgrade(self, given: str, body: bytes) -> None:
        """A change of the protocol that was not asked for."""
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.end_headers()
        self.wfile.write(given.encode())

    def at_close(self, given: str, body: bytes) -> None:
        """The last answer of its connection."""
        self.close_connection = True
        self.say(b"last", kind="text/plain", Connection="close")

    def at_big(self, given: str, body: bytes) -> None:
        """Many bytes, with a length."""
        self.say(b"0123456789abcdef" * (1 << 16), kind="application/octet-stream")

    def at_taken(self, given: str, body: bytes) -> None:
        """The length of what came."""
        self.say(str(len(body)).encode(), kind="text/plain")


@contextlib.contextmanager
def serving(listener: socket.socket, context: ssl.SSLContext) -> Iterator[FakeHost]:
    """A host while the block lasts."""
    host = FakeHost(listener, context)
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield host
    finally:
        host.shutdown()
        host.server_close()
        thread.join(10)
