"""Answer ``telemetry.covenant`` in the service gate's process: OTLP/HTTP of one agent, for the operator's collector.

    POST http://telemetry.covenant/v1/traces     also /v1/metrics and /v1/logs; protobuf or JSON, also by gzip

    (1) the frame: path, signal, form           (4) the bytes of a minute
    (2) the requests of a minute                (5) the collector, once
    (3) the reader: count, clean, stamp         (6) its answer, in OTLP's own form

Nothing is kept: while the collector is away the agent is told to come again, as OTLP has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

import aiohttp
from aiohttp import web

from policy.grants.services import SENTENCES
from sandbox.network.service.book import Book
from sandbox.network.service.limits import MINUTE, ModelLimits
from sandbox.network.service.shapes import RefusedError
from sandbox.network.service.telemetry import wire
from sandbox.network.service.telemetry.line import TelemetryReader
from sandbox.network.service.upstream import ProviderClient

NAME: Final = "telemetry.covenant"
PROTOBUF, JSON = "application/x-protobuf", "application/json"
# Where the manifest sets no limit.
REQUESTS: Final = 600
BYTES: Final = 64 << 20
AT_ONCE: Final = 8
_SECONDS: Final = 10.0
# How long a collector that did not answer is left alone (seconds), and how long it may ask to be.
_PAUSE: Final = 5
_MOST_PAUSE: Final = 300
_PATH: Final = re.compile(r"/v1/(traces|metrics|logs)")
# Statuses after which OTLP has a client come again.
_LATER: Final = frozenset({429, 502, 503, 504})
_REFUSED: Final = frozenset({400, 413, 422})


class TelemetryRequest(NamedTuple):
    """One request: its signal, and its form."""

    signal: str
    is_json: bool
    is_gzip: bool


class CollectorAnswer(NamedTuple):
    """The collector's status, the seconds that it asks for, and its body. Status 0: there was none; ``why`` says so."""

    status: int
    wait: int
    body: bytes
    why: str = ""


