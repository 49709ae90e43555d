"""Telemetry at the service gate in its real processes, sealed, before a collector on the loopback.

Each hostile request has its control: the gate and its reader take a good one after it.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.rpc import status_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from sandbox.network.service import gate
from sandbox.network.service.ledger import TelemetryRelayed
from tests.kernel import fake_collector, gated_models
from tests.kernel.fake_collector import Collector
from tests.kernel.gated_models import Gated

SECONDS = float(os.environ.get("COVENANT_FUZZ_SECONDS", "3"))
STAMP = {"covenant.run.id": "run-1", "covenant.agent.id": "asker", "covenant.package.digest": "d1"}
PROTOBUF, JSON = "application/x-protobuf", "application/json"


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def part(field: int, content: bytes) -> bytes:
    """A field of protobuf that has a length."""
    return bytes([field << 3 | 2]) + varint(len(content)) + content


def attribute(key: str, value: bytes = b"") -> bytes:
    return part(1, key.encode()) + part(2, value or part(1, b"v"))


def request(*attributes: bytes, spans: int = 1) -> bytes:
    """A request of traces: one resource with these attributes, and spans."""
    resource = part(1, b"".join(part(1, one) for one in attributes))
    return part(1, resource + part(2, b"".join(part(2, part(5, b"name")) for _ in range(spans))))


def nested(levels: int) -> bytes:
    value = part(1, b"v")
    for _ in range(levels):
        value = part(5, part(1, value))
    return value


GOOD = request(attribute("own"))
FORGED = request(attribute("covenant.run.id"), attribute("COVENANT_run-id"), attribute("own"))
TEXT = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "covenant.run.id", "value": {"stringValue": "forged"}}]},
            "scopeSpans": [{"spans": [{"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "EEE19B7EC3C1B174"}]}],
            "unknown": {"resource": {}},
        }
    ]
}
# Name -> body, form, and the status.
HOSTILE: dict[str, tuple[bytes, dict[str, str], int]] = {
    "nested": (request(attribute("own", nested(5000))), {}, 400),
    "huge length": (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", {}, 400),
    "varint of eleven bytes": (b"\x0a" + b"\xff" * 11, {}, 400),
    "number 0": (b"\x02\x00", {}, 400),
    "cut": (GOOD[:-3], {}, 400),
    "text that is no UTF-8": (request(attribute("own", part(1, b"\xff\xfe"))), {}, 400),
    "two million resources": (b"\x0a\x00" * (2 << 20), {}, 413),
    "two million spans": (part(1, part(2, b"\x12\x00" * ((2 << 20) - 8))), {}, 413),
    "millions of unknown fields": (b"\x78\x00" * (2 << 20), {}, 413),
    "many resources": (b"\x0a\x00" * 1025, {}, 413),
    "many attributes": (request(*[b""] * 140_000), {}, 413),
    "many values": (request(attribute("own", part(5, b"\x0a\x00" * 140_000))), {}, 413),
    "long key": (request(attribute("a" * 257)), {}, 400),
    "key of combining characters": (request(attribute("\u0315\u0300" * 900_000)), {}, 400),
    "too large": (request(attribute("own", part(1, b"a" * (4 << 20)))), {}, 413),
    "bomb": (gzip.compress(bytes(64 << 20)), {"Content-Encoding": "gzip"}, 413),
    "two streams": (gzip.compress(GOOD) * 2, {"Content-Encoding": "gzip"}, 400),
    "half a stream": (gzip.compress(GOOD)[:-9], {"Content-Encoding": "gzip"}, 400),
    "no stream": (GOOD, {"Content-Encoding": "gzip"}, 400),
    "zlib": (GOOD, {"Content-Encoding": "deflate"}, 415),
    "gzip twice": (gzip.compress(gzip.compress(GOOD)), {"Content-Encoding": "gzip, gzip"}, 415),
    "text": (GOOD, {"Content-Type": "text/plain"}, 415),
    "of a page": (GOOD, {"Origin": "http://x"}, 415),
    "JSON for protobuf": (json.dumps(TEXT).encode(), {}, 400),
    "protobuf for JSON": (GOOD, {"Content-Type": JSON}, 400),
    "JSON that nests": (b'{"resourceSpans":' + b"[" * 9999 + b"]" * 9999 + b"}", {"Content-Type": JSON}, 400),
    "JSON that nests in a value": (
        json.dumps({"a": 1}).encode().replace(b"1", b'{"a":' * 99 + b"1" + b"}" * 99), {"Content-Type": JSON}, 400
    ),
    "JSON with a key twice": (b'{"resourceSpans": [], "resourceSpans": []}', {"Content-Type": JSON}, 400),
    "JSON with a key of surrogates twice": (b'{"\\ud800": 1, "\\ud800": 1}', {"Content-Type": JSON}, 400),
    "JSON with half a surrogate pair": (b'{"\\ud800": 1}', {"Content-Type": JSON}, 400),
    "JSON with a number that no double holds": (
        json.dumps(TEXT).replace('{"stringValue": "forged"}', '{"doubleValue": 1' + "0" * 400 + "}").encode(),
        {"Content-Type": JSON}, 400,
    ),
    "JSON in UTF-16": ('{"resourceSpans": []}'.encode("utf-16"), {"Content-Type": JSON}, 400),
    "JSON with many values": (b'{"resourceSpans": [' + b"{}," * 70_000 + b"{}]}", {"Content-Type": JSON}, 400),
    "JSON with an odd id": (json.dumps(TEXT).replace("EEE1", "ZZZ1").encode(), {"Content-Type": JSON}, 400),
    "JSON list": (b"[]", {"Content-Type": JSON}, 400),
    "JSON number": (b"9" * 5000, {"Content-Type": JSON}, 400),
}  # fmt: skip


class Sender:
    """Sends requests of the agent."""

    def __init__(self, gated: Gated) -> None:
        self._gated = gated

    def __call__(self, body: bytes, path: str = "/v1/traces", method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Status, and the answer's bytes with its headers."""
        with self._gated.connect() as made:
            line = http.client.HTTPConnection("telemetry.covenant")
            line.sock = made
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            line.request(method, path, body, {"Content-Type": PROTOBUF, **named})
            found = line.getresponse()
            return found.status, (found.read(), found.headers)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with fake_collector.serving() as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_seen(collector: Collector) -> None:
    collector.seen.clear()


