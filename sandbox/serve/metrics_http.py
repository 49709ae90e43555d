"""The process that anybody who may connect talks to about numbers: it has none but those that it is given.

    a scraper ── HTTP ── [this: no files, no rights, no network of its own] ── one byte, one text ── the watcher (root)

A gate in every way (sandbox.network.gate.process): a fresh interpreter, sealed before it reads a byte. One connection
at a time, each within its seconds, one request each.
"""

from __future__ import annotations

import select
import socket
import time

from sandbox.network.gate.main import GateInput

TEXT_BYTES = 192 * 1024
CALLS = ("accept4", "getsockname", "getpeername", "getsockopt", "setsockopt", "sendmsg", "shutdown", "lseek", "ioctl")
_REQUEST_BYTES, SECONDS = 4096, 2.0
_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def serve(gate: GateInput) -> None:
    """Answer until the watcher is gone."""
    with socket.socket(fileno=gate.fds["listener"]) as listener, socket.socket(fileno=gate.fds["numbers"]) as numbers:
        _serve(gate, listener, numbers)


def _serve(gate: GateInput, listener: socket.socket, numbers: socket.socket) -> None:
    listener.setblocking(False)
    numbers.settimeout(SECONDS)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(numbers, select.POLLIN)
    gate.seal()
    while True:
        ready = dict(poll.poll())
        if numbers.fileno() in ready:
            # An unexpected message is the end of file, or an answer that came too late for its client.
            if not _said(numbers):
                return
            continue
        try:
            client, _ = listener.accept()
        except OSError:
            continue
        try:
            _answer(client, numbers)
        except (OSError, ValueError):
            pass
        finally:
            client.close()


def _said(numbers: socket.socket) -> bytes:
    try:
        return numbers.recv(TEXT_BYTES)
    except OSError:
        return b""


def _answer(client: socket.socket, numbers: socket.socket) -> None:
    until = time.monotonic() + SECONDS
    raw = b""
    while b"\r\n\r\n" not in raw and b"\n\n" not in raw:
        client.settimeout(max(0.001, until - time.monotonic()))
        data = client.recv(_REQUEST_BYTES - len(raw) + 1)
        raw += data
        if not data or len(raw) > _REQUEST_BYTES or time.monotonic() > until:
            return
    words = raw.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        status, body = b"400 Bad Request", b"not a request\n"
    elif words[0] not in (b"GET", b"HEAD"):
        status, body = b"405 Method Not Allowed", b"only GET\n"
    elif words[1].split(b"?", 1)[0] != b"/metrics":
        status, body = b"404 Not Found", b"only /metrics\n"
    else:
        numbers.send(b"?")
        status, body = b"200 OK", numbers.recv(TEXT_BYTES)
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    reply = head % (status, _TYPE, len(body)) + (b"" if words[0] == b"HEAD" else body)
    client.settimeout(SECONDS)
    client.sendall(reply)
