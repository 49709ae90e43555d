"""Requests that two servers could read in two ways, or that are meant for another: the gate in its real process.

Each probe is one connection; what is refused must not reach a provider, and the gate answers a good request after it.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from tests.kernel import gated_models
from tests.kernel.fake_provider import KEY, Provider
from tests.kernel.gated_models import Gated

TEXT = """
[providers.local]
kind = "openai-compatible"
endpoint = "{url}"
secret = "k"
"""
BODY = json.dumps({"model": "test-1", "messages": [{"role": "user", "content": "hi"}]}).encode()
LENGTH = f"Content-Length: {len(BODY)}"
HOST = "Host: models.covenant"
CHAT = "POST /v1/chat/completions HTTP/1.1"
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"


def frame(*lines: str, body: bytes = BODY) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def with_body(**fields: object) -> bytes:
    body = json.dumps({"model": "test-1", "messages": [], **fields}).encode()
    return frame(CHAT, HOST, f"Content-Length: {len(body)}", body=body)


def written(text: str) -> bytes:
    return frame(CHAT, HOST, f"Content-Length: {len(text)}", body=text.encode())


def path(target: str, method: str = "POST") -> bytes:
    return frame(f"{method} {target} HTTP/1.1", HOST, LENGTH)


PROBES: dict[str, bytes] = {
    # A body with two lengths, or with none that is sure.
    "both lengths": frame(CHAT, HOST, LENGTH, CHUNKED, body=CHUNKS),
    "both lengths turned round": frame(CHAT, HOST, CHUNKED, LENGTH, body=CHUNKS),
    "two lengths": frame(CHAT, HOST, LENGTH, "Content-Length: 0"),
    "two equal lengths": frame(CHAT, HOST, LENGTH, LENGTH),
    "list of lengths": frame(CHAT, HOST, f"Content-Length: {len(BODY)}, {len(BODY)}"),
    "negative length": frame(CHAT, HOST, "Content-Length: -1"),
    "signed length": frame(CHAT, HOST, f"Content-Length: +{len(BODY)}"),
    "hexadecimal length": frame(CHAT, HOST, "Content-Length: 0x10"),
    "huge length": frame(CHAT, HOST, "Content-Length: 99999999999999999999"),
    "length of 1 GiB": frame(CHAT, HOST, "Content-Length: 1073741824"),
    "encoding of another name": frame(CHAT, HOST, "Transfer-Encoding: xchunked", body=CHUNKS),
    "encoding twice": frame(CHAT, HOST, CHUNKED, CHUNKED, body=CHUNKS),
    "encoding not last": frame(CHAT, HOST, "Transfer-Encoding: chunked, identity", body=CHUNKS),
    "encoding in quotes": frame(CHAT, HOST, 'Transfer-Encoding: "chunked"', body=CHUNKS),
    "encoding with a tab": frame(CHAT, HOST, "Transfer-Encoding:\tchunked\x0b", body=CHUNKS),
    "blank before colon": frame(CHAT, HOST, "Transfer-Encoding : chunked", LENGTH, body=CHUNKS),
    "chunk of a bad size": frame(CHAT, HOST, CHUNKED, body=b"zz\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk with a sign": frame(CHAT, HOST, CHUNKED, body=f"+{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"),
    "chunk too long": frame(CHAT, HOST, CHUNKED, body=b"fffffffffffffffff\r\n" + BODY),
    "chunk without its end": frame(CHAT, HOST, CHUNKED, body=b"2\r\n{}XX0\r\n\r\n"),
    "compressed body": frame(CHAT, HOST, LENGTH, "Content-Encoding: gzip"),
    "trailer": frame(CHAT, HOST, CHUNKED, "Trailer: Authorization", body=CHUNKS),
    # Lines that end, or begin, otherwise.
    "folded header": frame(CHAT, HOST, "X-A: b\r\n c: d", LENGTH),
    "bare line feed": f"{CHAT}\n{HOST}\n{LENGTH}\nX: y\n\n".encode() + BODY,
    "bare carriage return": frame(CHAT, HOST, "X: a\rb", LENGTH),
    "NUL in a header": frame(CHAT, HOST, "X: a\0b", LENGTH),
    "header without a name": frame(CHAT, HOST, ": x", LENGTH),
    "header without a colon": frame(CHAT, HOST, "X", LENGTH),
    "header of 20 KiB": frame(CHAT, HOST, f"X: {'a' * 20480}", LENGTH),
    "path of 20 KiB": path("/v1/" + "a" * 20480),
    "10,000 headers": frame(CHAT, HOST, *(f"X{n}: y" for n in range(10_000)), LENGTH),
    "version 1.0": frame("POST /v1/chat/completions HTTP/1.0", HOST, LENGTH),
    "version 2.0": frame("POST /v1/chat/completions HTTP/2.0", HOST, LENGTH),
    "no version": b"GET /v1/models\r\n\r\n",
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "ClientHello": b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",
    # Another server.
    "no host": frame(CHAT, LENGTH),
    "two hosts": frame(CHAT, HOST, "Host: example.com", LENGTH),
    "another host": frame(CHAT, "Host: example.com", LENGTH),
    "host with a port": frame(CHAT, "Host: models.covenant:443", LENGTH),
    "host with a user": frame(CHAT, "Host: x@models.covenant", LENGTH),
    "host and more": frame(CHAT, "Host: models.covenant.example.com", LENGTH),
    "address as host": frame(CHAT, "Host: 192.0.0.1", LENGTH),
    "absolute form": path("http://models.covenant/v1/chat/completions"),
    "absolute form of another": path("http://example.com/v1/chat/completions"),
    "authority form": frame("CONNECT example.com:443 HTTP/1.1", HOST, body=b""),
    "asterisk form": frame("OPTIONS * HTTP/1.1", HOST, body=b""),
    # Another protocol.
    "upgrade to a websocket": frame(
        "GET /v1/models HTTP/1.1",
        HOST,
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        body=b"",
    ),
    "upgrade to HTTP/2": frame(CHAT, HOST, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", LENGTH),
    "expectation": frame(CHAT, HOST, LENGTH, "Expect: 100-continue"),
    # Another path.
    "unknown path": path("/v1/files"),
    "path climbing": path("/v1/../v1/chat/completions"),
    "path encoded": path("/v1/chat%2fcompletions"),
    "path doubled": path("//v1/chat/completions"),
    "path with a parameter": path("/v1/chat/completions;a=b"),
    "path with a query": path("/v1/chat/completions?api-version=1"),
    "path of another provider": path("/other/v1/chat/completions"),
    "unknown method": path("/v1/chat/completions", "PUT"),
    "method of a list": path("/v1/models", "DELETE"),
    # Another model, or more than an answer.
    "model not granted": with_body(model="gpt-5"),
    "model twice": written('{"model": "gpt-5", "messages": [], "model": "test-1"}'),
    "model as a list": with_body(model=["test-1"]),
    "model with a blank": with_body(model="test-1 "),
    "further models": with_body(models=["gpt-5"]),
    "plugins": with_body(plugins=[{"id": "web"}]),
    "search of the provider": with_body(web_search_options={}),
    "tool of the provider": with_body(tools=[{"type": "web_search"}], tool_choice="required"),
    "connector": with_body(tools=[{"type": "mcp", "server_url": "https://example.com"}]),
    "image by its address": with_body(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/x"}}]}]
    ),
    "stored file": with_body(messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]),
    "tools as an object": with_body(tools={"type": "web_search"}),
    "tools in a list of lists": with_body(tools=[[{"type": "web_search"}]]),
    "messages as an object": with_body(messages={"role": "user", "content": "x"}),
    "content as an object": with_body(
        messages=[{"role": "user", "content": {"type": "image_url", "image_url": "https://x"}}]
    ),
    "half a character": written('{"model": "test-1", "messages": [], "user": "\\ud800"}'),
    "no object": written("[]"),
    "no number": written('{"model": "test-1", "messages": [], "temperature": NaN}'),
    "deep document": written('{"model": "test-1", "messages": ' + "[" * 100_000 + "}"),
    "not UTF-8": frame(CHAT, HOST, "Content-Length: 2", body=b"\xff\xfe"),
}


@pytest.fixture(scope="module")
def gated(provider: Provider) -> Iterator[Gated]:
    with gated_models.opened(TEXT.format(url=provider.url), {"local": KEY}) as made:
        yield made
        assert made.lives()


def exchange(gated: Gated, data: bytes, seconds: float = 30) -> tuple[int, bytes]:
    """Send and read the first answer; 0 where there is none in so many seconds."""
    with gated.connect() as line:
        line.settimeout(seconds)
        found = http.client.HTTPResponse(line)
        try:
            line.sendall(data)
            found.begin()
            return found.status, found.read()
        except (OSError, http.client.HTTPException):
            return 0, b""


def good(gated: Gated) -> None:
    status, body = exchange(gated, frame(CHAT, HOST, LENGTH))
    assert (status, b"from" in body) == (200, True)


@pytest.mark.parametrize("name", PROBES)
def test_probe_is_refused(gated: Gated, provider: Provider, name: str) -> None:
    provider.seen.clear()
    status, body = exchange(gated, PROBES[name], 1.5)  # to some there is no answer
    assert provider.seen == []
    assert status == 0 or 400 <= status < 500, (status, body)
    assert KEY.encode() not in body
    assert gated.lives()


def test_there_are_enough_probes_and_controls_pass(gated: Gated, provider: Provider) -> None:
    assert len(PROBES) >= 60
    good(gated)
    status, _ = exchange(gated, frame(CHAT, "HOST: MODELS.COVENANT:80", CHUNKED, body=CHUNKS))
    assert status == 200
    assert [one["headers"]["host"] for one in provider.seen] == [provider.url[7:-3]] * len(provider.seen)


def test_tool_of_provider_is_left_out_and_told(gated: Gated, provider: Provider) -> None:
    provider.seen.clear()
    function = {"type": "function", "function": {"name": "f"}}
    status, _ = exchange(gated, with_body(tools=[{"type": "web_search"}, function], tool_choice="auto"))
    assert status == 200
    assert [one["body"]["tools"] for one in provider.seen] == [[function]]
    gated.look()
    assert "tool_left_out" in gated.codes()


def test_pipelined_requests_are_judged_one_by_one(gated: Gated, provider: Provider) -> None:
    provider.seen.clear()
    bad = PROBES["model not granted"]
    with gated.connect() as line:
        line.sendall(frame(CHAT, HOST, LENGTH) + bad + frame(CHAT, HOST, LENGTH, "Connection: close"))
        received = b""
        while chunk := line.recv(65536):
            received += chunk
    assert [int(one.split()[0]) for one in received.split(b"HTTP/1.1 ")[1:]] == [200, 403, 200]
    assert [one["body"]["model"] for one in provider.seen] == ["test-1", "test-1"]


def test_headers_of_the_agent_do_not_pass(gated: Gated, provider: Provider) -> None:
    provider.seen.clear()
    more = ("Authorization: Bearer mine", "x-api-key: mine", "Cookie: a=b", "X-Forwarded-For: 1.2.3.4", "Via: x")
    status, _ = exchange(gated, frame(CHAT, HOST, LENGTH, *more))
    assert status == 200
    headers = provider.seen[0]["headers"]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert not {"x-api-key", "cookie", "x-forwarded-for", "via"} & set(headers)


def test_answers_of_the_provider_are_cleaned(gated: Gated, provider: Provider) -> None:
    provider.more = {"X-Request-Id": "r", "Location": "https://example.com", "X-Other": "1"}
    with gated.connect() as line:
        line.sendall(frame(CHAT, HOST, LENGTH, "Connection: close"))
        received = b""
        while chunk := line.recv(65536):
            received += chunk
    head = received.partition(b"\r\n\r\n")[0].lower()
    assert b"x-request-id: r" in head
    assert not any(name in head for name in (b"set-cookie", b"location", b"x-other"))
    provider.more = {}


def test_redirect_is_not_followed(gated: Gated, provider: Provider) -> None:
    provider.status, provider.more = 302, {"Location": provider.url + "/elsewhere"}
    provider.seen.clear()
    status, body = exchange(gated, frame(CHAT, HOST, LENGTH))
    provider.status, provider.more = 200, {}
    assert (status, len(provider.seen), KEY.encode() in body) == (502, 1, False)
