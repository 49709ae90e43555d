"""Requests of a hostile agent to a host at which the gate adds a secret: what is sent, and what comes of it."""

from __future__ import annotations

import re

HOST = "Host: api.example.com:4443\r\n"
END = "Connection: close\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"


def get(path: str = "/user", more: str = "", method: str = "GET", host: str = HOST) -> str:
    """A request, byte by byte."""
    return f"{method} {path} HTTP/1.1\r\n{host}{more}{END}"


def post(more: str, body: str, path: str = "/user") -> str:
    """A request with a body."""
    return get(path, more, "POST") + body


# Name, what is sent, the statuses that come, and how many requests reach the host with the secret.
PROBES: tuple[tuple[str, str, list[int], int], ...] = (
    ("granted", get(), [200], 1),
    ("granted by POST", post("Content-Length: 2\r\n", "hi"), [200], 1),
    ("granted below", get("/repos/a/b?x=..//%2f"), [200], 1),
    ("granted in chunks", post(CHUNKED, "2\r\nhi\r\n0\r\n\r\n"), [200], 1),
    ("granted without port", get(host="Host: api.example.com\r\n"), [200], 1),
    ("no host", get(host=""), [400], 0),
    ("another host", get(host="Host: other.example.com\r\n"), [421], 0),
    ("another port", get(host="Host: api.example.com:443\r\n"), [421], 0),
    ("two hosts", get(host=HOST + "Host: other.example.com\r\n"), [400], 0),
    ("host with a user", get(host="Host: other.example.com@api.example.com:4443\r\n"), [421], 0),
    ("a whole URL", get("https://other.example.com/user"), [400], 0),
    ("its own whole URL", get("https://api.example.com:4443/user"), [400], 0),
    ("HTTP/1.0", get().replace("HTTP/1.1", "HTTP/1.0"), [400], 0),
    ("HTTP/0.9", "GET /user\r\n\r\n", [400], 0),
    ("HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400], 0),
    ("method", get(method="DELETE"), [403], 0),
    ("method in small letters", get(method="get"), [400], 0),
    ("method CONNECT", get("other.example.com:443", method="CONNECT"), [400], 0),
    ("method TRACE", get(method="TRACE"), [403], 0),
    ("method OPTIONS of all", get("*", method="OPTIONS"), [400], 0),
    ("path", get("/admin"), [403], 0),
    ("path beside", get("/reposx"), [403], 0),
    ("path longer", get("/user/keys"), [403], 0),
    ("path climbs", get("/repos/../admin"), [403], 0),
    ("path climbs to its end", get("/repos/a/.."), [403], 0),
    ("path climbs encoded", get("/repos/%2e%2e/admin"), [403], 0),
    ("path climbs half encoded", get("/repos/.%2E/admin"), [403], 0),
    ("path climbs by an encoded slash", get("/repos/a%2f..%2f..%2fadmin"), [403], 0),
    ("path climbs with a parameter", get("/repos/..;x/admin"), [403], 0),
    ("path climbs by a backslash", get("/repos/..\\admin"), [403], 0),
    ("path climbs encoded twice", get("/repos/%252e%252e/admin"), [403], 0),
    ("path doubled", get("//user"), [403], 0),
    ("path with an encoded letter", get("/use%72"), [403], 0),
    ("path with an encoded slash", get("/repos/a%2fb"), [403], 0),
    ("path with NUL", get("/user%00"), [403], 0),
    ("path with a fragment", get("/user#/repos/"), [403], 0),
    ("path not encoded", get("/repos/%zz"), [403], 0),
    ("length and chunks", post("Content-Length: 4\r\n" + CHUNKED, "0\r\n\r\n"), [400], 0),
    ("chunks and length", post(CHUNKED + "Content-Length: 4\r\n", "0\r\n\r\n"), [400], 0),
    ("two lengths", post("Content-Length: 2\r\nContent-Length: 3\r\n", "hi!"), [400], 0),
    ("two equal lengths", post("Content-Length: 2\r\nContent-Length: 2\r\n", "hi"), [400], 0),
    ("a length with a sign", post("Content-Length: +2\r\n", "hi"), [400], 0),
    ("a length below zero", post("Content-Length: -2\r\n", "hi"), [400], 0),
    ("two lengths in one", post("Content-Length: 2, 2\r\n", "hi"), [400], 0),
    ("chunked twice", post("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n"), [400], 0),
    ("another coding", post("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"), [400], 0),
    ("two codings", post(CHUNKED + CHUNKED, "0\r\n\r\n"), [400], 0),
    ("coding with a tab", post("Transfer-Encoding:\tchunked\r\nContent-Length: 3\r\n", "0\r\n\r\n"), [400], 0),
    ("a name with a space", get(more="Content-Length : 2\r\n"), [400], 0),
    ("a line without a colon", get(more="nonsense\r\n"), [400], 0),
    ("a folded line", get(more="X-A: b\r\n c\r\n"), [400], 0),
    ("a value with NUL", get(more="X-A: b\0c\r\n"), [400], 0),
    ("a value with a lone CR", get(more="X-A: b\rX-B: c\r\n"), [400], 0),
    ("a name with `_`", get(more="X_Token: 1\r\n"), [400], 0),
    ("a header too long", get(more=f"X-A: {'b' * 70000}\r\n"), [400], 0),
    ("WebSocket", get(more="Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n"), [400], 0),
    ("HTTP/2 in clear", get(more="Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"), [400], 0),
    ("another expectation", post("Expect: other\r\nContent-Length: 2\r\n", "hi"), [417], 0),
    ("a trailer", post("Trailer: X-A\r\n" + CHUNKED, "0\r\nX-A: b\r\n\r\n"), [400], 0),
    ("a proxy's password", get(more="Proxy-Authorization: Basic eDp5\r\n"), [400], 0),
    ("an encoded body", post("Content-Encoding: gzip\r\nContent-Length: 2\r\n", "hi"), [400], 0),
    ("a second request behind", get().replace(END, "\r\n") + get("/admin"), [200, 403], 1),
    ("a request in a body", post(f"Content-Length: {len(get())}\r\n", get()), [200], 1),
    ("another method by a header", post("X-HTTP-Method-Override: DELETE\r\nContent-Length: 0\r\n", ""), [200], 1),
    ("another path by a header", get(more="X-Original-URL: /admin\r\nX-Rewrite-URL: /admin\r\n"), [200], 1),
    ("its own secrets", get(more="Authorization: a\r\nauthorization: b\r\nConnection: Authorization\r\n"), [200], 1),
)  # fmt: skip


def statuses(text: str) -> list[int]:
    """The statuses of the answers in a text."""
    return [int(one) for one in re.findall(r"HTTP/[0-9.]+ ([0-9]{3}) ", text)]
