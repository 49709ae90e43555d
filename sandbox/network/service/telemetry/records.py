"""Requests of OTLP as the reader's process reads and writes them: bounded, without our names, with the run's.

A request is read into the messages of opentelemetry-proto and written anew, as protobuf. So the collector reads what
was judged here: a field that these messages do not know, and a second reading of one that is written twice, are gone.

    (1) unpack                 gzip, one stream, at most ``BODY_BYTES``
    (2) read                   protobuf within ``bounds``, or JSON in OTLP's form: at most ``JSON_VALUES`` values
    (3) count                  at most ``ITEMS`` resources, scopes, records, attributes and values of lists
    (4) remove names of ours   keys that begin with ``covenant``, however it is written
    (5) stamp                  each resource with the attributes of the run, at most ``RESOURCES``
"""

from __future__ import annotations

import base64
import encodings.unicode_escape  # noqa: F401 - wire_json quotes by it, once the reader can open no file
import functools
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from google.protobuf import json_format
from google.protobuf.message import DecodeError, EncodeError, Message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from policy import errors, wire_json
from policy.package import INVISIBLE
from sandbox.network.service.telemetry import bounds, wire

BODY_BYTES: Final = wire.BODY_BYTES
JSON_VALUES: Final = 65_536
ITEMS: Final = 131_072
# The attributes of the run come once for each of them.
RESOURCES: Final = 1024
KEY_CHARACTERS: Final = 256
# Levels of lists and objects in one another, as protobuf's own reader of binary messages has them.
_DEPTH: Final = 100
_KEY_VALUE: Final = "opentelemetry.proto.common.v1.KeyValue"
# In JSON these are hexadecimal (OTLP, "JSON Protobuf Encoding"), where protobuf's own JSON has base64.
_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})
_HEX: Final = re.compile(r"(?:[0-9A-Fa-f]{2}){0,16}")
_ODD: Final = re.compile(r"[^a-z0-9]")
_OURS: Final = re.compile(r"[^a-z0-9]*covenant(?:[^a-z0-9]|$)")


class Signal(NamedTuple):
    """The messages of one signal: ``resources`` is the request's field, ``rejected`` that of a partial success."""

    request: Callable[[], Any]
    response: Callable[[], Any]
    resources: str
    scopes: str
    records: str
    rejected: str


SIGNALS: Final[Mapping[str, Signal]] = {
    "logs": Signal(
        logs_service_pb2.ExportLogsServiceRequest,
        logs_service_pb2.ExportLogsServiceResponse,
        "resource_logs", "scope_logs", "log_records", "rejected_log_records",
    ),
    "metrics": Signal(
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
        "resource_metrics", "scope_metrics", "metrics", "rejected_data_points",
    ),
    "traces": Signal(
        trace_service_pb2.ExportTraceServiceRequest,
        trace_service_pb2.ExportTraceServiceResponse,
        "resource_spans", "scope_spans", "spans", "rejected_spans",
    ),
}  # fmt: skip


_TREE: Final = bounds.tree(one.request().DESCRIPTOR for one in SIGNALS.values())


class MalformedTelemetryError(Exception):
    """Raised for a request that is none of OTLP. ``large`` where it is one that is too large."""

    def __init__(self, message: str, *, large: bool = False) -> None:
        super().__init__(message)
        self.large = large


class Stamped(NamedTuple):
    """A request as it goes on: its records, its bytes as the agent made them, unpacked, and the message."""

    records: int
    size: int
    body: bytes


def stamped(signal: str, body: bytes, stamp: Mapping[str, str], *, is_json: bool, is_gzip: bool) -> Stamped:
    """Return the request with the attributes of ``stamp`` on each resource.

    Raises:
        MalformedTelemetryError: it is no request of this signal, or too large.
    """
    found = SIGNALS[signal]
    # (1)
    raw = _unpacked(body) if is_gzip else body
    if len(raw) > BODY_BYTES:
        raise _too_large()
    # (2)
    message = found.request()
    _parse(message, raw, is_json=is_json)
    message.DiscardUnknownFields()
    # (3) and (4)
    counted = _Walk(message)
    # (5)
    resources = getattr(message, found.resources)
    if len(resources) > RESOURCES:
        raise MalformedTelemetryError(f"a request has at most {RESOURCES} resources", large=True)
    for one in resources:
        _without_ours(one.resource.attributes, _claims_audit)
        for key, value in stamp.items():
            one.resource.attributes.add(key=key).value.string_value = value
    try:
        return Stamped(counted.records[signal], len(raw), message.SerializeToString())
    except EncodeError as e:
        raise MalformedTelemetryError("the request cannot be written again") from e


def answer(signal: str, body: bytes, *, is_json: bool) -> tuple[int, bytes]:
    """Return the records that a collector rejected, by its answer of protobuf, and the answer for the agent.

    The collector's words are replaced: they are the operator's.
    """
    found, read = SIGNALS[signal], SIGNALS[signal].response()
    try:
        read.ParseFromString(body[: wire.ANSWER_BYTES])
    except DecodeError:
        read = found.response()
    rejected = max(0, getattr(read.partial_success, found.rejected))
    made = found.response()
    if rejected:
        setattr(made.partial_success, found.rejected, rejected)
        made.partial_success.error_message = "the collector rejected these records"
    return rejected, json_format.MessageToJson(made, indent=None).encode() if is_json else made.SerializeToString()


