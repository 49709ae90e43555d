"""Check the refusals before a token is read: each attack is tested beside the valid request that it is made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from covenant.adapters.http import guard
from covenant.adapters.http.guard import Guard, Head
from policy import errors

CONSOLE = "http://localhost:3000"
GUARD = Guard(8421, frozenset({CONSOLE}))
HOST = ("Host", "127.0.0.1:8421")
JSON = ("Content-Type", "application/json")


def head(
    *headers: tuple[str, str],
    method: str = "GET",
    target: str = "/tools",
    body: bool = False,
    query: Sequence[str] = (),
) -> Head:
    return Head(method, target, CIMultiDict([*headers]), query, body)


def status(given: Head) -> int:
    """Return the status of the refusal, or 0 if the request passes."""
    try:
        GUARD.check(given)
    except errors.HttpRefusedError as e:
        return int(e.details["status"])
    return 0


@pytest.mark.parametrize("host", ["127.0.0.1:8421", "localhost:8421", "LocalHost:8421", "[::1]:8421"])
def test_names_of_this_machine_pass(host: str) -> None:
    assert status(head(("Host", host))) == 0


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example:8421", "evil.example", "127.0.0.1", "localhost", "localhost:80", "[::1]", "127.0.0.1:8422"),
        *("localhost.evil.example:8421", "127.0.0.1.nip.io:8421", "localhost.:8421", "127.1:8421", "0.0.0.0:8421"),
        *("2130706433:8421", "[::ffff:127.0.0.1]:8421", "user@localhost:8421", "localhost:8421:8421", "", ":8421"),
        *("localhost:08421", "localhost:8421 ", "evil.example\tlocalhost:8421"),
    ],
)
def test_name_that_was_bound_anew_does_not(host: str) -> None:
    assert status(head(("Host", host))) == 421


@pytest.mark.parametrize("hosts", [(), (HOST, HOST), (HOST, ("host", "evil.example"))])
def test_request_has_one_host(hosts: tuple[tuple[str, str], ...]) -> None:
    assert status(head(*hosts)) == 400


@pytest.mark.parametrize("target", ["http://evil.example/tools", "*", "evil.example:443", "", "tools"])
def test_target_is_path(target: str) -> None:
    assert status(head(HOST, target=target)) == 400


@pytest.mark.parametrize(("version", "wanted"), [((1, 0), 0), ((1, 1), 0), ((0, 9), 400), ((2, 0), 400), ((1, 2), 400)])
def test_request_is_of_version_spoken(version: tuple[int, int], wanted: int) -> None:
    assert status(Head("GET", "/tools", CIMultiDict([HOST]), version=version)) == wanted


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_only_listed_origins_ask(method: str) -> None:
    assert status(head(HOST, ("Origin", CONSOLE), method=method)) == 0
    for other in ("null", "http://localhost:3001", "https://localhost:3000", f"{CONSOLE}/", f"{CONSOLE} {CONSOLE}", ""):
        assert status(head(HOST, ("Origin", other), method=method)) == 403, other
    assert status(head(HOST, ("Origin", CONSOLE), ("Origin", CONSOLE), method=method)) == 400


def test_what_browser_says_of_request_without_origin_counts() -> None:
    for site in ("cross-site", "same-site"):
        assert status(head(HOST, ("Sec-Fetch-Site", site))) == 403, site
        assert status(head(HOST, ("Sec-Fetch-Site", site), ("Origin", CONSOLE))) == 0, site
    for site in ("none", "same-origin"):
        assert status(head(HOST, ("Sec-Fetch-Site", site))) == 0, site


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", 'application/json;charset="utf-8"']
)
def test_body_is_json(kind: str) -> None:
    assert status(head(HOST, ("Content-Type", kind), method="POST", body=True)) == 0


@pytest.mark.parametrize(
    "kind",
    [
        *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp"),
        *("text/plain; application/json", "application/json, text/plain", "application/json; charset=utf-7", ""),
    ],
)
def test_what_form_can_send_is_none(kind: str) -> None:
    assert status(head(HOST, ("Content-Type", kind), method="POST", body=True)) == 415


def test_body_says_what_it_is_once_and_not_with_get() -> None:
    assert status(head(HOST, method="POST", body=True)) == 415
    assert status(head(HOST, method="POST")) == 0
    assert status(head(HOST, JSON, JSON, method="POST", body=True)) == 400
    assert status(head(HOST, JSON, body=True)) == 400
    assert status(head(HOST, JSON, ("Content-Encoding", "gzip"), method="POST", body=True)) == 415


def test_body_has_length_that_may_be() -> None:
    limit = guard.BODY_BYTES
    for length, wanted in ((str(limit), 0), (str(limit + 1), 413), ("9" * 5000, 413), ("-1", 413), ("1e3", 413)):
        found = status(head(HOST, JSON, ("Content-Length", length), method="POST", body=True))
        assert found == wanted, length


@pytest.mark.parametrize("name", ["token", "Access_Token", "bearer", "authorization", "token_b58"])
def test_token_in_query_is_refused(name: str) -> None:
    assert status(head(HOST, query=["limit", name])) == 400
    assert status(head(HOST, query=["limit", "tokens"])) == 0


def test_no_other_protocol_is_spoken() -> None:
    assert status(head(HOST, ("Upgrade", "h2c"))) == 400


def test_cors_is_for_listed_origins_alone() -> None:
    granted = GUARD.cors(CONSOLE, preflight=True)
    assert granted["Access-Control-Allow-Origin"] == CONSOLE
    assert granted["Access-Control-Allow-Credentials"] == "true"
    assert granted["Access-Control-Allow-Methods"] == "GET, POST, OPTIONS"
    assert GUARD.cors(None) == {"Vary": "Origin"}


def test_bad_origins_are_told_from_good_ones() -> None:
    good = ["http://localhost:3000", "https://console.example", "http://[::1]:3000"]
    bad = ["*", "null", "ftp://x", "http://x/", "http://x:0", "http://x:70000", "http://x:80", "http://U", "http://a b"]
    assert guard.origins([*good, *bad, "", " "]) == (frozenset(good), bad)


@pytest.mark.parametrize("value", ["Bearer abc", "bearer abc", "BEARER  abc "])
def test_scheme_has_no_case(value: str) -> None:
    assert guard.bearer(CIMultiDict([("Authorization", value)])) == "abc"


@pytest.mark.parametrize("values", [[], ["abc"], ["Bearer"], ["Bearer "], ["Basic abc"], ["Bearer a", "Bearer a"]])
def test_no_token_is_no_caller(values: list[str]) -> None:
    with pytest.raises(errors.AuthenticationError) as refused:
        guard.bearer(CIMultiDict([("Authorization", value) for value in values]))
    assert "abc" not in refused.value.message


@given(st.text(max_size=40))
def test_no_text_is_host_but_ours(text: str) -> None:
    ours = {"127.0.0.1:8421", "localhost:8421", "[::1]:8421"}
    assert (status(head(("Host", text))) == 0) == (text.lower() in ours)
