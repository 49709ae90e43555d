"""Revisions of MCP: which requests stand alone, which are refused, and what a result says."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.network.tools import revisions
from sandbox.network.tools.revisions import Refusal

META: dict[str, Any] = {revisions.VERSION: revisions.NEWEST, revisions.CAPABILITIES: {}}
HEADERS = {"mcp-protocol-version": revisions.NEWEST, "mcp-method": "tools/call", "mcp-name": "open"}


def looked(
    method: str = "tools/call", meta: Any = META, headers: dict[str, str] | None = None, **params: Any
) -> bool | int:
    given = params if meta is None else {**params, "_meta": meta}
    found = revisions.stands_alone(method, {"name": "open", **given}, headers)
    return found.code if isinstance(found, Refusal) else found


@pytest.mark.parametrize(
    ("meta", "headers", "found"),
    [
        (None, None, False),
        (None, {}, False),
        ({"progressToken": 1}, {"mcp-protocol-version": "2025-06-18"}, False),
        ("text", None, False),
        ({revisions.VERSION: "2025-11-25"}, {"mcp-protocol-version": "2025-11-25"}, False),
        (META, None, True),
        (META, HEADERS, True),
        (META, {**HEADERS, "mcp-name": "=?base64?b3Blbg==?="}, True),
        ({**META, "com.example/more": 1}, HEADERS, True),
        (None, {"mcp-protocol-version": "2030-01-01"}, revisions.UNSUPPORTED),
        ({**META, revisions.VERSION: "2030-01-01"}, None, revisions.UNSUPPORTED),
        ({**META, revisions.VERSION: "2030-01-01"}, {"mcp-protocol-version": "2030-01-01"}, revisions.UNSUPPORTED),
        (None, HEADERS, revisions.BAD_PARAMS),
        ("text", HEADERS, revisions.BAD_PARAMS),
        ({revisions.VERSION: 7}, None, revisions.BAD_PARAMS),
        ({revisions.VERSION: revisions.NEWEST}, HEADERS, revisions.BAD_PARAMS),
        ({**META, revisions.CAPABILITIES: []}, HEADERS, revisions.BAD_PARAMS),
        (META, {}, revisions.MISMATCH),
        (META, {**HEADERS, "mcp-protocol-version": "2025-11-25"}, revisions.MISMATCH),
        ({revisions.VERSION: "2025-11-25"}, HEADERS, revisions.MISMATCH),
        (META, {**HEADERS, "mcp-method": "tools/list"}, revisions.MISMATCH),
        (META, {**HEADERS, "mcp-method": "Tools/Call"}, revisions.MISMATCH),
        (META, {**HEADERS, "mcp-name": "shut"}, revisions.MISMATCH),
        (META, {**HEADERS, "mcp-name": "=?base64?b3Blbg=?="}, revisions.MISMATCH),
        (META, {**HEADERS, "mcp-name": "=?base64?\u00e9?="}, revisions.MISMATCH),
        (META, {**HEADERS, "mcp-name": "=?base64?\udce9?="}, revisions.MISMATCH),
        (META, {name: value for name, value in HEADERS.items() if name != "mcp-name"}, revisions.MISMATCH),
    ],
)
def test_request_is_of_one_revision_or_refused(meta: Any, headers: Any, found: bool | int) -> None:
    assert looked(meta=meta, headers=headers) == found


def test_discovery_stands_alone_or_is_refused() -> None:
    assert looked("server/discover", meta=None) == revisions.BAD_PARAMS
    assert looked("server/discover") is True
    assert looked("server/discover", meta={**META, revisions.VERSION: "2025-11-25"}) is False


def test_refusal_of_revision_names_those_that_are_spoken() -> None:
    found = revisions.stands_alone("ping", {"_meta": {**META, revisions.VERSION: "1900-01-01"}}, None)
    assert isinstance(found, Refusal)
    assert found.error()["data"] == {"supported": list(revisions.SPOKEN), "requested": "1900-01-01"}
    assert revisions.SPOKEN == ("2026-07-28", "2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")


@pytest.mark.parametrize(
    ("asked", "found"), [("2025-03-26", "2025-03-26"), ("2026-07-28", "2025-11-25"), (["x"], "2025-11-25")]
)
def test_initialize_gets_revision_that_has_it(asked: Any, found: str) -> None:
    assert revisions.negotiated(asked) == found


def test_own_results() -> None:
    stamp = revisions.stamp("fs", "1.0")
    found = revisions.own_result("server/discover", stamp, [])
    assert isinstance(found, dict)
    assert (found["supportedVersions"], found["resultType"]) == (list(revisions.SPOKEN), "complete")
    assert found["_meta"][revisions.SERVER] == {"name": "fs", "version": "1.0"}
    listed = revisions.own_result("tools/list", stamp, [{"name": "open"}])
    assert isinstance(listed, dict)
    assert (listed["tools"], listed["cacheScope"]) == ([{"name": "open"}], "private")
    for method in ("initialize", "ping", "logging/setLevel", "subscriptions/listen", "prompts/list"):
        refused = revisions.own_result(method, stamp, [])
        assert isinstance(refused, Refusal)
        assert refused.code == revisions.NO_METHOD


SCHEMA = {
    "properties": {
        "region": {"type": "string", "x-mcp-header": "Region"},
        "inner": {"type": "object", "properties": {"count": {"type": "integer", "x-mcp-header": "Count"}}},
        "on": {"type": "boolean", "x-mcp-header": "On"},
    }
}


@pytest.mark.parametrize(
    ("arguments", "headers", "is_same"),
    [
        ({}, {}, True),
        ({"region": "eu"}, {"mcp-param-region": "eu"}, True),
        ({"region": "\u00fc"}, {"mcp-param-region": "=?base64?w7w=?="}, True),
        ({"inner": {"count": 42}, "on": False}, {"mcp-param-count": "42.0", "mcp-param-on": "false"}, True),
        ({"region": None}, {}, True),
        ({"region": "eu"}, {}, False),
        ({"region": "eu"}, {"mcp-param-region": "us"}, False),
        ({}, {"mcp-param-region": "eu"}, False),
        ({"inner": {"count": 42}}, {"mcp-param-count": "4_2"}, False),
        ({"inner": {"count": 42}}, {"mcp-param-count": "nan"}, False),
        ({"inner": 1}, {"mcp-param-count": "1"}, False),
        ({"on": True}, {"mcp-param-on": "True"}, False),
        ({"region": ["eu"]}, {"mcp-param-region": "['eu']"}, False),
    ],
)
def test_headers_repeat_arguments(arguments: Any, headers: Any, is_same: bool) -> None:
    found = revisions.check_arguments(SCHEMA, arguments, headers)
    assert (found is None) == is_same
    assert revisions.check_arguments(SCHEMA, arguments, None) is None, "over stdio there are none"


@pytest.mark.parametrize(
    ("schema", "is_wrong"),
    [
        (SCHEMA, False),
        (None, False),
        ({"properties": "x"}, False),
        ({"properties": {"x-mcp-header": {"type": "string"}}}, False),
        ({"properties": {"a": {"type": "string", "x-mcp-header": ""}}}, True),
        ({"properties": {"a": {"type": "string", "x-mcp-header": "a b"}}}, True),
        ({"properties": {"a": {"type": "string", "x-mcp-header": "a\r\nb"}}}, True),
        ({"properties": {"a": {"type": "string", "x-mcp-header": 7}}}, True),
        ({"properties": {"a": {"type": "number", "x-mcp-header": "A"}}}, True),
        ({"properties": {"a": {"x-mcp-header": "A"}}}, True),
        ({"properties": {n: {"type": "string", "x-mcp-header": n} for n in ("a", "A")}}, True),
        ({"type": "string", "x-mcp-header": "A"}, True),
        ({"items": {"properties": {"a": {"type": "string", "x-mcp-header": "A"}}}}, True),
        ({"$defs": {"a": {"type": "string", "x-mcp-header": "A"}}}, True),
        ({"anyOf": [{"properties": {"a": {"type": "string", "x-mcp-header": "A"}}}]}, True),
    ],
)
def test_headers_that_no_client_may_send_are_found(schema: Any, is_wrong: bool) -> None:
    assert revisions.is_mirrored_wrongly(schema) == is_wrong