@functools.lru_cache(1024)
def is_ours(key: str) -> bool:
    """Whether the key of an attribute is a name of ours, also as a collector may write it: `covenant_run_id`.

    Raises:
        MalformedTelemetryError: it is too long. To normalise a text takes the square of its combining characters.
    """
    if len(key) > KEY_CHARACTERS:
        raise MalformedTelemetryError(f"a key has at most {KEY_CHARACTERS} characters")
    return _OURS.match(_plain(key)) is not None


def _plain(key: str) -> str:
    """Return a key in lower case, in one Unicode form, and without what a reader does not see of it."""
    if not key.isascii() or not key.isprintable():
        key = "".join(ch for ch in key if ch not in INVISIBLE and unicodedata.category(ch) not in ("Cc", "Cf"))
        key = unicodedata.normalize("NFKC", key)
    return key.casefold()


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(wbits=31)
    try:
        raw = unpacking.decompress(body, BODY_BYTES + 1)
    except zlib.error as e:
        raise MalformedTelemetryError("the body is not of gzip") from e
    if len(raw) > BODY_BYTES:
        raise _too_large()
    if not unpacking.eof or unpacking.unused_data:
        raise MalformedTelemetryError("the body is not one whole stream of gzip")
    return raw


def _too_large() -> MalformedTelemetryError:
    return MalformedTelemetryError(f"a request has at most {BODY_BYTES} bytes, unpacked", large=True)


def _parse(message: Any, raw: bytes, *, is_json: bool) -> None:
    try:
        if not is_json:
            bounds.check(raw, message.DESCRIPTOR.full_name, _TREE)
            message.ParseFromString(raw)
            return
        document = wire_json.read(raw, JSON_VALUES)
        if not isinstance(document, dict):
            raise MalformedTelemetryError("the body is no object")
        _with_base64(document)
        json_format.ParseDict(document, message, ignore_unknown_fields=True, max_recursion_depth=_DEPTH)
    except bounds.ExceededError as e:
        raise MalformedTelemetryError(str(e), large=True) from e
    except errors.MalformedRequestError as e:
        raise MalformedTelemetryError(f"the body: {e.message}") from e
    # ArithmeticError: a whole number that no double holds.
    except (
        DecodeError,
        json_format.ParseError,
        RecursionError,
        ArithmeticError,
        ValueError,
        IndexError,
        TypeError,
    ) as e:
        raise MalformedTelemetryError("the body is no request of this signal") from e


def _with_base64(document: Any) -> None:
    """Write the ids as protobuf's own JSON has them.

    Raises:
        ValueError: an id is not hexadecimal, or half a surrogate pair is in a text. Protobuf fails at such a name.
    """
    level = [document]
    while level:
        one = level.pop()
        if isinstance(one, list):
            level += one
        elif isinstance(one, dict):
            for name in _IDS & one.keys():
                if not isinstance(one[name], str) or not _HEX.fullmatch(one[name]):
                    raise ValueError(name)
                one[name] = base64.b64encode(bytes.fromhex(one[name])).decode()
            level += (*one, *one.values())
        elif isinstance(one, str) and not one.isascii():
            one.encode()


class _Walk:
    """Counts the parts of a request, and removes keys of ours wherever there are keys."""

    def __init__(self, message: Message) -> None:
        self._left = ITEMS
        self.records = dict.fromkeys(SIGNALS, 0)
        self._of(message)

    def _of(self, message: Any) -> None:
        for field, value in message.ListFields():
            kind = field.message_type
            if kind is None:
                continue
            if not field.is_repeated:
                self._of(value)
                continue
            self._left -= len(value)
            if self._left < 0:
                raise MalformedTelemetryError(f"a request has at most {ITEMS} parts", large=True)
            if kind.full_name == _KEY_VALUE:
                _without_ours(value)
            elif (signal := _RECORDS.get(kind.full_name)) is not None:
                self.records[signal] += len(value)
            for one in value:
                self._of(one)


def _without_ours(attributes: Any, ours: Callable[[Any], bool] = lambda one: is_ours(one.key)) -> None:
    kept = [one for one in attributes if not ours(one)]
    if len(kept) != len(attributes):
        # Not one by one: each deletion moves all that follow.
        del attributes[:]
        attributes.extend(kept)


def _claims_audit(attribute: Any) -> bool:
    """Whether it names the service of the rows that `covenant export` sends, also by a key as a collector writes it."""
    named = _ODD.sub("", _plain(attribute.key)) in ("servicename", "servicenamespace")
    return named and is_ours(attribute.value.string_value[:KEY_CHARACTERS])


def _records() -> Iterator[tuple[str, str]]:
    yield "opentelemetry.proto.trace.v1.Span", "traces"
    yield "opentelemetry.proto.logs.v1.LogRecord", "logs"
    for name in ("Number", "Histogram", "ExponentialHistogram", "Summary"):
        yield f"opentelemetry.proto.metrics.v1.{name}DataPoint", "metrics"


_RECORDS: Final = dict(_records())
