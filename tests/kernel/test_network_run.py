"""An agent with a network, through the supervisor, gVisor and a real gateway, on an internet of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import internet
from tests.kernel.internet import Internet, NetworkedWorld


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet.made() as made:
        yield made


@pytest.fixture
def networked(tmp_path: Path, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    yield world
    assert net.leftovers() == []


def test_a_granted_address_connects_and_others_are_refused(networked: NetworkedWorld) -> None:
    grants = internet.entries(("93.184.216.34", "[80]", "tcp"), ("2606:4700::1111", "[80]", "tcp"))
    probes = [
        "tcp('93.184.216.34', 80)", "tcp('2606:4700::1111', 80)",
        "tcp('93.184.216.34', 443)", "tcp('9.9.9.9', 80)", "tcp('2606:4700::2222', 80)", "udp('9.9.9.9', 123)",
    ]  # fmt: skip
    answer = networked.ask(internet.probes(probes), network="full", more=grants)
    assert answer == ["connected", "connected", "ECONNREFUSED", "ECONNREFUSED", "ECONNREFUSED", "ECONNREFUSED"]


def test_names_resolve_where_granted_and_lead_there_alone(networked: NetworkedWorld) -> None:
    grants = internet.entries(
        ("api.example.com", "[80]", "tcp"),
        ("www.example.com", "[443]", "tls"),
        ("rebind.example.com", "[80]", "tcp"),
    )
    probes = {
        "resolve('api.example.com')": ["2606:4700::1111", "93.184.216.34"],
        "tcp('api.example.com', 80, 10)": "connected",
        "tcp('93.184.216.34', 443)": "ECONNREFUSED",
        "tls('www.example.com')": "www.example.com",
        "tls('other.example.com', '93.184.216.35')": "ECONNRESET",
        "resolve('other.example.com')": "gaierror -2",
        "resolve('rebind.example.com')": "gaierror -5",
        "tcp('10.8.8.8', 80)": "ECONNREFUSED",
        "open('/etc/resolv.conf').read()": "nameserver 192.0.0.1\n",
    }
    answer = networked.ask(
        internet.probes(list(probes)), network="full", more=grants, files={"ca.pem": networked.internet.certificate}
    )
    assert dict(zip(probes, answer, strict=True)) == probes
