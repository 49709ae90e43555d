"""Rows of the audit logs in the JSON form of OTLP 1.x (opentelemetry-proto): logs, spans and sums.

Ids of traces and spans follow from the ids of intents and runs, so a record that is sent twice is the same record. A
trace is one intent with its runs; a run below another is its child.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from policy.audit_log import exported, ocsf

# SeverityNumber of OTLP by the severity of OCSF: INFO, INFO2, WARN, ERROR.
_SEVERITY: Final = {ocsf.INFORMATIONAL: (9, "INFO"), ocsf.LOW: (10, "INFO"), ocsf.MEDIUM: (13, "WARN"),
                    ocsf.HIGH: (17, "ERROR")}  # fmt: skip
_INTERNAL, _SERVER = 1, 2  # SpanKind
_OK, _ERROR = 1, 2  # StatusCode
_CUMULATIVE: Final = 2  # AggregationTemporality
# Runs and intents that have begun and not ended, as far as they are remembered; series of one process.
MOST_OPEN: Final = 4096
MOST_SERIES: Final = 1000
# (kind, field of the amount or none, metric, unit, description, fields that are attributes)
_COUNTED: Final = (
    ("run_started", None, "covenant.runs.started", "{run}", "Runs that were started.", ()),
    ("run_ended", None, "covenant.runs.ended", "{run}", "Runs that ended.", ("status", "code")),
    ("run_ended", "cpu_ms", "covenant.runs.cpu_time", "ms", "Processor time of ended runs.", ()),
    ("run_ended", "wall_ms", "covenant.runs.wall_time", "ms", "Time of ended runs from their intent on.", ()),
    ("denied", "count", "covenant.denials", "{denial}", "What was refused to agents.", ("layer",)),
    ("drift", None, "covenant.drift", "{finding}", "Differences that attestation found.", ("layer",)),
    ("model_asked", None, "covenant.model.requests", "{request}", "Requests to models.", ("provider",)),
    ("model_asked", "input_tokens", "covenant.model.input_tokens", "{token}", "Tokens to models.", ("provider",)),
    ("model_asked", "output_tokens", "covenant.model.output_tokens", "{token}", "Tokens of models.", ("provider",)),
    ("intent_dispatched", None, "covenant.intents.done", "{intent}", "Intents with a result.", ("status",)),
    ("intent_failed", None, "covenant.intents.failed", "{intent}", "Intents without one.", ("stage", "code")),
)
_COUNTED_OF: Final = {kind: [one[1:] for one in _COUNTED if one[0] == kind] for kind, *_ in _COUNTED}
_ROWS: Final = ("covenant.audit.rows", "{row}", "Rows of the audit log that were exported.")

# Hexadecimal texts of our own making: they need no escape, and no row has another's.
_HASHES: Final = ("event_hash_hex", "leaf_hash_hex", "chain_hash_hex")
_MOST_REPEATED: Final = 128

_text = msgspec.json.Encoder().encode


def value(given: Any) -> dict[str, Any]:
    """A value as an AnyValue."""
    if isinstance(given, str):
        return {"stringValue": given}
    if isinstance(given, bool):
        return {"boolValue": given}
    if isinstance(given, int):
        # A number of 64 bits is text in protobuf's JSON; larger ones have no other form at all.
        return {"intValue": str(given)} if -(2**63) <= given < 2**63 else {"stringValue": str(given)}
    if isinstance(given, list | tuple) and all(isinstance(one, str) for one in given):
        return {"arrayValue": {"values": [{"stringValue": one} for one in given]}}
    return {"stringValue": _text(given).decode()}


def attributes(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fields as a list of KeyValue."""
    return [{"key": name, "value": value(one)} for name, one in fields.items()]


def resource(log: exported.Log, *, host: str, version: str) -> dict[str, Any]:
    """The resource: one log of this machine."""
    about = {
        "service.name": "covenant",
        "service.namespace": log.name,
        "service.instance.id": log.origin,
        "service.version": version,
        "host.name": host,
    }
    return {"attributes": attributes(about)}


