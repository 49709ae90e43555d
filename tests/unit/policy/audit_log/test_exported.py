"""Rows as they leave the machine: a class of OCSF for every kind, records that a schema takes, and no content."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import ocsf_json_schema
import pytest
from google.protobuf import json_format
from jsonschema import Draft202012Validator
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from policy import errors
from policy.audit_log import chain, events, exported, merkle, ocsf, otlp

ISSUER = {"display": "operator@local", "pubkey": "1" * 40}
LOG = exported.Log("daemon", "ab" * 32, 9)
NOW = 1_700_000_000_000
_VALUES: Mapping[str, Any] = {
    "int": 7,
    "bool": True,
    "digest": "cd" * 32,
    "objects": [{"run_id": "a", "reason": "b"}],
    "counts": {"a": 2},
}
# The texts that never leave, by kind. A new field with such a name, or a new kind that quotes, belongs here.
_CONTENT = {
    "intent_dispatched": {"intent_text"},
    "intent_ignored": {"intent_text"},
    "budget_exhausted": {"intent_text"},
    "manifest_rejected": {"message"},
    "intent_failed": {"message"},
    "refusals_summed": {"message"},
    "supervisor_row": {"line"},
    "operator_token_rotated": {"old_token_prefix", "new_token_prefix"},
    "peer_revoked": {"token_prefix"},
    "peer_self_revoke_blocked": {"token_prefix"},
    "peer_enrolled": {"token_prefix"},
    "peer_expired": {"token_prefix"},
    "tool_call_schema_rejected": {"reason"},
    "a2_a_result_rejected": {"reason"},
    "request_injected": {"path"},
    "hermes_file_written": {"path"},
    "audit_rebased": {"signature_hex"},
}


def _fields(kind: str) -> dict[str, Any]:
    def one(name: str, type_: str) -> Any:
        plain = type_.removesuffix("?")
        marked = f"MARK-{name}-"
        return [marked] if plain == "texts" else _VALUES.get(plain, marked)

    return {name: one(name, type_) for name, type_ in events.KINDS[kind].items()}


def row(kind: str, **changes: Any) -> exported.ExportedRow:
    fields = {**_fields(kind), **changes}
    line = events.assembled("0" * 8 + "-1", NOW, events.issuer_text(ISSUER), events.kind_text(kind, fields))
    (found,) = exported.rows([line], LOG, index=4, chain_hash_hex=chain.GENESIS)
    return found


@functools.cache
def _validator(class_uid: int) -> Draft202012Validator:
    schema = ocsf_json_schema.OcsfJsonSchemaEmbedded(ocsf_json_schema.get_ocsf_schema(ocsf.VERSION))
    return Draft202012Validator(schema.get_class_schema(schema.lookup_class_name_from_uid(class_uid), ["host"]))


def test_every_kind_has_a_class() -> None:
    assert set(ocsf.TABLE) == {*events.KINDS, exported.GAP}
    unknown = row("drift")._replace(kind="new_kind")
    with pytest.raises(errors.EventError, match="new_kind"):
        ocsf.event(unknown, host="h", version="1")


@pytest.mark.parametrize("kind", sorted(ocsf.TABLE))
def test_event_is_valid_ocsf(kind: str) -> None:
    found = exported.gap(LOG, 3, 5, NOW) if kind == exported.GAP else row(kind)
    for one in (found, found._replace(fields={})):
        event = ocsf.event(one, host="h", version="1")
        assert not [error.message for error in _validator(event["class_uid"]).iter_errors(event)]


@pytest.mark.parametrize("kind", sorted(events.KINDS))
def test_content_stays_behind(kind: str) -> None:
    found = row(kind)
    left_out = _CONTENT.get(kind, set())
    assert set(found.left_out) == left_out
    sent = msgspec.json.encode([ocsf.event(found, host="h", version="1"), otlp.log_record(found, 0)]).decode()
    texts = {name for name, type_ in events.KINDS[kind].items() if type_.removesuffix("?") in ("text", "texts")}
    assert {name for name in texts if f"MARK-{name}-" in sent} == texts - left_out
    if left_out:
        assert found.log_place["left_out"] == list(found.left_out)


def test_place_leads_to_the_log() -> None:
    lines = [
        events.assembled(f"id-{n}", NOW, events.issuer_text(ISSUER), events.kind_text("drift", _fields("drift")))
        for n in range(3)
    ]
    found = list(exported.rows(lines, LOG, index=4, chain_hash_hex=chain.GENESIS))
    assert [one.place.leaf for one in found] == [4, 5, 6]
    assert found[-1].place.chain_hash_hex == chain.fold([chain.event_hash(line) for line in lines])
    assert [one.place.leaf_hash_hex for one in found] == [merkle.leaf_hash(line).hex() for line in lines]
    with pytest.raises(errors.LedgerError, match="row 4 of the daemon log"):
        list(exported.rows([b"[]"], LOG, index=4, chain_hash_hex=chain.GENESIS))


def test_record_of_a_cut_is_no_leaf() -> None:
    assert row("audit_rebased").place.leaf is None
    assert "index" not in row("audit_rebased").log_place
    assert "sequence" not in ocsf.event(row("audit_rebased"), host="h", version="1")["metadata"]


@pytest.mark.parametrize(
    ("kind", "changes", "status_id"),
    [
        ("run_ended", {"status": "ok"}, 1),
        ("run_ended", {"status": "failed"}, 2),
        ("self_test", {"passed": False}, 2),
        ("model_asked", {"status": 200}, 1),
        ("model_asked", {"status": 0}, 2),
        ("tool_call_completed", {"outcome": "failed"}, 2),
        ("hermes_tool_completed", {"error": True}, 2),
        ("drift", {}, 2),
        ("run_started", {}, 1),
    ],
)
def test_status_follows_the_row(kind: str, changes: dict[str, Any], status_id: int) -> None:
    assert ocsf.event(row(kind, **changes), host="h", version="1")["status_id"] == status_id


def _request(raw: bytes, message: Any) -> Any:
    # As a collector reads it: ids are hex in OTLP's JSON, and base64 in protobuf's.
    document = json.loads(raw)
    pending = [document]
    while pending:
        one = pending.pop()
        pending += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
        for name in ("traceId", "spanId", "parentSpanId") if isinstance(one, dict) else ():
            if name in one:
                one[name] = base64.b64encode(bytes.fromhex(one[name])).decode()
    return json_format.ParseDict(document, message)


@pytest.mark.parametrize("kind", sorted(events.KINDS))
def test_log_record_is_valid_otlp(kind: str) -> None:
    found = row(kind)
    about = otlp.resource(LOG, host="h", version="1")
    request = _request(otlp.logs(about, [otlp.log_record(found, 5)], "1"), ExportLogsServiceRequest())
    (record,) = request.resource_logs[0].scope_logs[0].log_records
    said = {one.key: one.value for one in record.attributes}
    assert record.event_name == f"covenant.{kind}"
    assert record.time_unix_nano == NOW * 1_000_000
    assert said["log.record.uid"].string_value == found.event_id
    assert said["covenant.audit_log.leaf_hash_hex"].string_value == found.place.leaf_hash_hex


def test_runs_and_intents_are_spans_of_one_trace() -> None:
    supervisor, spans = LOG._replace(name="supervisor"), otlp.Spans()

    def taken(kind: str, ms: int, log: exported.Log = supervisor, **changes: Any) -> Any:
        found = row(kind, **changes)
        return spans.take(found._replace(timestamp_ms=ms, place=found.place._replace(log=log.name)))

    assert taken("run_started", 1000, run_id="r1", intent_id="i1", parent=None) is None
    assert taken("run_started", 1100, run_id="r2", intent_id="i1", parent="r1") is None
    # Another process goes on: the state is what the cursor holds.
    spans = otlp.Spans(json.loads(msgspec.json.encode(spans.state)))
    below = taken("run_ended", 1500, run_id="r2", status="failed", code="timeout")
    above = taken("run_ended", 1600, run_id="r1", status="ok")
    assert spans.state == []
    assert taken("run_usage", 1700, LOG, intent_id="i1", wall_ms=600) is None
    intent = taken("intent_dispatched", 1700, LOG, intent_id="i1", status="ok")
    assert {one["traceId"] for one in (below, above, intent)} == {above["traceId"]}
    assert (below["parentSpanId"], above["parentSpanId"]) == (above["spanId"], intent["spanId"])
    assert (below["startTimeUnixNano"], below["endTimeUnixNano"]) == ("1100000000", "1500000000")
    assert intent["startTimeUnixNano"] == "1100000000"
    assert (below["status"], above["status"]) == ({"code": 2, "message": "timeout"}, {"code": 1})
    about = otlp.resource(LOG, host="h", version="1")
    request = _request(otlp.traces(about, [below, above, intent], "1"), ExportTraceServiceRequest())
    assert len(request.resource_spans[0].scope_spans[0].spans) == 3
    # A run whose start was not seen has a trace of its own.
    assert taken("run_ended", 9000, run_id="r9", duration_ms=100)["startTimeUnixNano"] == "8900000000"


def test_open_runs_are_bounded() -> None:
    spans = otlp.Spans()
    for n in range(otlp.MOST_OPEN + 5):
        spans.take(row("run_started", run_id=f"r{n}"))
    assert [run for run, _ in spans.state][:: otlp.MOST_OPEN - 1] == ["r5", f"r{otlp.MOST_OPEN + 4}"]


def test_sums_are_cumulative_and_bounded() -> None:
    sums = otlp.Sums(5)
    for _ in range(2):
        sums.take(row("model_asked", input_tokens=40, provider="p"))
    for n in range(otlp.MOST_SERIES + 5):
        sums.take(row("denied", layer=f"layer{n}", count=1))
    request = _request(sums.request(otlp.resource(LOG, host="h", version="1"), 9, "1"), ExportMetricsServiceRequest())
    found = {one.name: one.sum for one in request.resource_metrics[0].scope_metrics[0].metrics}
    (point,) = found["covenant.model.input_tokens"].data_points
    assert (point.as_int, point.start_time_unix_nano, point.time_unix_nano) == (80, 5, 9)
    points = found["covenant.denials"].data_points
    assert sum(one.as_int for one in points) == otlp.MOST_SERIES + 5
    assert len(points) <= otlp.MOST_SERIES
