"""An OpenTelemetry collector, asked by OTLP/HTTP with JSON bodies (opentelemetry.io/docs/specs/otlp, OTLP/HTTP)."""

from __future__ import annotations

import asyncio
import email.utils
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from covenant.export.cursor import Cursor
from covenant.export.sinks import About, RowBatch
from policy import errors
from policy.audit_log import exported, otlp

TIMEOUT_SECONDS: Final = 10.0
METRICS_SECONDS: Final = 15.0
_MOST_ANSWER: Final = 64 * 1024
# A collector may ask for a pause of at most this length.
_MOST_PAUSE_SECONDS: Final = 300.0
# The request itself is wrong or too large: it is divided until the one record is found that is refused.
_DIVIDED: Final = (400, 413, 422)
_REJECTED: Final = {"logs": "rejectedLogRecords", "traces": "rejectedSpans", "metrics": "rejectedDataPoints"}


class Posting:
    """Records in one request, and the function that encodes some of them."""

    def __init__(self, make: Callable[[Sequence[Any]], bytes], records: Sequence[Any]) -> None:
        self.make, self.records, self.body = make, records, make(records)


@dataclass(frozen=True)
class _Content:
    """One batch: the rows, for the sums, and the requests with their log's name."""

    log: exported.Log
    rows: Sequence[exported.ExportedRow]
    logs: Posting
    traces: Posting | None


class Collector:
    """Post requests to one collector until it acknowledges them."""

    def __init__(self, url: str, about: About, *, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        self._url = url.rstrip("/")
        self._about = about
        self._headers = {
            **headers,
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": f"covenant/{about.version}",
        }
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Collector:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            # An answer that unpacks to gigabytes is not unpacked.
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, signal: str, request: Posting) -> None:
        """Post records until each is accepted or refused by itself. An outage is waited for.

        Raises:
            errors.ExportTimeoutError: it took nothing for as long as this export waits.
        """
        make = request.make
        pending = [(request.body, request.records)]
        backoff = self._about.backoff(f"the collector at `{self._url}`")
        while pending:
            body, part = pending.pop()
            status, pause, said = await self._once(signal, body)
            if 200 <= status < 300:
                if (lasted := backoff.succeeded()) is not None:
                    self._about.tell(f"the collector takes {signal} again, after {lasted:.0f} s")
                continue
            if status in _DIVIDED and len(part) > 1:
                middle = len(part) // 2
                pending += [(make(one), one) for one in (part[middle:], part[:middle])]
                continue
            if status in _DIVIDED:
                self._about.tell(f"the collector refused one of the {signal} ({status}): {said}; it is left out")
                continue
            if backoff.since is None:
                self._about.tell(f"the collector takes no {signal}: {said}; they wait in the log")
            pending.append((body, part))
            await asyncio.sleep(backoff.failed(pause))

    async def offer(self, signal: str, body: bytes) -> bool:
        """Post once. Returns whether it was accepted."""
        status, _, _ = await self._once(signal, body)
        return 200 <= status < 300

    async def _once(self, signal: str, body: bytes) -> tuple[int, float, str]:
        """Return the status, 0 where none came, the pause that was asked for, and the reason in words."""
        assert self._session is not None
        try:
            async with self._session.post(
                f"{self._url}/v1/{signal}",
                data=body,
                headers=self._headers,
                ssl=self._tls if self._tls is not None else True,
                allow_redirects=False,
            ) as answer:
                raw = await answer.content.read(_MOST_ANSWER)
                self._partly(signal, answer.status, raw)
                return answer.status, pause_of(answer.headers.get("Retry-After", "")), f"it answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            return 0, 0.0, str(e) or type(e).__name__

    def _partly(self, signal: str, status: int, raw: bytes) -> None:
        """Report what a collector took in part: it must not be sent again (OTLP, partial success)."""
        if not 200 <= status < 300 or not raw:
            return
        try:
            partly = json.loads(raw).get("partialSuccess") or {}
            rejected = int(partly.get(_REJECTED[signal]) or 0)
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
            return
        if rejected or partly.get("errorMessage"):
            said = str(partly.get("errorMessage", ""))[:200]
            self._about.tell(f"the collector refused {rejected} of the {signal}, which are left out: {said}")


class OtlpSink:
    """The rows of one log as logs, spans and sums."""

    name = "otlp"

    def __init__(self, collector: Collector, about: About) -> None:
        self._collector = collector
        self._about = about
        self._spans = otlp.Spans()
        self._sums = otlp.Sums(time.time_ns())
        self._log: exported.Log | None = None

    def resume(self, cursor: Cursor) -> None:
        """Go on with the runs that had started."""
        self._spans = otlp.Spans(cursor.open_runs)

    def make(self, rows: Sequence[exported.ExportedRow], log: exported.Log, cursor: Cursor) -> RowBatch:
        """Encode the rows, and the spans that end with them. The cursor gets the runs that have started."""
        about, version, now_ns = self._resource(log), self._about.version, time.time_ns()
        spans = [span for row in rows if (span := self._spans.take(row)) is not None]
        content = _Content(
            log,
            rows,
            Posting(lambda part: otlp.logs(about, part, version), [otlp.log_record(row, now_ns) for row in rows]),
            Posting(lambda part: otlp.traces(about, part, version), spans) if spans else None,
        )
        begun = [(run, tuple(one)) for run, one in self._spans.state]
        return RowBatch(content, Cursor(cursor.origin, cursor.position, begun))

    async def deliver(self, content: _Content) -> None:
        """Post the rows, then the spans."""
        self._log = content.log
        await self._collector.post("logs", content.logs)
        if content.traces is not None:
            await self._collector.post("traces", content.traces)
        for row in content.rows:
            self._sums.take(row)

    async def post_sums(self) -> None:
        """Post the sums once. A failure costs nothing: the next request has them all."""
        if self._log is not None:
            body = self._sums.request(self._resource(self._log), time.time_ns(), self._about.version)
            await self._collector.offer("metrics", body)

    def _resource(self, log: exported.Log) -> dict[str, Any]:
        return otlp.resource(log, host=self._about.host, version=self._about.version)


def pause_of(text: str) -> float:
    """The seconds of a Retry-After header: a number or a date (RFC 9110, section 10.2.3)."""
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), _MOST_PAUSE_SECONDS)
    try:
        until = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(0.0, until - time.time()), _MOST_PAUSE_SECONDS)


def trusted(ca: str) -> ssl.SSLContext:
    """A context that trusts one file of authorities alone.

    Raises:
        errors.ConfigError: it cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as e:
        raise errors.ConfigError(f"the authorities in `{ca}` cannot be read: {e}", where=ca) from e
