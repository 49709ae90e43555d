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
