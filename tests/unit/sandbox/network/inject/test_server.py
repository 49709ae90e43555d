"""The inject gate's server in this process: each probe over TLS, with a host behind it that keeps what it hears."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest
from aiohttp import web

from policy.grants.credentials import InjectRule, InjectSet
from sandbox.network.inject import relay, scrub, upstream
from sandbox.network.inject.authority import Authority
from sandbox.network.inject.line import InjectEntry, Line
from sandbox.network.inject.server import InjectServer
from tests.inject_kit import PROBES, statuses

HOST, SECRET = "api.example.com", b"planted-secret/0123456789"


class Told(Line):
    """A line that has one secret, and keeps what is asked and told."""

    def __init__(self, secret: bytes | None = SECRET) -> None:
        self.secret = secret
        self.asked: list[tuple[str, str, str]] = []
        self.ended: list[InjectEntry] = []

    async def ask(self, host: str, method: str, path: str, digest: str = "") -> tuple[InjectEntry, bytes | None]:
        self.asked.append((host, method, path))
        return InjectEntry(len(self.asked), 0.0), self.secret

    def cut_by(self, entry: InjectEntry, cut: Callable[[str], None]) -> None:
        self.cut = cut

    def end(self, entry: InjectEntry) -> None:
        self.ended.append(entry)


class Gate:
    """A gate for one host. ``answer`` is what the host says to each request, ``heard`` what it got."""

    def __init__(self, line: Line, **rule: str) -> None:
        given = {"secret": "s", "header": "Authorization", "format": "Bearer {}", "user": "", **rule}
        rules = [
            InjectRule(HOST, given["secret"], given["header"], given["format"], given["user"], method, path)
            for method in ("GET", "POST")
            for path in ("/user", "/repos/*")
        ]
        injected = InjectSet.of(rules)
        self.authority = Authority(injected.hosts, seconds=3600)
        self.trusts = upstream.verifying(())
        self.trusts.load_verify_locations(cadata=self.authority.pem.decode())
        self.injected, self.line = injected, line
        self.denied: list[str] = []
        self.heard: list[bytes] = []
        self.on_request: Callable[[], object] = lambda: None
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = b""
                if b"chunked" in head:
                    body = await reader.readuntil(b"0\r\n\r\n")
                elif b"Content-Length: " in head:
                    body = await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
                self.heard.append(head + body)
                self.on_request()
                writer.write(self.answer)
                await writer.drain()
        writer.close()

    def made(self) -> InjectServer:
        """A server, which needs a loop."""
        server = InjectServer(self.injected, self.authority.contexts, self.trusts, self.line)
        server.denied = lambda target, code: self.denied.append(code)
        return server

    async def send(self, data: bytes, server: InjectServer | None = None) -> bytes:
        """Send bytes on a connection of their own, and return all that comes."""
        loop = asyncio.get_running_loop()
        server = server or self.made()
        (agent, near), (made, host) = socket.socketpair(), socket.socketpair()
        for one in (agent, near, made, host):
            one.setblocking(False)
        reads = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reads, self._host)
        accepts = loop.create_task(
            loop.connect_accepted_socket(lambda: protocol, host, ssl=self.authority.contexts[HOST])
        )
        task = server.take(HOST, 4443, near, made)
        reader, writer = await asyncio.open_connection(sock=agent, ssl=self.trusts, server_hostname=HOST)
        writer.write(data)
        said = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await task
        accepts.cancel()
        return said


def test_probes_get_what_they_may() -> None:
    async def every() -> None:
        for name, data, gives, count in PROBES:
            line = Told()
            gate = Gate(line)
            said = await gate.send(data.encode("latin-1"))
            assert (name, statuses(said.decode("latin-1"))) == (name, gives)
            assert (name, sum(SECRET in one for one in gate.heard)) == (name, count)
            assert SECRET not in said, name
            refused = len([one for one in gives if one != 200])
            assert (name, len(gate.denied)) == (name, refused)
            assert len(line.asked) == len(line.ended) == count, name

    asyncio.run(every())


GET = b"GET /user HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n"


def test_secret_without_a_value_sends_nothing() -> None:
    gate = Gate(Told(None))
    said = asyncio.run(gate.send(GET))
    assert (statuses(said.decode()), gate.denied, gate.heard) == ([403], ["secret_absent"], [])


def test_secret_that_breaks_a_header_is_refused() -> None:
    for secret in (b"short", b"planted-secret\r\nX-Other: 1", b"planted secret", b"planted-s\xc3\xa9cret", b""):
        gate = Gate(Told(secret))
        said = asyncio.run(gate.send(GET))
        assert (statuses(said.decode()), gate.denied, gate.heard) == ([502], ["secret_malformed"], [])


def test_user_and_secret_are_encoded_as_basic() -> None:
    gate = Gate(Told(), format="Basic {}", user="x-access-token")
    basic = b"eC1hY2Nlc3MtdG9rZW46cGxhbnRlZC1zZWNyZXQvMDEyMzQ1Njc4OQ=="
    gate.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Echo: " + basic + b"\r\n\r\n"
    said = asyncio.run(gate.send(GET))
    assert b"Authorization: Basic " + basic + b"\r\n" in gate.heard[0]
    assert b"GxhbnRlZC1zZWNyZXQ" not in said
    assert b"X-Echo: ****" in said


def test_answers_lose_sessions_and_secrets() -> None:
    gate = Gate(Told())
    gate.answer = (
        b"HTTP/1.1 302 Found\r\nContent-Length: %d\r\nSet-Cookie: a=b\r\nAlt-Svc: h3=x\r\nX-Own: 1\r\n"
        b"Location: https://other.example.com/?t=planted-secret%%2F0123456789\r\n\r\n%b"
    ) % (len(SECRET), SECRET)
    said = asyncio.run(gate.send(GET))
    assert statuses(said.decode()) == [302]
    assert b"X-Own: 1" in said
    assert b"Location: https://other.example.com/?t=" + b"*" * (len(SECRET) + 2) in said
    assert said.endswith(b"\r\n\r\n" + b"*" * len(SECRET))
    for gone in (b"Set-Cookie", b"Alt-Svc", b"planted"):
        assert gone not in said


def test_answer_that_cannot_be_read_is_refused() -> None:
    for answer in (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"nonsense\r\n\r\n",
    ):
        gate = Gate(Told())
        gate.answer = answer
        said = asyncio.run(gate.send(GET))
        assert statuses(said.decode()) == [502]


def test_answer_cut_while_it_is_written_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut comes before the write that the loop runs next, so that the write finds no connection."""
    line = Told()

    async def passed_on(
        self: relay.HostAnswer, request: web.BaseRequest, response: object, entry: InjectEntry
    ) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        line.cut("secret_taken")
        await answer.write(b"x")
        return answer

    monkeypatch.setattr(relay.HostAnswer, "passed_on", passed_on)
    gate = Gate(line)
    asyncio.run(gate.send(b"GET /user HTTP/1.1\r\nHost: api.example.com\r\n\r\n"))
    assert gate.denied == ["secret_taken"]