def _opened(collector: Collector, url: str = "", **limits: int) -> Any:
    telemetry = {"signals": ["traces"], "bytes_per_minute": None, "requests_per_minute": None, **limits}
    there = gate.Collector(url or collector.url, STAMP, {"X-Key": "k"})
    return gated_models.opened("", names=["telemetry.covenant"], models=[], telemetry=telemetry, collector=there)


def _rows(gated: Gated) -> list[TelemetryRelayed]:
    gated.look()
    return [one for one in gated.rows if isinstance(one, TelemetryRelayed)]


def _message(body: bytes) -> str:
    return str(status_pb2.Status.FromString(body).message)


def test_hostile_requests_reach_no_collector(collector: Collector) -> None:
    with _opened(collector, requests_per_minute=6000) as gated:
        send = Sender(gated)
        for name, (body, headers, status) in HOSTILE.items():
            answered, (said, about) = send(body, **{key.replace("-", "_"): value for key, value in headers.items()})
            assert answered == status, name
            is_json = headers.get("Content-Type") == JSON
            assert about["Content-Type"] == (JSON if is_json else PROTOBUF), name
            assert json.loads(said)["message"] if is_json else _message(said), name
        assert not collector.seen
        assert not _rows(gated)
        assert send(GOOD)[0] == 200
        assert gated.lives()


