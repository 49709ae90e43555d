"""A provider of models on the loopback, which records what it is sent and answers as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests import loopback_server

KEY: Final = "sk-planted-0123456789abcdef"


class Provider(loopback_server.LoopbackServer):
    """Speaks chat completions and messages; ``gap_seconds`` lie between the parts of a stream."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.seen: list[dict[str, Any]] = []
        self.status, self.gap_seconds, self.parts = 200, 0.0, 3
        self.more: dict[str, str] = {}
        self.cut = threading.Event()

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(loopback_server.QuietHandler):
    server: Provider

    def do_GET(self) -> None:
        """Answer as for POST."""
        self._answer({})

    def do_POST(self) -> None:
        """Record the request and answer it."""
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(json.loads(raw))

    def _answer(self, body: dict[str, Any]) -> None:
        self.server.seen.append(
            {
                "method": self.command,
                "path": self.path,
                "headers": {name.lower(): value for name, value in self.headers.items()},
                "body": body,
            }
        )
        if self.server.status != 200:
            self._whole(self.server.status, {"error": {"message": f"no: {self.headers.get('authorization')}"}})
        elif body.get("stream"):
            self._stream(body)
        else:
            usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
            said = {"role": "assistant", "content": f"from {self.server.server_port}"}
            choices = [{"index": 0, "message": said, "finish_reason": "stop"}]
            answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body.get("model")}
            self._whole(200, {**answer, "choices": choices, "usage": usage})

    def _whole(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Set-Cookie", "tracked=1")
        for name, value in self.server.more.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        try:
            for number in range(self.server.parts):
                delta = {"content": f"part{number} "}
                self._event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                time.sleep(self.server.gap_seconds)
            if body.get("stream_options", {}).get("include_usage"):
                self._event({**base, "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except OSError:
            self.server.cut.set()

    def _event(self, document: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@contextmanager
def serving() -> Iterator[Provider]:
    """A provider while the block lasts."""
    with loopback_server.serving(Provider()) as made:
        yield made
