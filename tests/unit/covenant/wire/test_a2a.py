"""A2A on the wire: calls of both versions mean the same, and each wrong one has A2A's error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from a2a.compat.v0_3 import a2a_v0_3_pb2
from a2a.compat.v0_3 import types as types_03
from a2a.types import a2a_pb2
from google.protobuf import json_format

from covenant.wire.a2a import calls, faults, push_urls, shapes
from covenant.wire.a2a.calls import Dialect
from covenant.wire.a2a.shapes import TaskView
from policy import errors

ENDED = TaskView(id="t", context_id="c", state=shapes.COMPLETED, at_ms=1_000, text="ANSWER", more={"k": "v"})
FAILED = TaskView(id="t", context_id="c", state=shapes.FAILED, at_ms=1_000, reason="it failed")
TEXT = [{"text": "one"}, {"data": {"a": 1}}]


def fault(call: Any, *arguments: Any) -> faults.Fault:
    with pytest.raises(errors.HttpRefusedError) as refused:
        call(*arguments)
    return faults.fault_of(refused.value)


def test_message_of_each_dialect_is_one_call() -> None:
    found = [
        calls.of_method("SendMessage", {"message": {"messageId": "m", "role": "ROLE_USER", "parts": TEXT}}),
        calls.of_method("message/send", {"message": {"messageId": "m", "role": "user", "parts": TEXT}}),
        calls.of_path(
            *("POST", "v1/message:send", {}),
            json.dumps(
                {
                    "request": {"message_id": "m", "role": "ROLE_USER", "content": TEXT},
                    "configuration": {"blocking": True},
                }
            ).encode(),
        ),
    ]
    assert [dialect for dialect, _ in found] == [Dialect.V1, Dialect.RPC_03, Dialect.HTTP_03]
    assert {call for _, call in found} == {calls.Send("m", 'one\n{"a": 1}')}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({}, faults.INVALID_PARAMS),
        ({"messageId": "m", "role": "ROLE_AGENT", "parts": TEXT}, faults.INVALID_PARAMS),
        ({"messageId": "", "role": "user", "parts": TEXT}, faults.INVALID_PARAMS),
        ({"messageId": "m" * 257, "role": "user", "parts": TEXT}, faults.INVALID_PARAMS),
        ({"messageId": "m", "role": "user", "parts": []}, faults.INVALID_PARAMS),
        ({"messageId": "m", "role": "user", "parts": ["x"]}, faults.INVALID_PARAMS),
        ({"messageId": "m", "role": "user", "parts": [{"raw": "AA=="}]}, faults.CONTENT_TYPE),
        ({"messageId": "m", "role": "user", "parts": [{"kind": "file", "file": {}}]}, faults.CONTENT_TYPE),
        ({"messageId": "m", "role": "user", "parts": TEXT, "contextId": "a\nb"}, faults.INVALID_PARAMS),
    ],
)
def test_wrong_message_has_its_fault(message: Any, expected: faults.Fault) -> None:
    assert fault(calls.of_method, "SendMessage", {"message": message}) == expected


def test_wrong_envelope_has_its_fault() -> None:
    assert fault(calls.envelope, b"{") == faults.PARSE
    assert fault(calls.envelope, b"[" * 200 + b"]" * 200) == faults.PARSE
    assert fault(calls.envelope, b"[]") == faults.INVALID_REQUEST
    assert fault(calls.envelope, b'{"jsonrpc": "2.0", "id": 1}') == faults.INVALID_REQUEST
    assert fault(calls.envelope, b'{"jsonrpc": "2.0", "id": {}, "method": "x"}') == faults.INVALID_REQUEST
    assert fault(calls.of_method, "tasks/none", {}) == faults.NO_METHOD
    assert fault(calls.of_method, "GetTask", []) == faults.INVALID_PARAMS
    assert fault(calls.of_path, "PUT", "tasks/x", {}, b"") == faults.NO_METHOD
    assert fault(calls.check_version, "2.0") == faults.NO_VERSION
    assert [calls.check_version(each) for each in (None, "0.3.0", "1.0", "1")] == ["0.3", "0.3", "1.0", "1.0"]


def test_sdk_reads_tasks_of_each_dialect() -> None:
    for view in (ENDED, FAILED):
        read = json_format.ParseDict(shapes.task(view, Dialect.V1), a2a_pb2.Task())
        assert (read.id, read.context_id) == ("t", "c")
        old = json_format.ParseDict(shapes.task(view, Dialect.HTTP_03), a2a_v0_3_pb2.Task())
        assert old.status.timestamp == read.status.timestamp
        rpc = types_03.Task.model_validate(shapes.task(view, Dialect.RPC_03))
        assert rpc.status.state.value == view.state.lower()
        for event in shapes.events(view, Dialect.V1, first=False):
            json_format.ParseDict(event, a2a_pb2.StreamResponse())
        for event in shapes.events(view, Dialect.HTTP_03, first=False):
            json_format.ParseDict(event, a2a_v0_3_pb2.StreamResponse())
        for event in shapes.events(view, Dialect.RPC_03, first=False):
            types_03.SendStreamingMessageSuccessResponse.model_validate({"id": 1, "result": event})
    assert "CANCELLED" in json.dumps(shapes.task(TaskView("t", "c", shapes.CANCELED, 1), Dialect.HTTP_03))


def test_refusal_has_documents_of_both_bindings() -> None:
    error = errors.CapabilityMissingError("no grant", hint="grant it")
    found = faults.fault_of(error)
    assert (found.status, faults.rpc_status(found), faults.rpc_status(faults.NO_TASK)) == (403, 403, 200)
    rpc = json.loads(faults.to_rpc(3, found, error))
    assert (rpc["id"], rpc["error"]["message"]) == (3, "no grant")
    http = json.loads(faults.to_http(found, error, legacy=False))
    assert http["error"]["details"][0]["metadata"] == {"covenantCode": error.code, "hint": "grant it"}
    assert json.loads(faults.to_http(faults.NO_TASK, error, legacy=True))["type"] == "TaskNotFoundError"


RULES, _ = push_urls.rules(["https://a.example/hook", "http://127.0.0.1:9000", "http://[::1]:9/x/"])


@pytest.mark.parametrize(
    "url",
    ["https://a.example/hook", "https://a.example:443/hook/x?y=1", "http://127.0.0.1:9000/", "http://[::1]:9/x/y"],
)
def test_push_url_below_rule_is_taken(url: str) -> None:
    assert push_urls.check(RULES, url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://a.example/hook", "https://a.example:444/hook", "https://b.example/hook", "https://a.example/hooks"),
        *("https://a.example/hook/../x", "https://a.example/hook/%2e%2e/x", "https://a.example/hook/%252e%252e/x"),
        *("https://a.example/hook/%2f", "https://a.example/hook/\\x", "https://a.example@b.example/hook"),
        *("https://a.example/hook#x", "https://A.example/hook", "https://a.example /hook", "https://a.example/hook\n"),
        *("ftp://a.example/hook", "http://127.0.0.1:0/", "http://127.1:9000/", "http://2130706433:9000/"),
        *("http://[::ffff:127.0.0.1]:9000/", "http://127.0.0.1:9000.a.example/", "//a.example/hook", ""),
    ],
)
def test_push_url_beside_rules_is_refused(url: str) -> None:
    assert fault(push_urls.check, RULES, url) == faults.INVALID_PARAMS


def test_push_rules_and_public_addresses() -> None:
    words = ["https://a.example/hook?x", "a.example", "https://*.example/", "https://a.example"]
    assert [str(one) for one in push_urls.rules(words)[0]] == ["https://a.example:443/"]
    assert push_urls.rules(words)[1] == words[:3]
    assert fault(push_urls.check, (), "https://a.example/") == faults.NO_PUSH
    assert push_urls.is_public("8.8.8.8")
    assert push_urls.is_public("2606:4700::1")
    private = ("10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "64:ff9b::a00:1")
    assert not any(map(push_urls.is_public, (*private, "fd00::1", "2002:a00:1::", "0.0.0.0", "x")))