def test_each_form_comes_with_the_run_alone(collector: Collector) -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, FORGED[at : at + 1]) for at in range(len(FORGED))) + b"0\r\n\r\n"
    with _opened(collector, requests_per_minute=6000) as gated:
        send = Sender(gated)
        assert send(FORGED)[1][0] == b""
        # A field that is written twice is read as both together.
        assert send(part(1, part(1, part(1, attribute("covenant.run.id")))) + FORGED + part(15, b"odd"))[0] == 200
        assert send(gzip.compress(FORGED), Content_Encoding="gzip")[0] == 200
        status, (said, _) = send(json.dumps(TEXT).encode(), Content_Type=JSON)
        assert (status, json.loads(said)) == (200, {})
        with gated.connect() as line:
            head = "POST /v1/traces HTTP/1.1\r\nHost: telemetry.covenant\r\nTransfer-Encoding: chunked\r\n"
            line.sendall(f"{head}Content-Type: {PROTOBUF}\r\n\r\n".encode() + chunks)
            assert line.recv(99).startswith(b"HTTP/1.1 200")
        # No resource at all.
        assert send(part(1, part(2, part(2, part(5, b"n")))))[0] == 200
        assert send(b"")[0] == 200
        found = collector.resources("/v1/traces")
        assert len(found) == 7
        for one in found:
            assert {key: values for key, values in one.items() if "covenant" in key.lower()} == {
                key: [value] for key, value in STAMP.items()
            }
        assert [one.get("own") for one in found] == [["v"], None, ["v"], ["v"], None, ["v"], None]
        (span,) = collector.seen[3][1].resource_spans[0].scope_spans[0].spans
        assert (span.trace_id.hex(), span.span_id.hex()) == ("5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174")
        assert collector.headers["x-key"] == "k"
        assert next((row.signal, row.status, row.records, row.bytes) for row in _rows(gated)) == (
            "traces",
            200,
            1,
            len(FORGED),
        )


def test_only_granted_signals_and_paths_are_answered(collector: Collector) -> None:
    with _opened(collector) as gated:
        send = Sender(gated)
        assert send(GOOD, "/v1/metrics")[0] == 403
        for path in ("/v1/logs", "/v1/profiles", "/v1/traces/", "/v1/traces?a=b", "//v1/traces", "/", "/v1/%74races"):
            assert send(GOOD, path)[0] in (403, 404), path
        assert send(GOOD, method="PUT")[0] == 405
        assert send(b"", method="GET")[0] == 405
        assert not collector.seen
        codes = gated.codes()
        assert set(codes) == {"signal_not_granted", "path_refused"}


def test_limits_of_a_minute_answer_429(collector: Collector) -> None:
    with _opened(collector, requests_per_minute=3) as gated:
        send = Sender(gated)
        assert [send(GOOD)[0] for _ in range(4)] == [200, 200, 200, 429]
        status, (said, about) = send(GOOD)
        assert status == 429
        assert 0 < int(about["Retry-After"]) <= 61
        assert "requests_per_minute is 3" in _message(said)
    with _opened(collector, bytes_per_minute=2 * len(GOOD)) as gated:
        send = Sender(gated)
        large = request(attribute("own", part(1, b"a" * 200)))
        # What is counted is unpacked.
        assert send(gzip.compress(large), Content_Encoding="gzip")[0] == 413
        assert [send(GOOD)[0] for _ in range(3)] == [200, 200, 429]
        assert [row.bytes for row in _rows(gated)] == [len(GOOD)] * 2
        assert set(gated.codes()) == {"limit"}