def log_record(row: exported.ExportedRow, now_ns: int) -> msgspec.Raw:
    """One row as a LogRecord, in JSON.

    It is assembled from texts: the attributes as a tree of dictionaries took six times as long (benchmarks/export.py).
    """
    fields, place = row.fields, row.place
    number, text = _SEVERITY[ocsf.TABLE[row.kind].severity_id]
    about = [_attribute("log.record.uid", row.event_id), _repeated("covenant.issuer", row.issuer)]
    about += [_field(f"covenant.{name}", one) for name, one in fields.items()]
    about += [_field(f"covenant.audit_log.{name}", one) for name, one in row.log_place.items() if name not in _HASHES]
    about += [
        f'{{"key":"covenant.audit_log.{name}","value":{{"stringValue":"{one}"}}}}'
        for name, one in zip(_HASHES, place[-len(_HASHES) :], strict=True)
    ]
    ids = ""
    intent, run = fields.get("intent_id"), fields.get("run_id")
    if intent or run:
        ids = f',"traceId":"{_trace_id(intent or run)}"'
    if run:
        ids += f',"spanId":"{_span_id("run", run)}"'
    name = _text(row.kind).decode()[1:-1]
    return msgspec.Raw(
        f'{{"timeUnixNano":"{row.timestamp_ms:d}000000","observedTimeUnixNano":"{now_ns}","severityNumber":{number},'
        f'"severityText":"{text}","eventName":"covenant.{name}","body":{{"stringValue":"{name}"}},'
        f'"attributes":[{",".join(about)}]{ids}}}'.encode()
    )


def _field(name: str, given: Any) -> str:
    if type(given) is str and len(given) <= _MOST_REPEATED:
        return _repeated(name, given)
    return _attribute(name, given)


def _attribute(name: str, given: Any) -> str:
    """A KeyValue in JSON."""
    return _text({"key": name, "value": value(given)}).decode()


@functools.lru_cache(MOST_OPEN)
def _repeated(name: str, given: str) -> str:
    """As ``_attribute``: names, ids and codes come again in the rows that follow."""
    return _attribute(name, given)


def logs(about: Mapping[str, Any], records: Sequence[msgspec.Raw], version: str) -> bytes:
    """An ExportLogsServiceRequest."""
    scope = {"scope": {"name": "covenant.audit", "version": version}, "logRecords": records}
    return _text({"resourceLogs": [{"resource": about, "scopeLogs": [scope]}]})


def traces(about: Mapping[str, Any], spans: Sequence[Mapping[str, Any]], version: str) -> bytes:
    """An ExportTraceServiceRequest."""
    scope = {"scope": {"name": "covenant.audit", "version": version}, "spans": spans}
    return _text({"resourceSpans": [{"resource": about, "scopeSpans": [scope]}]})


class Begun(NamedTuple):
    """A run that has started: its trace, the span above it, and when it started (Unix milliseconds)."""

    trace_id: str
    parent_span: str
    started_ms: int


class Spans:
    """Make a span of each run and of each intent at its end. ``state`` goes on where another left off."""

    def __init__(self, state: Iterable[tuple[str, Sequence[Any]]] = ()) -> None:
        self._begun = {run: Begun(*begun) for run, begun in state}
        self._intents = dict[str, int]()

    @property
    def state(self) -> list[tuple[str, Begun]]:
        """The runs that have started and not ended."""
        return list(self._begun.items())

    def take(self, row: exported.ExportedRow) -> dict[str, Any] | None:
        """The span that ends with this row."""
        fields = row.fields
        if row.kind == "run_started":
            self._start(row)
        elif row.kind == "run_ended":
            return self._run(row)
        elif row.kind == "run_usage" and "wall_ms" in fields:
            _remember(self._intents, fields["intent_id"], row.timestamp_ms - fields["wall_ms"])
        # The supervisor's row of an intent is about one run, which has its span.
        elif row.kind in ("intent_dispatched", "intent_failed") and row.place.log == "daemon":
            return self._intent(row)
        return None

    def _start(self, row: exported.ExportedRow) -> None:
        intent, parent = row.fields["intent_id"], row.fields.get("parent")
        above = ""
        if parent:
            above = _span_id("run", parent)
        elif row.fields.get("behalf_display"):  # the daemon asked for it
            above = _span_id("intent", intent)
        _remember(self._begun, row.fields["run_id"], Begun(_trace_id(intent), above, row.timestamp_ms))

    def _run(self, row: exported.ExportedRow) -> dict[str, Any]:
        fields = row.fields
        run = fields["run_id"]
        begun = self._begun.pop(run, None) or Begun(_trace_id(run), "", row.timestamp_ms - fields["duration_ms"])
        span = _span(row, f"run {fields['agent_id']}", _INTERNAL, begun.trace_id, _span_id("run", run))
        if begun.parent_span:
            span["parentSpanId"] = begun.parent_span
        return _timed(span, begun.started_ms, row)

    def _intent(self, row: exported.ExportedRow) -> dict[str, Any]:
        intent = row.fields["intent_id"]
        name = f"intent {row.fields.get('matched_agent', '')}".strip()
        span = _span(row, name, _SERVER, _trace_id(intent), _span_id("intent", intent))
        return _timed(span, self._intents.pop(intent, row.timestamp_ms), row)


