"""Serve in the inject gate's process, which has no network: it ends TLS, judges requests, and adds a secret to them.

    agent ── TLS of the run's authority ──▶ [ this ] ── TLS that is verified ──▶ the host
                                             ▲  both connections come from the TLS gate, as descriptors

    (1) the frame, the path and the method          (judge)
        and where an operator is asked, the answer  (question)
    (2) the secret, for this request alone          (line)
    (3) the host's answer, as it comes              (upstream)
    (4) secrets and tokens taken out of it          (relay, scrub)

Each request that gets a secret is one row of the log, each that is refused a denial.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote_plus

import aiohttp
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from policy.denials import NOT_APPROVED
from policy.grants.credentials import InjectRule, InjectSet
from sandbox.network.inject import judge, question, relay, scrub, wire
from sandbox.network.inject.judge import RequestRefusedError
from sandbox.network.inject.limits import RequestRate
from sandbox.network.inject.line import InjectEntry, Line, NoLeaseError
from sandbox.network.inject.upstream import HEADER_BYTES, HostClient

CONNECTIONS: Final = 192
HANDSHAKE_SECONDS: Final = 30
_TARGET_CHARACTERS: Final = 400
_NO_LINGER: Final = struct.pack("ii", 1, 0)
# A body in which placeholders are exchanged; a longer one is passed on as it is.
EXCHANGED_BYTES: Final = 64 << 10
_OPTIONS: Final[dict[str, Any]] = {
    "access_log": None,
    "auto_decompress": False,
    "max_line_size": HEADER_BYTES,
    "max_field_size": HEADER_BYTES,
    "keepalive_timeout": 86_400,
    "lingering_time": 0,
}


class Conversation(RequestHandler):  # type: ignore[misc,type-arg,unused-ignore]
    """One connection of the agent to ``host``, and the client of the connection that was made for it."""

    host: str
    port: int
    client: HostClient
    ended: asyncio.Future[None]
    denied: Callable[[str, str], None]
    is_busy = is_over = False

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell that the agent has gone."""
        super().connection_lost(exc)
        if not self.ended.done():
            self.ended.set_result(None)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Refuse what is no request. The parser's own words are not told: they quote what was sent.

        An answer that was under way when its connection was cut ends here too, and is no fault of the agent's.
        """
        is_cut = self.transport is None or self.transport.is_closing()
        if is_cut and isinstance(exc, ConnectionError):
            return _refusal(status, "host_failed", "the connection was cut")
        self.denied(f"https://{self.host}: no request of HTTP/1.1", "frame_refused")
        return _refusal(status, "frame_refused", "this is no request of HTTP/1.1")

    def host_ended(self) -> None:
        """End the agent's connection as the host did its own, once no request is under way."""
        self.is_over = True
        if not self.is_busy:
            self.close()
            if self.transport is not None:
                self.transport.close()


class _Held(NamedTuple):
    """A request that was held: its body, its digest, and its own value of the gate's header (``_own``)."""

    body: bytes
    digest: str
    own: str


