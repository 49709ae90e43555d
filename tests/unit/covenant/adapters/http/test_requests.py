"""Each route of the table becomes its request, by path, query and body, and nothing else becomes one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.adapters.http import requests as http_requests
from covenant.adapters.http import routes
from covenant.adapters.http.routes import Route
from covenant.wire import requests, responses, types
from policy import errors

BY: dict[tuple[str, str], Route] = {(route.method, route.path): route for route in routes.TABLE}
ME = {"display": "user@local", "pubkey": "4uQeVj5tqViQh7yWWGStvkEG1Zmhx6uasJtWCJziofM"}
TASK = {"id": "t", "sender": ME, "recipient": ME, "intent_text": "do"}


def build(method: str, path: str, *, body: Any = None, query: tuple[tuple[str, str], ...] = (), **parts: str) -> Any:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return http_requests.build(BY[method, path], path=parts, query=query, body=raw)


def test_table_has_every_route_of_version_1() -> None:
    """Section 5 of covenant-v1.md, word for word."""
    written = """GET /health, /version; POST /intent; POST /intents/resume; GET /intents/:id/result;
    GET /intents/:id/events; GET /memory/recent, /memory/search; POST /memory/purge, /memory/repair, /memory/compact,
    /memory/records/backfill; GET /verify; GET /receipts/recent; GET /capabilities/recent; POST /capabilities/grant,
    /capabilities/revoke, /capabilities/purge; POST /identity/sign; GET /tools; POST /tools/call; GET /audit/recent,
    /audit/verify; POST /audit/purge; POST /a2a/tasks; GET /a2a/tasks/next, /a2a/tasks/recent; POST /a2a/results;
    GET /a2a/results/next, /a2a/results/recent; GET /a2a/queue; POST /a2a/repair, /a2a/compact, /a2a/peer-tasks;
    POST /peers/purge, /peers/rotate, /peers/revoke; GET /peers/list; GET /budget/debits; GET /chain/status,
    /chain/receipt-batches; POST /chain/flush-receipts; POST /settlement/receipts/backfill; GET /sap/stats;
    POST /x402/pay"""
    wanted = set()
    for group in written.split(";"):
        method, _, paths = group.strip().partition(" ")
        wanted |= {(method, re.sub(r"\s", "", path).replace(":id", "{intent_id}")) for path in paths.split(",")}
    assert {(route.method, route.path) for route in routes.VERSION_1} == wanted
    assert len(BY) == len(routes.TABLE)


def test_every_kind_has_route_but_those_for_connection() -> None:
    """And secrets and links to the console, which a web page's program has no business with."""
    routed = {route.kind for route in routes.TABLE} - {""}
    missing = set(requests.KINDS) - routed
    served = {kind for kind in missing if requests.KINDS[kind] is not requests.Unsupported}
    assert served == {"ping", "protocol_info", "authenticate", "get_secret", "open_console"}
    assert routed <= set(requests.KINDS)
    assert {route.answer for route in routes.TABLE} - {"", "health", "version"} <= set(responses.KINDS)


def test_query_is_read_by_types_of_fields() -> None:
    asked = build(
        "GET", "/memory/search", query=(("q", "12"), ("limit", "3"), ("min_relevance", "0.5"), ("tier", "working"))
    )
    assert asked == requests.SearchMemory(query="12", limit=3, min_relevance=0.5, tier=types.Tier.WORKING)
    assert build("GET", "/memory/search", query=(("q", "a"), ("tier", "long-term"))).tier == "longterm"


def test_what_is_not_said_has_version_1s_defaults() -> None:
    for path, limit in (("/audit/recent", 20), ("/memory/recent", 10), ("/budget/debits", 20), ("/peers/list", 20)):
        assert build("GET", path).limit == limit, path
    assert build("GET", "/verify").window == 100


def test_peers_are_listed_by_version_1s_names_and_unknown_status_is_no_filter() -> None:
    path = "/peers/list"
    assert build("GET", path, query=(("prefix", "4u"), ("status", "live"))).status_filter == "live"
    asked = build("GET", path, query=(("prefix", "4u"), ("status", "sleeping")))
    assert (asked.pubkey_prefix, asked.status_filter) == ("4u", None)


def test_part_of_path_is_field() -> None:
    asked = build("GET", "/audit/inclusion/{event_id}", event_id="e-1")
    assert asked == requests.ProveAuditInclusion(event_id="e-1")
    ours = build("GET", "/audit/prove/{event_id}", event_id="e-1")
    assert ours == requests.ProveAuditInclusion(event_id="e-1", extended=True)


@pytest.mark.parametrize(
    ("path", "field", "inner"),
    [
        ("/a2a/tasks", "task", TASK),
        ("/a2a/results", "result", {"task_id": "t", "status": "ok"}),
        ("/memory/compact", "request", {"mode": "dry_run", "policy": {}, "reason": "r"}),
        ("/a2a/retry-stale", "policy", {"enabled": True}),
    ],
)
def test_body_may_be_request_or_one_field_of_it(path: str, field: str, inner: dict[str, Any]) -> None:
    assert build("POST", path, body=inner) == build("POST", path, body={field: inner})


def test_body_that_need_not_say_anything_may_say_nothing() -> None:
    assert build("POST", "/peers/rotate") == build("POST", "/peers/rotate", body={}) == requests.RotateOperatorToken()
    assert build("POST", "/a2a/retry-stale") == requests.RetryA2AStale()


def test_body_can_name_neither_another_kind_nor_how_it_is_carried() -> None:
    asked = build("POST", "/intent", body={"kind": "rotate_operator_token", "text": "t", "prefer_stream": True})
    assert asked == requests.SubmitIntent(text="t")


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"[]",
            b"null",
            b'"text"',
            b"{",
            b"\xff",
            b'{"text": "a", "text": "b"}',
            b'{"text": 1}',
            b"{}",
            b'{"text": null}',
        ),
        *(b'{"text": "\\ud800"}', b'{"text": NaN}', b"[" * 100_000, b'{"text": ' + b"[" * 70 + b"]" * 70 + b"}"),
        b'{"text": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(errors.MalformedRequestError):
        build("POST", "/intent", body=body)


@pytest.mark.parametrize(
    "query",
    [
        *(
            (("limit", "-1"),),
            (("limit", "1.5"),),
            (("limit", ""),),
            (("limit", "1"), ("limit", "1")),
            (("limit", "٣"),),
        ),
        *((("tier", "other"),), (("limit", "9" * 30),), (("limit", "1_0"),), (("limit", " 1"),), (("limit", "0x1"),)),
    ],
)
def test_query_none_is_refused(query: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(errors.MalformedRequestError):
        build("GET", "/memory/recent", query=query)


@pytest.mark.parametrize("segment", ["..", ".", ".hidden", "a/b", "a%2fb", "", "a b", "a\r\nb", "ä", "a" * 129, "a\0"])
def test_no_part_of_path_leads_out_of_it(segment: str) -> None:
    assert re.fullmatch(routes.SEGMENT, segment) is None
    assert re.fullmatch(routes.SEGMENT, "0b9f2f0a-5a3c-4c8e-9a51-8d1a4f0f2a11")


@given(
    st.sampled_from(routes.TABLE),
    st.binary(max_size=60),
    st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8))),
)
def test_whatever_comes_is_request_or_refused(route: Route, body: bytes, query: list[tuple[str, str]]) -> None:
    if not route.kind:
        return
    try:
        asked = http_requests.build(route, path=dict.fromkeys(route.parameters, "x"), query=query, body=body)
    except errors.MalformedRequestError:
        return
    assert asked.kind == route.kind