def _remember(known: dict[str, Any], key: str, one: Any) -> None:
    known.pop(key, None)
    if len(known) >= MOST_OPEN:
        del known[next(iter(known))]
    known[key] = one


def _span(row: exported.ExportedRow, name: str, kind: int, trace_id: str, span_id: str) -> dict[str, Any]:
    fields = row.fields
    failed = row.kind == "intent_failed" or fields.get("status") not in ("ok", "not_stored")
    status = {"code": _ERROR, "message": str(fields.get("code", ""))} if failed else {"code": _OK}
    about = {f"covenant.{key}": one for key, one in fields.items()}
    made = {"traceId": trace_id, "spanId": span_id, "name": name, "kind": kind, "status": status}
    return {**made, "attributes": attributes({"log.record.uid": row.event_id, **about})}


def _timed(span: dict[str, Any], start_ms: int, row: exported.ExportedRow) -> dict[str, Any]:
    # A clock that was set back between the two rows makes no span of negative length.
    start = min(start_ms, row.timestamp_ms)
    return {**span, "startTimeUnixNano": f"{start}000000", "endTimeUnixNano": f"{row.timestamp_ms}000000"}


@functools.lru_cache(MOST_OPEN)
def _trace_id(seed: str) -> str:
    return hashlib.sha256(f"covenant.trace\n{seed}".encode()).hexdigest()[:32]


@functools.lru_cache(MOST_OPEN)
def _span_id(kind: str, seed: str) -> str:
    return hashlib.sha256(f"covenant.{kind}\n{seed}".encode()).hexdigest()[:16]


class Sums:
    """Cumulative sums over the rows that a process exported since ``start_ns`` (Unix nanoseconds)."""

    def __init__(self, start_ns: int) -> None:
        self._start = str(start_ns)
        self._sums = dict[tuple[str, tuple[tuple[str, str], ...]], int]()
        self._about = {name: (unit, text) for _, _, name, unit, text, _ in _COUNTED} | {_ROWS[0]: _ROWS[1:]}

    def take(self, row: exported.ExportedRow) -> None:
        """Count one row."""
        self._add(_ROWS[0], (("kind", row.kind), ("log", row.place.log)), 1)
        for amount, name, _, _, keys in _COUNTED_OF.get(row.kind, ()):
            found = 1 if amount is None else row.fields.get(amount, 0)
            self._add(name, tuple((key, str(row.fields.get(key, ""))) for key in keys), found)

    def _add(self, name: str, about: tuple[tuple[str, str], ...], amount: int) -> None:
        if (name, about) not in self._sums and len(self._sums) >= MOST_SERIES:
            about = (("other", "true"),)
        self._sums[name, about] = self._sums.get((name, about), 0) + amount

    def request(self, about: Mapping[str, Any], now_ns: int, version: str) -> bytes:
        """An ExportMetricsServiceRequest with every sum."""
        points = dict[str, list[dict[str, Any]]]()
        for (name, keys), total in self._sums.items():
            points.setdefault(name, []).append(
                {
                    "startTimeUnixNano": self._start,
                    "timeUnixNano": str(now_ns),
                    "asInt": str(total),
                    "attributes": attributes(dict(keys)),
                }
            )
        metrics = [
            {
                "name": name,
                "unit": self._about[name][0],
                "description": self._about[name][1],
                "sum": {"dataPoints": found, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True},
            }
            for name, found in points.items()
        ]
        scope = {"scope": {"name": "covenant.audit", "version": version}, "metrics": metrics}
        return _text({"resourceMetrics": [{"resource": about, "scopeMetrics": [scope]}]})
