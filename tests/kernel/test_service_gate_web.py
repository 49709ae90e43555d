"""Searches and pages at the service gate, in its real processes, before servers on the loopback.

Each refusal has its control beside it: the same request of a granted host or provider is answered.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from policy.grants.sets import addresses
from sandbox.network.dns import names
from sandbox.network.gate.proxy import Proxy
from sandbox.network.service import connector, connector_wire
from sandbox.network.service.web import reader
from tests import loopback_server
from tests.kernel import connect_proxy, fake_web, gated_models
from tests.kernel.fake_web import KEY, PAGE, Web
from tests.kernel.gated_models import Gated

HOST, OTHER, BESIDE = "pages.example.com", "more.example.org", "beside.example.net"
WEB: dict[str, Any] = {
    "search": ["first", "second"],
    "fetch": [HOST, "*.example.org"],
    "searches_per_minute": None,
    "max_results": None,
    "fetches_per_minute": None,
}
NAMES = ["search.covenant", "fetch.covenant"]
TEXT = """
[providers.first]
kind = "{kind}"
endpoint = "http://{search}"
secret = "first"
timeout_seconds = 5
[providers.second]
kind = "mock"
[fetch."{host}"]
connect = "{pages}"
ca = "{ca}"
[fetch."{other}"]
connect = "{pages}"
ca = "{ca}"
[fetch."gone.example.org"]
connect = "127.0.0.1:{unused}"
[fetch."mock.example.org"]
mock = true
"""


@pytest.fixture
def search() -> Iterator[Web]:
    with fake_web.serving() as (made, _):
        yield made


@pytest.fixture
def pages() -> Iterator[tuple[Web, Path]]:
    with fake_web.serving(HOST, OTHER, BESIDE, "localhost") as made:
        yield made


def opened(asked: Web, pages: tuple[Web, Path], *, kind: str = "brave", proxy: Proxy | None = None, **web: Any) -> Any:
    """A gate without models."""
    text = TEXT.format(
        kind=kind,
        search=asked.place,
        host=HOST,
        other=OTHER,
        pages=pages[0].place,
        ca=pages[1],
        unused=loopback_server.free_port(),
    )
    plan = {"models": [], "names": NAMES, "web": {**WEB, **web}, "proxy": proxy}
    return gated_models.opened(text, {"first": KEY}, **plan)


def get(gated: Gated, host: str, path: str, *, more: str = "") -> tuple[int, bytes, http.client.HTTPResponse]:
    line = gated.connect()
    line.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())
    found = http.client.HTTPResponse(line)
    line.close()
    found.begin()
    return found.status, found.read(), found


def searched(gated: Gated, query: str = "q=two+words") -> tuple[int, Any]:
    status, body, _ = get(gated, NAMES[0], f"/search?{query}")
    return status, json.loads(body)


def fetched(gated: Gated, url: str) -> tuple[int, str]:
    status, body, _ = get(gated, NAMES[1], f"/fetch?url={quote(url, safe='')}")
    return status, body.decode()


@pytest.mark.parametrize(
    ("kind", "path", "expected"),
    [
        ("brave", "/res/v1/web/search", {"title": "two words 0", "url": "https://b.example/0", "snippet": "a & b"}),
        ("serpapi", "/search.json", {"title": "two words", "url": "https://s.example/", "snippet": "serp"}),
        ("searxng", "/search", {"title": "two words", "url": "https://x.example/", "snippet": "searx"}),
    ],
)
def test_search_has_one_form_for_every_provider(
    search: Web, pages: tuple[Web, Path], kind: str, path: str, expected: dict[str, str]
) -> None:
    with opened(search, pages, kind=kind) as gated:
        status, document = searched(gated, "q=two+words&count=1")
        gated.look()
        (row,) = gated.read
    assert (status, document) == (200, {"results": [expected]})
    assert (row.service, row.target, row.status, row.results) == ("search", "first", 200, 1)
    (seen,) = search.seen
    sent = {"brave": seen["headers"].get("x-subscription-token"), "serpapi": seen["query"].get("api_key")}
    assert seen["path"] == path
    assert sent.get(kind, seen["headers"].get("authorization", "").removeprefix("Bearer ")) == KEY


def test_failed_search_falls_back_and_hides_the_key(search: Web, pages: tuple[Web, Path]) -> None:
    with opened(search, pages) as gated:
        for status, body in ((500, None), (403, None), (200, b"{"), (200, b'{"web": 3}'), (200, b"x" * (5 << 20))):
            search.status, search.body = status, body
            found = searched(gated, "q=words&count=2")
            assert (found[0], [one["url"] for one in found[1]["results"]]) == (
                200,
                ["https://mock.example/1", "https://mock.example/2"],
            )
        assert gated.codes() == ["provider_failed"] * 5
    with opened(search, pages, search=["first"]) as gated:
        search.status, search.body = 403, None
        status, document = searched(gated)
        assert (status, document["error"]["code"]) == (502, "key_refused")
        assert KEY not in json.dumps(document)
        search.status = 500
        assert searched(gated)[1]["error"]["code"] == "no_provider"
        search.status = 200
        assert searched(gated)[0] == 200


def test_provider_is_asked_by_https(pages: tuple[Web, Path]) -> None:
    """The gate makes TLS after it is sealed, when it can open no file."""
    served, ca = pages
    text = f'[providers.own]\nkind = "searxng"\nendpoint = "https://localhost:{served.server_port}"\n'
    plan: dict[str, Any] = {"models": [], "names": NAMES, "web": {**WEB, "search": ["own"], "fetch": []}}
    with gated_models.opened(f'{text}ca = "{ca}"\n', **plan) as gated:
        assert searched(gated)[0] == 200
    with gated_models.opened(text, **plan) as gated:
        assert searched(gated)[1]["error"]["code"] == "no_provider"  # of an authority that is not trusted
    assert len(served.seen) == 1


def test_search_of_odd_form_is_refused(search: Web, pages: tuple[Web, Path]) -> None:
    with opened(search, pages, max_results=3) as gated:
        assert len(searched(gated, "q=a&count=20")[1]["results"]) == 3
        sent = len(search.seen)
        odd = [
            "",
            "q=",
            "q=a&count=0",
            "q=a&count=21",
            "q=a&count=x",
            "q=a&q=b",
            "q=a&site=b",
            "q=a%0Ab",
            "q=" + "a" * 401,
        ]
        odd += ["q=" + "a" * 401]
        assert [searched(gated, query)[0] for query in odd] == [400] * len(odd)
        assert get(gated, NAMES[0], "/res/v1/web/search?q=a")[0] == 404
        assert get(gated, NAMES[0], "/fetch?url=https://x/")[0] == 404
        assert get(gated, "models.covenant", "/v1/models")[0] == 421
        assert get(gated, NAMES[0], "/search?q=a", more="Content-Length: 1\r\n")[0] == 400
        assert len(search.seen) == sent
        assert gated.lives()


def test_web_limits_are_429_with_a_reason(search: Web, pages: tuple[Web, Path]) -> None:
    pages[0].pages["/"] = (200, {}, PAGE.encode())
    with opened(search, pages, searches_per_minute=2, fetches_per_minute=1) as gated:
        assert [searched(gated)[0] for _ in range(3)] == [200, 200, 429]
        assert fetched(gated, f"https://{HOST}/")[0] == 200
        status, body, found = get(gated, NAMES[1], f"/fetch?url=https://{HOST}/")
        assert (status, json.loads(body)["error"]["code"]) == (429, "limit")
        assert 0 < int(found.headers["Retry-After"]) <= 61
    assert (len(search.seen), len(pages[0].seen)) == (2, 1)


def test_page_comes_as_text(search: Web, pages: tuple[Web, Path]) -> None:
    served, _ = pages
    served.pages["/a"] = (200, {"Set-Cookie": "tracked=1"}, PAGE.encode())
    served.pages["/plain"] = (200, {"Content-Type": "text/plain; charset=latin-1"}, b"caf\xe9")
    served.pages["/russian"] = (
        200,
        {"Content-Type": "text/html; charset=windows-1251"},
        "<p>слово</p>".encode("cp1251"),
    )
    served.pages["/part"] = (206, {}, b"<p>a part</p>")
    served.pages["/gone"] = (404, {}, b"<p>not here</p>")
    with opened(search, pages) as gated:
        status, body, found = get(
            gated, NAMES[1], f"/fetch?url=https://{HOST}/a%3Fx%3D1%23part", more="Cookie: a=b\r\n"
        )
        assert (status, body.decode()) == (200, "# A & B\n\nHeading\nOne bold word.\nx\ny")
        assert found.headers["Content-Location"] == f"https://{HOST}/a?x=1"
        assert "Set-Cookie" not in found.headers
        assert fetched(gated, f"https://{HOST}/plain") == (200, "café")
        assert fetched(gated, f"https://{HOST}/russian") == (200, "слово")
        assert fetched(gated, f"https://{HOST}/part") == (200, "a part")
        assert fetched(gated, f"https://{HOST}/gone") == (404, "not here")
        assert "About /some/page" in fetched(gated, "https://mock.example.org/some/page")[1]
        gated.look()
        assert [(row.service, row.target, row.status) for row in gated.read][:2] == [("fetch", HOST, 200)] * 2
    assert served.seen[0]["query"] == {"x": "1"}
    assert "cookie" not in served.seen[0]["headers"]


def test_page_that_is_not_granted_is_refused(search: Web, pages: tuple[Web, Path]) -> None:
    served, _ = pages
    served.pages["/a"] = (200, {}, PAGE.encode())
    odd = [
        f"http://{HOST}/a", f"https://{HOST}:8443/a", f"https://user@{HOST}/a", f"https://{HOST}\\@{BESIDE}/a",
        "https:///a", "ftp://x.example.org/", "file:///etc/passwd", f"https://{HOST}/ a", "x" * 2049,
    ]  # fmt: skip
    ungranted = [f"https://{BESIDE}/a", "https://127.0.0.1/a", "https://[::1]/a", "https://example.org/a", "https://1/"]
    ungranted += [f"https://{'a' * 64}.example.org/", f"https://{'a.' * 130}example.org/", "https://*.example.org/"]
    with opened(search, pages) as gated:
        assert [fetched(gated, url)[0] for url in odd] == [400] * len(odd)
        found = [json.loads(fetched(gated, url)[1])["error"]["code"] for url in ungranted]
        assert found == ["host_not_granted"] * len(ungranted)
        assert fetched(gated, "https://gone.example.org/")[0] == 502
        assert served.seen == []
        assert fetched(gated, f"https://{HOST}/a")[0] == 200
        assert gated.lives()


def test_redirect_leads_to_granted_hosts_alone(search: Web, pages: tuple[Web, Path]) -> None:
    served, _ = pages
    for name, target in {
        "/other": f"https://{OTHER}/a",
        "/near": "a",
        "/beside": f"https://{BESIDE}/a",
        "/clear": f"http://{OTHER}/a",
        "/inward": "https://127.0.0.1/a",
        "/loop": "/loop",
        "/bad": "https://[",
    }.items():
        served.pages[name] = (302, {"Location": target}, b"")
    served.pages["/a"] = (200, {}, b"<p>arrived</p>")
    with opened(search, pages) as gated:
        found = {name: fetched(gated, f"https://{HOST}{name}") for name in list(served.pages)}
        codes = {name: json.loads(body)["error"]["code"] for name, (status, body) in found.items() if status >= 300}
        assert found["/other"] == found["/near"] == (200, "arrived")
        assert codes == {
            "/beside": "host_not_granted",
            "/clear": "host_not_granted",
            "/inward": "host_not_granted",
            "/loop": "provider_failed",
            "/bad": "provider_failed",
        }
        gated.look()
        assert [row.target for row in gated.read][:2] == [HOST, OTHER]
    assert {one["headers"]["host"] for one in served.seen} == {HOST, OTHER}


def test_page_too_large_or_no_text_is_refused(search: Web, pages: tuple[Web, Path]) -> None:
    served, _ = pages
    whole = b"<p>" + b"a" * (reader.PAGE_BYTES - 3)
    served.pages["/whole"] = (200, {}, whole)
    served.pages["/more"] = (200, {}, whole + b"a")
    served.pages["/image"] = (200, {"Content-Type": "image/png"}, b"x")
    served.pages["/gzip"] = (200, {"Content-Encoding": "gzip"}, b"x")
    served.pages["/odd"] = (200, {"Content-Type": "text/plain; charset=never"}, b"x")
    served.pages["/slow"] = (200, {"Content-Type": "text/plain; charset=idna"}, b"x")
    served.pages["/later"] = (304, {}, b"")
    served.pages["/strange"] = (999, {}, b"x")
    with opened(search, pages) as gated:
        assert [fetched(gated, f"https://{HOST}{one}")[0] for one in list(served.pages)[1:]] == [502] * 7
        status, text = fetched(gated, f"https://{HOST}/whole")
        assert (status, len(text)) == (200, reader.TEXT_BYTES)
        assert gated.lives()


def test_private_address_is_refused_by_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate sees no address: the connector judges each, as the DNS gate does."""
    found = {"inward.example.org": ["10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fd00::1"]}
    found["both.example.org"] = ["127.0.0.1", "93.184.216.34"]
    tried: list[tuple[str, int]] = []

    def answers(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found[host]]

    def connect(address: tuple[str, int], **_: Any) -> socket.socket:
        tried.append(address)
        return socket.socket()

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    monkeypatch.setattr(socket, "create_connection", connect)
    plan = {"providers": [], "hosts": ["*.example.org"], "places": {"own.example.org": ["10.0.0.5", 443]}}
    targets = connector.Targets(plan)
    with pytest.raises(PermissionError):
        targets.connected(connector_wire.BY_NAME, "inward.example.org")
    for host in ("both.example.org", "own.example.org"):
        targets.connected(connector_wire.BY_NAME, host).close()
    assert tried == [("93.184.216.34", 443), ("10.0.0.5", 443)]
    known = {b"a.example.org": True, b"example.org": False, b"other.test": False, b"": False, b"\xff": False}
    assert {one: targets.known(connector_wire.BY_NAME, one) for one in known} == known
    assert not targets.known(0, b"")
    assert b"\x7f\0\0\1" not in names.Public(addresses.PUBLIC)