def test_collector_that_fails_is_told_to_the_agent(collector: Collector) -> None:
    response = trace_service_pb2.ExportTraceServiceResponse()
    response.partial_success.rejected_spans = 2
    response.partial_success.error_message = "words of the operator's"
    with _opened(collector, requests_per_minute=6000) as gated:
        send = Sender(gated)
        collector.answers = [(200, {}, response.SerializeToString())] * 2
        status, (said, _) = send(request(spans=3))
        found = trace_service_pb2.ExportTraceServiceResponse.FromString(said)
        assert (status, found.partial_success.rejected_spans) == (200, 2)
        assert b"operator" not in said
        assert json.loads(send(json.dumps(TEXT).encode(), Content_Type=JSON)[1][0])["partialSuccess"]["rejectedSpans"]
        answers = ((400, 400), (413, 400), (401, 502), (302, 502), (404, 502), (500, 502), (200, 200))
        collector.answers = [(status, {"Location": "/v1/logs"}, b"words") for status, _ in answers]
        assert [send(GOOD)[0] for _ in answers] == [status for _, status in answers]
        # An answer that is none of OTLP is one that took all.
        collector.answers = [(200, {}, b"\xff" * 100_000), (503, {"Retry-After": "99999999999"}, b"")]
        assert send(GOOD)[0] == 200
        before = len(collector.seen)
        status, (said, about) = send(GOOD)
        assert (status, about["Retry-After"], _message(said)) == (503, "5", "the collector answers 503")
        # Until then it is left alone.
        assert send(GOOD)[0] == 503
        assert len(collector.seen) == before + 1
        rows = _rows(gated)
        assert [(row.status, row.records, row.rejected) for row in rows[:2]] == [(200, 3, 2), (200, 1, 2)]
        assert rows[-1].status == 503
        assert gated.lives()


def test_collector_that_is_away_keeps_nothing(collector: Collector) -> None:
    with fake_collector.serving() as gone:
        url = gone.url
    with _opened(collector, url, requests_per_minute=6000) as gated:
        send = Sender(gated)
        status, (said, about) = send(GOOD)
        assert (status, _message(said)) == (503, "the collector does not answer: Connection refused")
        assert about["Retry-After"] == "5"
        assert [row.status for row in _rows(gated)] == [0]
        assert gated.lives()


def test_agent_that_leaves_stops_no_other(collector: Collector) -> None:
    with _opened(collector, requests_per_minute=6000) as gated:
        body = request(*[attribute("own")] * 20_000)
        head = f"POST /v1/traces HTTP/1.1\r\nHost: telemetry.covenant\r\nContent-Type: {PROTOBUF}\r\n"
        for sent in (len(body), len(body) // 2):
            with contextlib.ExitStack() as stack:
                for line in [stack.enter_context(gated.connect()) for _ in range(6)]:
                    # The gate may be busy with those that left.
                    with contextlib.suppress(ConnectionError):
                        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:sent])
        until = time.monotonic() + 60
        while Sender(gated)(GOOD)[0] != 200:
            assert time.monotonic() < until
            time.sleep(0.2)
        assert gated.lives()


def test_mutated_requests_leave_the_stamp(collector: Collector) -> None:
    chance = random.Random(seed := random.randrange(1 << 32))
    seeds = [FORGED, json.dumps(TEXT).encode(), request(attribute("own", nested(20)), spans=3)]
    pieces = [b"covenant.run.id", b"\x0a\x00", b"\xff", b"\x12", b"\x80", b'"covenant.run.id"', b"[", b"}", b"null"]
    with _opened(collector, requests_per_minute=6000) as gated:
        send = Sender(gated)
        until, statuses = time.monotonic() + SECONDS, set()
        while time.monotonic() < until:
            body = bytearray(chance.choice(seeds))
            for _ in range(chance.randrange(1, 6)):
                at = chance.randrange(len(body) + 1)
                body[at : at + chance.randrange(3)] = chance.choice([*pieces, bytes([chance.randrange(256)])])
            kind = JSON if chance.random() < 0.4 else PROTOBUF
            statuses.add(send(bytes(body), Content_Type=kind)[0])
            if len(_rows(gated)) > 5000:
                break
        assert statuses <= {200, 400, 413, 429}, seed
        for one in collector.resources("/v1/traces"):
            assert {key: one[key] for key in STAMP} == {key: [value] for key, value in STAMP.items()}, seed
        assert gated.lives(), seed
