"""Which tracked connections the rules of a gateway let begin."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy import errors
from policy.connections import Connection
from policy.grants.sets import addresses, spans
from policy.prove import connections
from policy.prove.connections import Ways
from tests.connection_kit import (
    AGENT,
    ENTRIES,
    GATEWAY,
    PLACES,
    UPLINK,
    connection,
    ends,
    firewall,
    forwarded,
    redirected,
)

UDP = 17
ALLOWED: dict[str, Connection] = {
    "granted address": forwarded("93.184.216.34", 80),
    "granted network": forwarded("10.200.3.4", 22),
    "granted udp": forwarded("9.9.9.9", 123, UDP),
    "granted IPv6": forwarded("2606:4700::1111", 80),
    "public address of a name": forwarded("1.2.3.4", 5432),
    "public IPv6 address of a name": forwarded("2a00::7", 5432),
    "public address of a name by udp": forwarded("1.2.3.4", 124, UDP),
    "tls address by the gate": redirected("172.16.5.5", 443),
    "tls name by the gate": redirected("1.2.3.4", 443),
    "DNS by udp": connection(AGENT, GATEWAY, 53, UDP),
    "DNS by tcp": connection(AGENT, GATEWAY, 53),
    "DNS at the uplink's address": connection(AGENT, UPLINK, 53, UDP),
    "DNS by broadcast": connection(AGENT, "192.0.0.7", 53, UDP),
    "DNS by multicast": connection(AGENT, "224.0.0.1", 53, UDP),
    "gate to a tls name": connection(UPLINK, "1.2.3.4", 443),
    "gate to a tls address": connection(UPLINK, "172.16.5.5", 443, answered=ends("172.16.5.5", 443, UPLINK, 1024)),
}
REFUSED: dict[str, Connection] = {
    "port": forwarded("93.184.216.34", 22),
    "address": forwarded("93.184.216.35", 80),
    "protocol": forwarded("93.184.216.34", 80, UDP),
    "no protocol of a grant": forwarded("93.184.216.34", 0, 1),
    "private address on a name's port": forwarded("10.1.1.1", 5432),
    "metadata on a name's port": forwarded("169.254.169.254", 5432),
    "tls address without the gate": forwarded("172.16.5.5", 443),
    "tls name without the gate": forwarded("1.2.3.4", 443),
    "tls by udp": forwarded("172.16.5.5", 443, UDP),
    "redirect to another port": redirected("172.16.5.5", 443, 22),
    "redirect of a port that is not granted": redirected("172.16.5.5", 80),
    "granted, led elsewhere": connection(AGENT, "93.184.216.34", 80, answered=ends("10.8.8.8", 80, UPLINK, 1)),
    "granted, another port": connection(AGENT, "93.184.216.34", 80, answered=ends("93.184.216.34", 22, UPLINK, 1)),
    "tls led elsewhere": connection(AGENT, "172.16.5.5", 443, answered=ends("9.9.9.9", 8443, AGENT, 5000)),
    "answers to another": connection(AGENT, "93.184.216.34", 80, answered=ends("93.184.216.34", 80, "10.0.0.1", 1)),
    "not masqueraded": connection(AGENT, "93.184.216.34", 80),
    "another agent": connection("192.0.0.3", "93.184.216.34", 80),
    "from the world": connection("93.184.216.34", UPLINK, 80),
    "from the gateway's inner address": connection(GATEWAY, "1.2.3.4", 443),
    "gate to a port that is not granted": connection(UPLINK, "1.2.3.4", 22),
    "gate by udp": connection(UPLINK, "1.2.3.4", 443, UDP),
    "gate, led elsewhere": connection(UPLINK, "1.2.3.4", 443, answered=ends("9.9.9.9", 443, UPLINK, 5000)),
    "gateway's other door": connection(AGENT, GATEWAY, 8443),
    "DNS that goes out": connection(AGENT, "93.184.216.34", 53, UDP),
    "zone": connection(AGENT, GATEWAY, 53, odd="zone"),
    "no addresses": connection(AGENT, GATEWAY, 53)._replace(sent=ends(AGENT, 1, GATEWAY, 53)._replace(source=b"")),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_connection_of_grant_is_allowed(name: str) -> None:
    assert list(Ways.of(firewall()).refused([ALLOWED[name]], PLACES)) == []


@pytest.mark.parametrize("name", REFUSED)
def test_connection_of_no_grant_is_refused(name: str) -> None:
    assert list(Ways.of(firewall()).refused([REFUSED[name]], PLACES)) == [REFUSED[name]]


@pytest.mark.parametrize("left_out", range(len(ENTRIES)))
def test_each_grant_opens_what_it_names_alone(left_out: int) -> None:
    """Without one entry something that all of them allow is refused, and nothing else is allowed."""
    fewer = Ways.of(firewall(ENTRIES[:left_out] + ENTRIES[left_out + 1 :]))
    assert list(fewer.refused(ALLOWED.values(), PLACES)) != []
    assert list(fewer.refused(REFUSED.values(), PLACES)) == list(REFUSED.values())


def test_another_run_has_other_places() -> None:
    other = structs.replace(PLACES, uplink=frozenset({b"\xc6\x13\x00\x29"}))
    assert list(Ways.of(firewall(ENTRIES[:1])).refused([ALLOWED["granted address"]], other)) != []


def test_rules_not_understood_judge_nothing() -> None:
    with pytest.raises(errors.ArtefactError):
        Ways.of(firewall().replace(b"accept", b"allow"))


def test_connection_is_said_in_one_line() -> None:
    assert str(REFUSED["granted, led elsewhere"]) == "tcp 192.0.0.2:5000 to 93.184.216.34:80, led to 10.8.8.8:80"
    assert str(ALLOWED["granted IPv6"]) == "tcp [fd00:c0:0:1::2]:5000 to [2606:4700::1111]:80"
    assert str(REFUSED["zone"]).endswith("192.0.0.1:53 (zone)")
    assert str(REFUSED["no protocol of a grant"]).startswith("protocol 1 ")
    assert str(REFUSED["no addresses"]) == "tcp :1 to 192.0.0.1:53"


def test_what_grants_reach_is_each_of_their_addresses() -> None:
    static = connections.reachable(firewall((("10.0.0.0/8", "[22]", "tcp"), ("9.9.9.9", "[1]", "udp"))))
    assert static == ((0x09090909, 0x09090909), (0x0A000000, 0x0AFFFFFF))
    named = connections.reachable(firewall((("a.example.com", "[443]", "tls"), ("10.0.0.1", "[22]", "tcp"))))
    assert named == spans.union(addresses.PUBLIC, ((0x0A000001, 0x0A000001),))