class TelemetryEndpoint:
    """Answers one agent's requests. Without ``collector`` it is granted nothing."""

    def __init__(
        self,
        plan: Mapping[str, Any],
        reader: TelemetryReader | None,
        collector: ProviderClient | None,
        book: Book,
        body: Callable[[web.BaseRequest], Awaitable[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.denied: Callable[[str, str], None] = lambda target, code: None
        self._signals = frozenset(plan.get("signals", ()))
        self._reader, self._collector, self._book, self._body, self._clock = reader, collector, book, body, clock
        self._requests = ModelLimits(plan.get("requests_per_minute") or REQUESTS, None, clock=clock)
        self._bytes = ByteLimit(plan.get("bytes_per_minute") or BYTES, clock)
        self._busy = 0
        self._again = 0.0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whose frame was looked at."""
        is_json = request.content_type == JSON
        kind = JSON if is_json else PROTOBUF
        try:
            if self._busy >= AT_ONCE:
                raise RefusedError(429, "limit", f"more than {AT_ONCE} requests at once", retry_seconds=1)
            self._busy += 1
            # All of the body is read before a refusal: a client that still sends does not see one.
            try:
                body = await self._body(request)
                asked = self._asked(request, body)
            except BaseException:
                self._busy -= 1
                raise
            return web.Response(body=await self._whole(asked, body), content_type=kind)
        except RefusedError as e:
            # The reason of a body that is malformed may quote it: the agent gets it, the log does not.
            reason = "" if e.code == "malformed" else f": {e.message}"
            self.denied(f"{request.method[:16]} {request.path[:200]}{reason}"[:400], e.code)
            retry = {} if e.retry_seconds is None else {"Retry-After": str(e.retry_seconds)}
            said = status(e.message, is_json=is_json)
            refused = web.Response(status=e.status, body=said, content_type=kind, headers=retry)
            if e.code in ("malformed", "frame_refused"):
                refused.force_close()
            return refused

    async def _whole(self, asked: TelemetryRequest, body: bytes) -> bytes:
        """Relay a request that is there, also where the agent leaves: the reader's line stays in step."""
        task = asyncio.ensure_future(self._relayed(asked, body))
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Future[bytes]) -> None:
        self._busy -= 1
        if not task.cancelled():
            task.exception()  # the agent may have left: then it is read here alone

    # --- (1) ------------------------------------------------------------------------------------------------

    def _asked(self, request: web.BaseRequest, body: bytes) -> TelemetryRequest:
        found = _PATH.fullmatch(request.raw_path)
        if found is None:
            raise RefusedError(404, "path_refused", "OTLP is at /v1/traces, /v1/metrics and /v1/logs")
        if request.method != "POST":
            raise RefusedError(405, "path_refused", "OTLP is sent by POST")
        if found[1] not in self._signals:
            raise RefusedError(403, "signal_not_granted", SENTENCES["signal_not_granted"].format(found[1]))
        packed = request.headers.getall("Content-Encoding", ["identity"])
        if packed not in (["identity"], ["gzip"]):
            raise RefusedError(415, "frame_refused", "a body is plain, or of gzip")
        kinds = request.headers.getall("Content-Type", [])
        if len(kinds) != 1 or request.content_type not in (PROTOBUF, JSON) or "Origin" in request.headers:
            raise RefusedError(415, "frame_refused", f"a body is {PROTOBUF} or {JSON}, and of no page")
        if len(body) > wire.BODY_BYTES:
            raise RefusedError(413, "frame_refused", f"a request has at most {wire.BODY_BYTES} bytes")
        return TelemetryRequest(found[1], request.content_type == JSON, packed == ["gzip"])

    # --- (2) to (6) -----------------------------------------------------------------------------------------

    async def _relayed(self, asked: TelemetryRequest, body: bytes) -> bytes:
        reader, collector = self._reader, self._collector
        if reader is None or collector is None:
            raise RefusedError(503, "no_provider", "the operator names no collector for agents")
        await self._requests.begin(None)
        self._bytes.check(0)
        self._collector_is_there()
        made = await reader.stamped(asked.signal, body, is_json=asked.is_json, is_gzip=asked.is_gzip)
        self._bytes.check(made.size)
        if not made.records:
            return b"{}" if asked.is_json else b""
        entry = self._book.begin_telemetry(asked.signal, made.records, made.size)
        status, rejected = 0, 0
        try:
            found = await self._posted(collector, asked.signal, made.body)
            status, answer = found.status, found.body
            if _is_taken(status):
                rejected, answer = await reader.answer(asked.signal, answer, is_json=asked.is_json)
        finally:
            self._book.end_telemetry(entry, status, rejected)
        if not _is_taken(status):
            raise self._failed(found)
        return answer

    def _collector_is_there(self) -> None:
        if (wait := self._again - self._clock()) > 0:
            raise RefusedError(503, "no_provider", "the collector is away", retry_seconds=max(1, int(wait) + 1))

    async def _posted(self, collector: ProviderClient, signal: str, body: bytes) -> CollectorAnswer:
        try:
            async with asyncio.timeout(_SECONDS):
                return CollectorAnswer(*await collector.post_telemetry(f"/v1/{signal}", body, wire.ANSWER_BYTES))
        except TimeoutError:
            return CollectorAnswer(0, _PAUSE, b"", f"no answer in {_SECONDS:.0f} s")
        except (aiohttp.ClientError, OSError, ValueError) as e:
            return CollectorAnswer(0, _PAUSE, b"", _why(e))

    def _failed(self, found: CollectorAnswer) -> RefusedError:
        answered, wait = found.status, found.wait
        if answered in _LATER or answered == 0:
            seconds = min(max(wait, 1), _MOST_PAUSE) if wait else _PAUSE
            self._again = self._clock() + seconds
            silent = f"the collector does not answer: {found.why}"
            said = silent if answered == 0 else f"the collector answers {answered}"
            return RefusedError(503, "no_provider", said, retry_seconds=seconds)
        if answered in _REFUSED:
            return RefusedError(400, "provider_failed", f"the collector refused the request: {answered}")
        code = "key_refused" if answered in (401, 403) else "provider_failed"
        return RefusedError(502, code, f"the collector answers {answered}")


def _why(error: Exception) -> str:
    """Name what failed. The library's own text may name the collector's address, which is the operator's."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else type(cause or error).__name__


def _is_taken(answered: int) -> bool:
    return 200 <= answered < 300


class ByteLimit:
    """The bytes of any minute."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock, self._sum = most, clock, 0
        self._taken: deque[tuple[float, int]] = deque()

    def check(self, size: int) -> None:
        """Count bytes; none to ask whether there is room for any.

        Raises:
            RefusedError: there is no room for them now, or never.
        """
        now = self._clock()
        while self._taken and self._taken[0][0] <= now - MINUTE:
            self._sum -= self._taken.popleft()[1]
        if size > self._most:
            raise RefusedError(413, "limit", f"bytes_per_minute is {self._most}, and the request has {size}")
        if self._sum + max(size, 1) > self._most:
            wait = max(1, int(self._taken[0][0] + MINUTE - now) + 1)
            raise RefusedError(429, "limit", f"bytes_per_minute is {self._most}", retry_seconds=wait)
        if size:
            self._taken.append((now, size))
            self._sum += size


def status(message: str, *, is_json: bool) -> bytes:
    """Return a refusal as OTLP has it: google.rpc.Status, of which the message is field 2."""
    if is_json:
        return json.dumps({"message": message}).encode()
    said = message[:256].encode("utf-8", "replace")
    return b"\x12" + _varint(len(said)) + said


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)
