"""Published ports read back: the gate reaches exactly these ports of the agent, and a spoiled artefact is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policy import errors
from policy.decompile import read as reading
from policy.prove import connections
from policy.prove.connections import Ways
from tests.connection_kit import AGENT, GATEWAY, PLACES, connection, ends
from tests.unit.policy.compile import sample

PLACE = "unix:/srv/own/web.sock"
PUBLISH = f'[[publish]]\nport = 8080\nto = "{PLACE}"\n[[publish]]\nport = 90\nto = "127.0.0.1:18081"\n'
RULE = b'oifname "agent0" meta skuid 64994 tcp dport { 8080 } accept'
Files = dict[str, bytes]


def compiled(more: str = PUBLISH, network: str = "off") -> Files:
    return dict(sample.compiled(sample.manifest(more=more, network=network)).files)


@pytest.mark.parametrize("network", ["off", "full"])
def test_ports_are_read_back(network: str) -> None:
    found = reading.read(compiled(network=network))
    assert found.grants.publish.pairs() == [(90, "127.0.0.1:18081"), (8080, PLACE)]
    assert (found.reached.mode, found.reached.linked) == (network, True)


def test_without_ports_there_is_no_way_in() -> None:
    files = compiled(more="")
    assert not reading.read(files).grants.publish
    assert files["firewall.nft"] == b""


SPOILED: dict[str, Callable[[Files], None]] = {}


def spoils(name: str, file: str, old: bytes, new: bytes) -> None:
    def spoil(files: Files) -> None:
        assert files[file].count(old) >= 1, (file, old)
        files[file] = files[file].replace(old, new)

    SPOILED[name] = spoil


spoils("another port", "firewall.nft", b"{ 8080 } accept", b"{ 8080, 22 } accept")
spoils("every port", "firewall.nft", b" tcp dport { 8080 } accept", b" accept")
spoils("no port", "firewall.nft", RULE, b"counter drop")
spoils("every user", "firewall.nft", b" meta skuid 64994 tcp dport { 8080 }", b" tcp dport { 8080 }")
spoils("another user", "firewall.nft", b"skuid 64994 tcp dport { 8080 }", b"skuid 64995 tcp dport { 8080 }")
spoils("another device", "firewall.nft", RULE, RULE.replace(b"agent0", b"uplink0"))
spoils("by udp", "firewall.nft", b"tcp dport { 8080 }", b"udp dport { 8080 }")
spoils("port of the plan", "gates.json", b'"port":8080', b'"port":8082')
spoils("port twice", "gates.json", b'"port":8080', b'"port":90')
spoils("key of the plan", "gates.json", b'"port":8080', b'"from":1,"port":8080')
spoils("user of the gate", "network.json", b"64994", b"0")


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_artefact_is_refused(name: str) -> None:
    files = compiled()
    SPOILED[name](files)
    with pytest.raises(errors.ArtefactError):
        reading.read(files)


def test_tracked_connections_are_those_of_the_ports() -> None:
    ways = Ways.of(compiled()["firewall.nft"])
    good = connection(GATEWAY, AGENT, 8080, answered=ends(AGENT, 8080, GATEWAY, 1024))
    bad = [
        connection(GATEWAY, AGENT, 22),
        connection(GATEWAY, AGENT, 8080, 17),
        connection(GATEWAY, "192.0.0.9", 8080),
        connection(AGENT, GATEWAY, 8080),
    ]
    assert list(ways.refused([good, *bad], PLACES)) == bad
    assert connections.reachable(compiled()["firewall.nft"]) == ()
