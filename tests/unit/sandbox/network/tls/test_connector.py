"""The connector of the operator's proxy against an attacker in the TLS gate: it connects to what is granted alone."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from sandbox.network.gate.proxy import Proxy, ProxyError
from sandbox.network.service import connector_wire
from sandbox.network.service.connector import Targets
from sandbox.network.tls import gate, proxy_wire
from sandbox.network.tls.connector import Destinations, RefusedDestination

PROXY = "203.0.113.9"
TOLD = {
    "api.example.com": ["93.184.216.34", "10.8.8.8", "169.254.169.254", "127.0.0.1", "2606:4700::1111"],
    "db.example.com": ["10.8.8.8"],
    "held.example.com": ["9.9.9.9"],
    "other.example.com": ["9.9.9.9"],
}


def destinations(**proxy: Any) -> Destinations:
    plan = {
        "names": [{"pattern": one, "ports": [[443, 443]]} for one in ("api.example.com", "db.example.com")],
        "asked": [{"pattern": "held.example.com", "ports": [[443, 443]]}],
        "addresses": [{"first": "198.51.100.7", "last": "198.51.100.7", "ports": [[443, 443]]}],
        "proxy": Proxy(PROXY, 3128, **proxy).plan(),
    }
    return Destinations(plan, lambda name: TOLD.get(name, []))


def test_names_lead_to_told_public_addresses() -> None:
    found = destinations()
    assert found.of("api.example.com", "2606:4700::1111", 443) == ["2606:4700::1111", "93.184.216.34"]
    # The gate does not choose the address: one that the agent was not told is not asked for.
    assert found.of("api.example.com", "8.8.8.8", 443) == ["93.184.216.34", "2606:4700::1111"]
    assert found.of("db.example.com", "10.8.8.8", 443) == []
    assert found.of("held.example.com", "9.9.9.9", 443) == ["9.9.9.9"]
    assert found.of("", "198.51.100.7", 443) == ["198.51.100.7"]


@pytest.mark.parametrize(
    "asked",
    [
        ("other.example.com", "9.9.9.9", 443),
        ("api.example.com", "93.184.216.34", 22),
        ("api.example.com.evil.net", "93.184.216.34", 443),
        ("", "93.184.216.34", 443),
        ("", "198.51.100.7", 80),
        ("", "127.0.0.1", 443),
    ],
)
def test_what_is_not_granted_ends_the_gate(asked: tuple[str, str, int]) -> None:
    with pytest.raises(RefusedDestination):
        destinations().of(*asked)


@pytest.mark.parametrize("asked", ["x", "198.51.100.7\r\nX: y", "198.51.100.7 HTTP/1.1", ""])
def test_malformed_address_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        destinations().of("", asked, 443)


def test_name_of_the_proxy_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **how: [(0, 0, 0, "", (PROXY, 3128))])
    monkeypatch.setattr("sandbox.network.tls.connector.is_local", lambda address: False)
    found = destinations(resolves=("*",))
    found.proxy = Proxy("API.example.com", 3128, resolves=("*",))
    with pytest.raises(ProxyError) as refused:
        found.connected("api.example.com", ["192.31.196.7"], 443)
    assert refused.value.code == "proxy_itself"


@pytest.mark.parametrize("host", ["10.0.0.5", "127.1", "0x7f000001", "a.0x7f", "localhost", "x.localhost"])
def test_proxy_looks_up_no_address_of_choice(host: str) -> None:
    proxy = Proxy(PROXY, 3128, resolves=("*", "*.localhost", host))
    assert not proxy.looks_up(host)
    assert proxy.looks_up("internal.example.com")


@pytest.mark.parametrize("host", ["10.0.0.5", "127.1"])
def test_page_at_private_address_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, theirs = socket.socketpair()
    monkeypatch.setattr(Proxy, "connected", lambda *place: made)
    # As the C library reads both.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **how: [(0, 0, 0, "", ("10.0.0.5", 443))])
    proxy = Proxy(PROXY, 3128, resolves=("*",)).plan()
    pages = Targets({"providers": [], "hosts": ["*"], "places": {}, "proxy": proxy})
    with made, theirs:
        assert pages.connected(connector_wire.BY_NAME, "internal.example.com") is made
        with pytest.raises(PermissionError, match="no public address"):
            pages.connected(connector_wire.BY_NAME, host)


def test_gate_behind_a_proxy_cannot_connect() -> None:
    # It holds sockets of the host's namespace; with connect(2) it could turn one elsewhere.
    assert {"connect", "socket", "bind"} & gate.CALLS == {"connect", "socket"}
    assert not {"connect", "socket", "bind", "sendmmsg"} & gate.PROXY_CALLS


@pytest.mark.parametrize(
    "raw", [b"", b"\1\xbb", b"\1\xbb\5abc", b"\1\xbb\1\xff1.2.3.4", proxy_wire.request("a", "1.2.3.4", 443)[:3]]
)
def test_malformed_requests_are_none(raw: bytes) -> None:
    assert proxy_wire.read(raw) is None
    assert proxy_wire.read(proxy_wire.request("a.b", "1.2.3.4", 443)) == ("a.b", "1.2.3.4", 443)
