"""The addresses of a run's two links: the same for every run, because each run has namespaces of its own.

    agent eth0 192.0.0.2 ── agent0 192.0.0.1 [gateway] uplink0 198.19.x.y ── cv-12345678 198.19.0.1 (the supervisor's)

Only the gateway's address towards the supervisor differs, and it is hidden by masquerading twice: no other machine
ever sees one of these. 192.0.0.0/29 is the range for continuity of IPv4 (RFC 7335), 198.19.0.0/16 the upper half of
that for benchmarks (RFC 2544): neither is used on a network that an agent could want to reach.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from msgspec import Struct

from policy.compile.network import firewall

AGENT_DEVICE: Final = "eth0"
GATEWAY_DEVICE: Final = firewall.AGENT
UPLINK_DEVICE: Final = firewall.UPLINK
HOST_PREFIX: Final = "cv-"

AGENT4, GATEWAY4, PREFIX4 = "192.0.0.2", "192.0.0.1", 29
AGENT6, GATEWAY6, PREFIX6 = "fd00:c0:0:1::2", "fd00:c0:0:1::1", 64
# Locally administered (the second hexadecimal digit is 2). Constants, so that the walls can name them.
AGENT_MAC, GATEWAY_MAC = "02:c0:00:00:00:02", "02:c0:00:00:00:01"
UPLINK_MAC, HOST_MAC = "02:c0:00:00:01:02", "02:c0:00:00:01:01"

HOST4, HOST6 = "198.19.0.1", "fe80::1"
_UPLINKS4 = ipaddress.IPv4Network("198.19.0.0/16")
_UPLINKS6 = ipaddress.IPv6Network("fd00:c0:0:2::/64")
# What belongs to runs as seen from the supervisor's namespace: nothing else has a route there.
UPLINKS: Final = (str(_UPLINKS4), str(_UPLINKS6))
# The first are the supervisor's own end, the last is a broadcast address of old.
_FIRST, PLACES = 16, 65_000


class Uplink(Struct, frozen=True):
    """One run's addresses towards the supervisor's namespace."""

    ipv4: str
    ipv6: str


def uplink(place: int) -> Uplink:
    """The addresses of the run at ``place``, any whole number: it counts modulo ``PLACES``."""
    number = _FIRST + place % PLACES
    return Uplink(str(_UPLINKS4[number]), str(_UPLINKS6[number]))


def host_device(run_id: str) -> str:
    """The name of the device at the supervisor's end; at most 15 characters (IFNAMSIZ)."""
    return HOST_PREFIX + run_id.replace("-", "")[:8]