class InjectServer:
    """Answers the requests of one agent. ``contexts`` are those of its hosts, ``verify`` is for the real ones."""

    def __init__(
        self, injected: InjectSet, contexts: Mapping[str, ssl.SSLContext], verify: ssl.SSLContext, line: Line
    ) -> None:
        self._injected, self._contexts, self._verify, self._line = injected, contexts, verify, line
        # Refusals are told from the moment on that the process is sealed.
        self.denied: Callable[[str, str], None] = lambda target, code: None
        self.tokens, self._rate = scrub.TokenPlaceholders(), RequestRate()
        self._tasks: set[asyncio.Task[None]] = set()
        self._manager = web.Server(self.handle, handler_cancellation=True)

    def take(self, host: str, port: int, agent: socket.socket, made: socket.socket) -> asyncio.Task[None]:
        """Serve a connection to ``host``. Both sockets are taken over."""
        task = asyncio.get_running_loop().create_task(self._serve(host, port, agent, made))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, host: str, port: int, agent: socket.socket, made: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        context = self._contexts.get(host)
        if context is None or len(self._tasks) > CONNECTIONS:
            agent.close()
            made.close()
            return
        one = Conversation(self._manager, loop=loop, **_OPTIONS)
        one.host, one.port, one.ended, one.denied = host, port, loop.create_future(), self.denied
        one.client = HostClient(made, host, port, self._verify, one.host_ended)
        try:
            await loop.connect_accepted_socket(lambda: one, agent, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS)
            await one.ended
        except (OSError, TimeoutError):
            self.denied(f"{host}:{port}", "handshake_failed")
        finally:
            await one.client.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        one = request.protocol
        assert isinstance(one, Conversation)
        one.is_busy = True
        try:
            return await self._answer(one, request)
        except RequestRefusedError as e:
            target = f"{request.method[:16]} https://{one.host}{request.raw_path.partition('?')[0][:200]}: {e.message}"
            self.denied("".join(ch if ch.isprintable() else "?" for ch in target)[:_TARGET_CHARACTERS], e.code)
            return _refusal(e.status, e.code, e.message)
        finally:
            one.is_busy = False
            if one.is_over:
                one.close()

    async def _answer(self, one: Conversation, request: web.BaseRequest) -> web.StreamResponse:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers]
        judge.frame(request, headers, one.host, one.port)
        rules, asked = self._injected.at(one.host), self._injected.asked_at(one.host)
        is_granted = judge.granted(request.method, request.raw_path, rules, asked)
        rule = (*rules, *asked)[0]
        self._rate.take()
        path = request.raw_path.partition("?")[0]
        held = None if is_granted else await self._hold(one, request, headers, rule)
        try:
            entry, secret = await self._line.ask(one.host, request.method, path, held.digest if held else "")
        except NoLeaseError:
            raise _unapproved() from None
        self._line.cut_by(entry, functools.partial(self._cut, one, f"{request.method} https://{one.host}{path}"))
        try:
            if secret is None:
                raise RequestRefusedError(403, "secret_absent", "the vault has no secret for this request")
            if held and held.own != self._own(rule, headers):
                raise RequestRefusedError(503, "not_held", "the token of the request was forgotten meanwhile")
            return await self._pass_on(one, request, headers, rule, secret, entry, held.body if held else None)
        finally:
            self._line.end(entry)

    async def _hold(
        self, one: Conversation, request: web.BaseRequest, headers: judge.Headers, rule: InjectRule
    ) -> _Held:
        """Wait for an operator. Returns what was read for the question.

        Raises:
            RequestRefusedError: it cannot be held, or may not be sent.
        """
        body = await question.body_of(request)
        passed, own = judge.passed_on(headers, rule.header), self._own(rule, headers)
        passed += [(rule.header, own)] if own else []
        asked = question.of(request.method, one.host, one.port, request.raw_path, passed, body)
        if not await self._line.hold(asked):
            raise _unapproved()
        if one.is_over:  # the lease is not used: the next try of the same request finds it
            raise RequestRefusedError(503, "host_failed", f"{one.host} ended the connection meanwhile: try again")
        return _Held(body, asked.digest, own)

    async def _pass_on(
        self,
        one: Conversation,
        request: web.BaseRequest,
        headers: judge.Headers,
        rule: InjectRule,
        secret: bytes,
        entry: InjectEntry,
        read: bytes | None,
    ) -> web.StreamResponse:
        value = self._value(rule, headers, secret)
        # Now: a token that is sent could be forgotten before it comes back.
        answer = relay.HostAnswer(self.tokens, rule.secret, self._hidden(rule, secret))
        sent = [*judge.passed_on(headers, rule.header), ("Accept-Encoding", "identity"), (rule.header, value)]
        body = await self._body(request, rule.secret, entry, sent, read)
        try:
            response = await one.client.send(request.method, request.raw_path, sent, body)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            says = "its certificate is none that the operator trusts" if _is_certificate(e) else "it does not answer"
            raise RequestRefusedError(502, "host_failed", f"{one.host}: {says}") from e
        entry.status = response.status
        try:
            return await answer.passed_on(request, response, entry)
        finally:
            response.release() if entry.whole else response.close()

    def _cut(self, one: Conversation, target: str, code: str) -> None:
        """End a request whose secret or lease is gone. The host's connection ends with the agent's."""
        self.denied(target[:_TARGET_CHARACTERS], code)
        if one.transport is not None:
            # The kernel would still send what the agent has not taken yet (socket(7)).
            line = one.transport.get_extra_info("socket")
            if line is not None:  # otherwise TLS has lost the connection in this turn
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            one.transport.abort()

    def _value(self, rule: InjectRule, headers: judge.Headers, secret: bytes) -> str:
        """The header's value: with the token of a placeholder that the agent wrote there, else with the secret."""
        if own := self._own(rule, headers):
            return self.tokens.exchange(rule.secret, own)
        if len(secret) < wire.LEAST_BYTES or any(not 0x20 < char < 0x7F for char in secret):
            raise RequestRefusedError(
                502, "secret_malformed", "the secret is shorter than 8 bytes, or no one word of ASCII"
            )
        return rule.format.replace("{}", _inner(rule, secret))

    def _own(self, rule: InjectRule, headers: judge.Headers) -> str:
        """The agent's own value of the header, where it has the placeholder of a token. Else empty."""
        own = [value for name, value in headers if name.lower() == rule.header.lower()]
        return own[0] if len(own) == 1 and self.tokens.exchange(rule.secret, own[0]) != own[0] else ""

    def _hidden(self, rule: InjectRule, secret: bytes) -> list[bytes]:
        """The bytes that stay outside: the secret and the tokens behind placeholders, in each form."""
        known = [secret, *(token.encode() for token in self.tokens.known(rule.secret).values())]
        found = [form for one in known if len(one) >= wire.LEAST_BYTES for form in scrub.forms(one)]
        return [*found, _inner(rule, secret).encode()] if rule.user else found

    async def _body(
        self,
        request: web.BaseRequest,
        group: str,
        entry: InjectEntry,
        sent: list[tuple[str, str]],
        read: bytes | None,
    ) -> bytes | AsyncIterator[bytes] | None:
        """The request's body, with its length among the headers that are sent. ``read``: it was read already."""
        if "Expect" in request.headers and read is None:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length, kind = request.content_length, judge.kind_of(request.headers)
        if not request.body_exists:
            if length == 0:
                sent.append(("Content-Length", "0"))
            return None
        written = _WRITTEN.get(kind)
        if written is None or length is None or length > EXCHANGED_BYTES or not self.tokens.known(group):
            if length is not None:
                sent.append(("Content-Length", str(length)))
            entry.outward += len(read or b"")
            return _counted(request, entry) if read is None else read
        text = (await request.content.read(-1) if read is None else read).decode("latin-1")
        data = self.tokens.exchange(group, text, written).encode("latin-1")
        entry.outward += len(data)
        sent.append(("Content-Length", str(len(data))))
        return data


