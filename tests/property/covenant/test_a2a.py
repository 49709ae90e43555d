"""A2A's parsers, and those of other hosts, with any bytes, documents, paths and queries: a call or a refusal."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import yarl
from hypothesis import given
from hypothesis import strategies as st

from covenant.providers import known_hosts
from covenant.wire import cross_host
from covenant.wire.a2a import calls, faults, push_urls
from covenant.wire.cross_host import SignedTask
from policy import errors

_FIELDS = (
    *(
        "id",
        "taskId",
        "message",
        "request",
        "messageId",
    ),
    *(
        "message_id",
        "contextId",
        "role",
        "parts",
        "content",
    ),
    *(
        "text",
        "data",
        "file",
        "raw",
        "url",
    ),
    *(
        "configuration",
        "blocking",
        "returnImmediately",
        "acceptedOutputModes",
        "pushNotificationConfig",
    ),
    *(
        "config",
        "token",
        "authentication",
        "schemes",
        "scheme",
    ),
    *(
        "credentials",
        "pageSize",
        "page_size",
        "pageToken",
        "status",
    ),
    *(
        "includeArtifacts",
        "pushNotificationConfigId",
    ),
)
_NAMES = st.sampled_from(_FIELDS)
_SOME = (
    *(
        "message/send",
        "tasks/get",
        "tasks/pushNotificationConfig/set",
        "SendMessage",
        "GetTask",
    ),
    *(
        "ListTasks",
        "CancelTask",
        "CreateTaskPushNotificationConfig",
        "DeleteTaskPushNotificationConfig",
    ),
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["user", "ROLE_USER", "text/plain", "http://a.example/x"]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(_NAMES, inside, max_size=6),
    max_leaves=12,
)
_PATHS = st.lists(
    st.sampled_from(["v1/", "tasks", "/", "id", ":", "cancel", "subscribe", "pushNotificationConfigs", "message:send"])
    | st.text(max_size=3),
    max_size=7,
).map("".join)
_METHODS = st.sampled_from(_SOME) | st.text(max_size=9)


def call_or_fault(read: Any) -> None:
    refused: errors.CovenantError | None = None
    try:
        read()
    except errors.HttpRefusedError as e:
        refused = e
    if refused is not None:
        fault = faults.fault_of(refused)
        assert fault.status in (400, 404)
        assert json.loads(faults.to_rpc(None, fault, refused))["error"]["code"] == fault.number


@given(st.binary(max_size=200) | _VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_envelope_or_fault(raw: bytes) -> None:
    call_or_fault(lambda: calls.envelope(raw))


@given(_METHODS, _VALUES)
def test_any_parameters_are_call_or_fault(method: str, params: Any) -> None:
    call_or_fault(lambda: calls.of_method(method, params))


@given(
    st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
    _PATHS,
    st.dictionaries(_NAMES, st.text(max_size=5), max_size=4),
    st.just(b"") | _VALUES.map(lambda value: json.dumps(value).encode()),
)
def test_any_request_is_call_or_fault(method: str, path: str, query: dict[str, str], raw: bytes) -> None:
    call_or_fault(lambda: calls.of_path(method, path, query, raw))


@given(st.text("htps:/a.example%2e@\\?#[]:0", max_size=40).map("https://a.example/hook".__add__) | st.text(max_size=30))
def test_any_url_below_rule_stays_below_it(text: str) -> None:
    rules, _ = push_urls.rules(["https://a.example/hook"])
    try:
        found = push_urls.check(rules, text)
    except errors.HttpRefusedError:
        return
    target = yarl.URL(str(found), encoded=True)
    assert (target.scheme, target.host, target.port, target.user) == ("https", "a.example", 443, None)
    assert target.path == "/hook" or target.path.startswith("/hook/")
    assert ".." not in target.path.split("/")


_TASKS = _VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60)


@given(_TASKS, st.integers(0, 2**64 - 1), st.binary(max_size=70), st.binary(max_size=80))
def test_any_envelope_is_task_or_reason(task_json: bytes, at_ms: int, signature: bytes, raw: bytes) -> None:
    made = SignedTask(task_json, at_ms, signature)
    assert cross_host.read(made.to_bytes()) == made
    found = cross_host.task_of(made)
    assert not isinstance(found, str) or found.startswith("malformed_")
    with contextlib.suppress(errors.MalformedRequestError):
        cross_host.read(raw)


@given(st.text(max_size=80) | st.sampled_from(['name = "a"\n', '[[host]]\nname = "b"\n', "host = [1]", 'name = "a/b"']))
def test_any_known_hosts_are_hosts_or_refused(text: str) -> None:
    with contextlib.suppress(errors.SettingError):
        assert isinstance(known_hosts.parse(text.encode(errors="replace"), where="x"), known_hosts.KnownHosts)