def test_cut_as_the_agent_goes_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS has lost its connection, and the request is told in the loop's next turn."""
    line, faults = Told(), list[Exception]()

    async def passed_on(
        self: relay.HostAnswer, request: web.BaseRequest, response: object, entry: InjectEntry
    ) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(0)
        try:
            line.cut("secret_taken")
        except Exception as e:
            faults.append(e)
        raise ConnectionResetError

    monkeypatch.setattr(relay.HostAnswer, "passed_on", passed_on)
    gate = Gate(line)
    with contextlib.suppress(ConnectionResetError):
        asyncio.run(gate.send(b"GET /user HTTP/1.1\r\nHost: api.example.com\r\n\r\n"))
    assert (faults, gate.denied) == ([], ["secret_taken"])


def test_part_of_an_answer_is_not_asked_for() -> None:
    gate = Gate(Told())
    asyncio.run(gate.send(GET.replace(b"Connection", b"Range: bytes=3-5\r\nIf-Range: x\r\nX-Kept: 1\r\nConnection")))
    assert b"ange:" not in gate.heard[0]
    assert b"X-Kept: 1" in gate.heard[0]


def test_long_path_is_refused_before_it_is_told() -> None:
    line = Told()
    gate = Gate(line)
    said = asyncio.run(gate.send(GET.replace(b"/user", b"/repos/" + b"a" * 4000)))
    assert (statuses(said.decode()), gate.denied, line.asked) == ([414], ["path_refused"], [])


def test_token_is_hidden_though_it_was_forgotten() -> None:
    gate, token = Gate(Told()), "gho_0123456789abcdefghijklmnopqrstuvwxyz"

    async def forgotten() -> bytes:
        server = gate.made()
        placeholder = server.tokens.hide("s", token, len(token))
        gate.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(token), token.encode())
        gate.on_request = lambda: [server.tokens.hide("s", "x" * 40, 40) for _ in range(scrub.MOST)]
        mine = b"Authorization: Bearer " + placeholder.encode() + b"\r\nConnection"
        return await gate.send(GET.replace(b"Connection", mine), server)

    said = asyncio.run(forgotten())
    assert b"Authorization: Bearer " + token.encode() in gate.heard[0]
    assert token.encode() not in said