def test_pages_and_searches_go_by_the_proxy(search: Web, pages: tuple[Web, Path]) -> None:
    pages[0].pages["/a"] = (200, {}, PAGE.encode())
    with connect_proxy.serving("ann:planted") as proxy:
        by = Proxy("127.0.0.1", proxy.port, "ann:planted", direct=(OTHER,))
        with opened(search, pages, proxy=by) as gated:
            assert fetched(gated, f"https://{HOST}/a")[0] == 200
            assert searched(gated)[0] == 200
            places = [f"{host}:{port}" for host, port in proxy.asked]
            assert places == [pages[0].place, search.place]
            # A host that is reached without it, and a proxy that refuses: the page fails, and nothing goes around.
            assert fetched(gated, f"https://{OTHER}/a")[0] == 200
            assert len(proxy.asked) == 2
            proxy.says = b"HTTP/1.1 403 No\r\n\r\n"
            before = len(pages[0].seen)
            assert fetched(gated, f"https://{HOST}/a?again")[0] == 502
            assert len(pages[0].seen) == before


def test_reader_that_is_killed_ends_the_fetch(search: Web, pages: tuple[Web, Path]) -> None:
    pages[0].pages["/a"] = (200, {}, PAGE.encode())
    with opened(search, pages) as gated:
        assert fetched(gated, f"https://{HOST}/a")[0] == 200
        os.kill(gated.gate.processes[2].pid, signal.SIGKILL)
        until = time.monotonic() + 20
        while gated.lives() and time.monotonic() < until:
            time.sleep(0.02)
        assert not gated.lives()  # the run's watch of the reader ends the run


def test_hostile_html_is_text_or_nothing(search: Web, pages: tuple[Web, Path]) -> None:
    served, _ = pages
    hostile = {
        "/deep": b"<div>" * 200_000 + b"x",
        "/tags": b"<" * 1_000_000,
        "/attributes": b"<p " + b"a=1 " * 200_000 + b">x",
        "/nul": b"<p>a\0b</p>" * 1000,
        "/entities": b"<p>" + b"&amp;" * 200_000,
        "/tables": b"<table><tr><td>" * 20_000,
        "/formatting": b"<b><p><a>" * 10_000,
        "/none": b"",
        "/bytes": bytes(range(256)) * 100,
    }
    served.pages |= {name: (200, {}, body) for name, body in hostile.items()}
    with opened(search, pages) as gated:
        found = {name: fetched(gated, f"https://{HOST}{name}")[0] for name in hostile}
        assert set(found.values()) <= {200, 503}, found
        assert gated.lives()
        print(found)