def _unapproved() -> RequestRefusedError:
    return RequestRefusedError(403, NOT_APPROVED, "an operator is asked about the request, and none granted it")


def _refusal(status: int, code: str, message: str) -> web.Response:
    body = json.dumps({"error": {"code": code, "message": f"covenant: {message}"}}).encode()
    refused = web.Response(status=status, body=body, content_type="application/json")
    refused.force_close()
    return refused


async def _counted(request: web.BaseRequest, entry: InjectEntry) -> AsyncIterator[bytes]:
    async for chunk in request.content.iter_any():
        entry.outward += len(chunk)
        yield chunk


def _inner(rule: InjectRule, secret: bytes) -> str:
    """The text in the place of ``{}``."""
    text = secret.decode("latin-1")
    return base64.b64encode(f"{rule.user}:{text}".encode("latin-1")).decode() if rule.user else text


def _json_text(value: str) -> str:
    return json.dumps(value)[1:-1]


def _form_text(value: str) -> str:
    return quote_plus(value)


# How a token is written into a body.
_WRITTEN: Final[Mapping[str, Callable[[str], str]]] = {relay.JSON: _json_text, relay.FORM: _form_text}


def _is_certificate(error: BaseException) -> bool:
    """Whether the host's certificate is what failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, ssl.SSLCertVerificationError)
