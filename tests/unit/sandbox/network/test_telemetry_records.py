"""An agent's OTLP as the reader writes it anew: no name of ours but those of the run, in any form of the request."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from google.protobuf import json_format
from google.rpc import status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.common.v1 import common_pb2

from sandbox.network.service.shapes import RefusedError
from sandbox.network.service.telemetry import reader, records, server, wire

STAMP = {"covenant.run.id": "run-1", "covenant.agent.id": "asker"}
OURS = [
    "covenant",
    "covenant.run.id",
    "Covenant_Run-ID",
    " covenant.x",
    "COVENANT/x",
    "ｃｏｖｅｎａｎｔ.run.id",
    "_covenant_",
    "co\u200bvenant.run.id",
    "\u202ecovenant.run.id",
    "coven\ufe0fant.run.id",
    "co\0ve\x7fnant.run.id",
]
KEPT = ["own", "covenants", "not.covenant.x", "covenantx.y", "", "会議.id", "cove\u0301nant.x", "a\u202eb"]


def _metrics() -> Any:
    """A request with attributes in each place of metrics."""
    made = records.SIGNALS["metrics"].request()
    part = made.resource_metrics.add()
    scope = part.scope_metrics.add()
    metric = scope.metrics.add(name="m")
    points = [
        scope.metrics.add().gauge.data_points.add(),
        scope.metrics.add().histogram.data_points.add(),
        scope.metrics.add().exponential_histogram.data_points.add(),
        scope.metrics.add().summary.data_points.add(),
        metric.sum.data_points.add(),
    ]
    places = [part.resource.attributes, scope.scope.attributes, metric.metadata, *(one.attributes for one in points)]
    places.append(points[0].exemplars.add().filtered_attributes)
    for place in places:
        for key in [*OURS, *KEPT]:
            place.add(key=key).value.string_value = "v"
    return made


def _stamped(signal: str, body: bytes, *, is_json: bool = False) -> tuple[records.Stamped, Any]:
    made = records.stamped(signal, body, STAMP, is_json=is_json, is_gzip=False)
    read = records.SIGNALS[signal].request()
    read.ParseFromString(made.body)
    return made, read


@pytest.mark.parametrize("is_json", [False, True])
def test_names_of_ours_are_removed_everywhere(*, is_json: bool) -> None:
    whole = _metrics()
    body = json_format.MessageToJson(whole).encode() if is_json else whole.SerializeToString()
    made, read = _stamped("metrics", body, is_json=is_json)
    assert made.records == 5
    assert made.size == len(body)
    keys = [one.key for one in read.resource_metrics[0].resource.attributes]
    assert keys == [*KEPT, *STAMP]
    del read.resource_metrics[0].resource.attributes[len(KEPT) :]
    found: list[list[str]] = []

    def look(message: Any) -> None:
        for field, value in message.ListFields():
            if field.message_type is not None and field.is_repeated:
                if field.message_type == common_pb2.KeyValue.DESCRIPTOR:
                    found.append([one.key for one in value])
                    continue
                for one in value:
                    look(one)
            elif field.message_type is not None:
                look(value)

    look(read)
    assert found == [KEPT] * 9


def test_names_of_ours_are_removed_within_values() -> None:
    made = records.SIGNALS["logs"].request()
    record = made.resource_logs.add().scope_logs.add().log_records.add()
    for value in (record.body, record.attributes.add(key="own").value):
        inner = value.array_value.values.add().kvlist_value
        inner.values.add(key="covenant.run.id")
        inner.values.add(key="own").value.kvlist_value.values.add(key="covenant_run_id")
    counted, read = _stamped("logs", made.SerializeToString())
    assert counted.records == 1
    (record,) = read.resource_logs[0].scope_logs[0].log_records
    for value in (record.body, record.attributes[0].value):
        (inner,) = value.array_value.values[0].kvlist_value.values
        assert (inner.key, len(inner.value.kvlist_value.values)) == ("own", 0)


def test_service_of_the_audit_is_no_agents() -> None:
    made = records.SIGNALS["logs"].request()
    names = ("covenant", "Covenant", "own")
    keys = ("service.name", "service_name", "Service.Name", "service.namespace")
    for key in keys:
        for name in names:
            made.resource_logs.add().resource.attributes.add(key=key).value.string_value = name
    _, read = _stamped("logs", made.SerializeToString())
    first = [one.resource.attributes[0].key for one in read.resource_logs]
    assert first == [one for key in keys for one in ("covenant.run.id", "covenant.run.id", key)]


def test_unknown_fields_do_not_go_on() -> None:
    made = records.SIGNALS["logs"].request()
    made.resource_logs.add().scope_logs.add().log_records.add(severity_text="x")
    whole = made.SerializeToString()
    plain, _ = _stamped("logs", whole)
    # Field 2047 of the request, and of the resource: a later OTLP may read an attribute there.
    odd = b"\xfa\x7f\x08covenant"
    more, _ = _stamped("logs", whole + odd + b"\x0a" + bytes([2 + len(odd)]) + b"\x0a" + bytes([len(odd)]) + odd)
    assert plain.body in more.body
    assert b"\xfa\x7f" not in more.body


keys = st.sampled_from([*OURS, *KEPT])
values = st.recursive(
    st.one_of(st.text().map(lambda one: {"stringValue": one}), st.integers(0, 9).map(lambda one: {"intValue": one})),
    lambda inner: st.lists(inner, max_size=3).map(lambda found: {"arrayValue": {"values": found}}),
    max_leaves=5,
)
attributes = st.lists(st.fixed_dictionaries({"key": keys}, optional={"value": values}), max_size=6)
spans = st.lists(
    st.fixed_dictionaries({}, optional={"attributes": attributes, "name": st.text(max_size=4)}), max_size=3
)
resources = st.fixed_dictionaries({}, optional={"attributes": attributes})
requests = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "resource": resources,
            "scopeSpans": st.lists(st.fixed_dictionaries({"spans": spans}), max_size=2),
        },
    ),
    max_size=3,
).map(lambda found: {"resourceSpans": found})


@settings(max_examples=100, deadline=None)
@given(requests)
def test_both_forms_are_written_as_one(document: dict[str, Any]) -> None:
    raw = json.dumps(document).encode()
    message = json_format.ParseDict(document, records.SIGNALS["traces"].request())
    by_json, read = _stamped("traces", raw, is_json=True)
    by_bytes, _ = _stamped("traces", message.SerializeToString())
    assert (by_json.records, by_json.body) == (by_bytes.records, by_bytes.body)
    for one in read.resource_spans:
        stamped = [each for each in one.resource.attributes if records.is_ours(each.key)]
        assert {each.key: each.value.string_value for each in stamped} == STAMP
        assert len(stamped) == len(STAMP)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(list(records.SIGNALS)), st.booleans(), st.booleans())
def test_any_bytes_have_an_outcome(body: bytes, signal: str, is_json: bool, is_gzip: bool) -> None:
    found = reader.done(wire.STAMP, signal, body, STAMP, is_json=is_json, is_gzip=is_gzip)
    outcome, _, size = wire.OUTCOME.unpack_from(found)
    assert len(found) <= wire.OUTCOME_BYTES
    assert outcome in (wire.DONE, wire.MALFORMED, wire.LARGE)
    assert size <= wire.BODY_BYTES
    answered = reader.done(wire.ANSWER, signal, body, STAMP, is_json=is_json, is_gzip=False)
    assert wire.OUTCOME.unpack_from(answered)[0] == wire.DONE


@pytest.mark.parametrize(
    "body",
    [
        {"\ud800": 1},
        {"resourceLogs": ["\ud800"]},
        {"resourceLogs": [{"resource": {"attributes": [{"key": "\udfff"}]}}]},
        {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"severityNumber": "\ud800"}]}]}]},
        {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": {"doubleValue": 10**400}}]}]}]},
        {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"timeUnixNano": 10**400}]}]}]},
    ],
)
def test_json_that_protobuf_fails_at_is_malformed(body: Any) -> None:
    raw = json.dumps(body).encode()
    found = reader.done(wire.STAMP, "logs", raw, STAMP, is_json=True, is_gzip=False)
    assert wire.OUTCOME.unpack_from(found)[0] == wire.MALFORMED


def test_gzip_of_one_stream_is_read() -> None:
    body = _metrics().SerializeToString()
    plain = records.stamped("metrics", body, STAMP, is_json=False, is_gzip=False)
    assert records.stamped("metrics", gzip.compress(body), STAMP, is_json=False, is_gzip=True) == plain


@pytest.mark.parametrize("length", [0, 127, 128, 5000])
def test_refusal_is_a_status_of_otlp(length: int) -> None:
    message = "a" * length
    assert status_pb2.Status.FromString(server.status(message, is_json=False)).message == message[:256]
    assert json.loads(server.status(message, is_json=True)) == {"message": message}


def test_bytes_of_a_minute_come_back() -> None:
    now = [0.0]
    limit = server.ByteLimit(100, lambda: now[0])
    limit.check(60)
    with pytest.raises(RefusedError) as later:
        limit.check(60)
    assert (later.value.status, later.value.retry_seconds) == (429, 61)
    with pytest.raises(RefusedError) as never:
        limit.check(101)
    assert (never.value.status, never.value.retry_seconds) == (413, None)
    limit.check(40)
    now[0] = 60.0
    limit.check(100)
