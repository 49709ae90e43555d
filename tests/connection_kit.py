"""A gateway's rules and connections of its run, for tests of the judgement."""

from __future__ import annotations

import functools
import ipaddress

from policy.connections import Connection, Ends
from policy.prove.connections import Places
from tests.unit.policy.compile import sample

AGENT, AGENT6, GATEWAY, UPLINK, UPLINK6 = "192.0.0.2", "fd00:c0:0:1::2", "192.0.0.1", "198.19.0.40", "fd00:c0:0:2::28"
ENTRIES = (
    ("93.184.216.34", "[80, 443]", "tcp"), ("10.0.0.0/8", "[22]", "tcp"), ("9.9.9.9", "[123]", "udp"),
    ("2606:4700::1111", "[80]", "tcp"), ("172.16.5.5", "[443]", "tls"), ("api.example.com", "[443]", "tls"),
    ("db.example.com", "[5432]", "tcp"), ("clock.example.com", "[124]", "udp"),
)  # fmt: skip


@functools.cache
def firewall(entries: tuple[tuple[str, str, str], ...] = ENTRIES) -> bytes:
    """The compiled rules of these grants."""
    return sample.compiled(sample.manifest(network="full", more=sample.entries(*entries))).files["firewall.nft"]


def packed(*several: str) -> frozenset[bytes]:
    """Addresses as conntrack has them."""
    return frozenset(ipaddress.ip_address(one).packed for one in several)


PLACES = Places(
    packed(AGENT, AGENT6),
    packed(GATEWAY, "fd00:c0:0:1::1"),
    packed(UPLINK, UPLINK6),
    (ipaddress.ip_network("192.0.0.0/29"), ipaddress.ip_network("fd00:c0:0:1::/64")),
)


def ends(source: str, source_port: int, destination: str, destination_port: int) -> Ends:
    """One direction in words."""
    first, last = (ipaddress.ip_address(one).packed for one in (source, destination))
    return Ends(first, last, source_port, destination_port)


def connection(
    source: str, destination: str, port: int, protocol: int = 6, *, answered: Ends | None = None, odd: str = ""
) -> Connection:
    """From port 5000 of ``source``; answers come from the same place to the same, unless ``answered`` is given."""
    back = ends(destination, port, source, 5000)
    return Connection(protocol, ends(source, 5000, destination, port), answered or back, odd)


def forwarded(destination: str, port: int, protocol: int = 6) -> Connection:
    """From the agent by the uplink, as masquerading makes it."""
    six = ":" in destination
    back = ends(destination, port, UPLINK6 if six else UPLINK, 61000)
    return connection(AGENT6 if six else AGENT, destination, port, protocol, answered=back)


def redirected(destination: str, port: int, to: int = 8443) -> Connection:
    """From the agent to the TLS gate."""
    return connection(AGENT, destination, port, answered=ends(GATEWAY, to, AGENT, 5000))
