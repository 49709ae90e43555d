"""Ports of this host read back: the agent reaches exactly those of the gate, and a spoiled artefact is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policy import data, errors
from policy.decompile import read as reading
from policy.grants.effective import Effective
from policy.grants.network import Network
from policy.grants.services import HostPorts
from policy.prove.connections import Ways
from tests.connection_kit import AGENT, GATEWAY, PLACES, connection
from tests.unit.policy.compile import sample

ENTRY = '[[permissions.network]]\nhost = "host.covenant"\nports = [11434, "5432-5433"]\nprotocol = "tcp"\n'
RULE = b'iifname "agent0" tcp dport { 11434 } accept'
Files = dict[str, bytes]


def compiled(more: str = ENTRY, network: str = "off") -> Files:
    return dict(sample.compiled(sample.manifest(more=more, network=network)).files)


@pytest.mark.parametrize("network", ["off", "outbound-https-only", "full"])
def test_ports_are_read_back(network: str) -> None:
    found = reading.read(compiled(network=network))
    assert found.grants.host_ports.numbers() == [5432, 5433, 11434]
    # A table that names this host alone lists no destination.
    assert (found.grants.network, found.reached.linked) == (Network.bottom(), True)


def test_every_public_host_is_no_port_of_this_one() -> None:
    parent, child = sample.manifest(network="full"), sample.manifest(more=ENTRY)
    above, below = (Effective.from_manifest(one, profiles=data.profiles()) for one in (parent, child))
    assert not below.is_subset(above)
    assert below.meet(above).host_ports == HostPorts.bottom()


SPOILED: dict[str, Callable[[Files], None]] = {}


def spoils(name: str, file: str, old: bytes, new: bytes) -> None:
    def spoil(files: Files) -> None:
        assert files[file].count(old) >= 1, (file, old)
        files[file] = files[file].replace(old, new)

    SPOILED[name] = spoil


spoils("another port", "firewall.nft", b"{ 11434 } accept", b"{ 11434, 22 } accept")
spoils("every port", "firewall.nft", b" tcp dport { 11434 } accept", b" accept")
spoils("no port", "firewall.nft", RULE, b"counter drop")
spoils("another device", "firewall.nft", RULE, RULE.replace(b"agent0", b"uplink0"))
spoils("by udp", "firewall.nft", b"tcp dport { 11434 }", b"udp dport { 11434 }")
spoils("port of the plan", "gates.json", b"11434", b"11435")
spoils("order of the plan", "gates.json", b"5432,5433", b"5433,5432")
spoils("port of the system", "gates.json", b"[5432,", b"[22,5432,")
spoils("no list", "gates.json", b'"host":[5432,5433,11434]', b'"host":[]')


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_artefact_is_refused(name: str) -> None:
    files = compiled()
    SPOILED[name](files)
    with pytest.raises(errors.ArtefactError):
        reading.read(files)


def test_tracked_connections_are_those_of_the_ports() -> None:
    ways = Ways.of(compiled()["firewall.nft"])
    good = connection(AGENT, GATEWAY, 11434)
    bad = [connection(AGENT, GATEWAY, 22), connection(AGENT, GATEWAY, 11434, 17)]
    assert list(ways.refused([good, *bad], PLACES)) == bad
