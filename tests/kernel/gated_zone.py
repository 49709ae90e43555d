"""The grants and the zone of the tests of the DNS gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ENTRIES = (
    ("api.example.com", "[80]", "tcp"),
    ("*.example.org", "[443]", "tls"),
    ("*.example.org", "[123]", "udp"),
    ("deep.example.org", "[80]", "tcp"),
    ("*.wide.example", "[80]", "tcp"),
)
PUBLIC, V6 = "93.184.216.34", "2606:4700::1111"
# Every kind of address that a name may not lead to.
INWARDS = {
    "A": (
        "10.9.9.9", "127.0.0.1", "169.254.169.254", "192.168.1.1", "172.16.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "192.0.0.1", "192.0.0.2", "198.18.0.1", "168.63.129.16", "255.255.255.255", "203.0.113.5",
    ),
    "AAAA": (
        "::1", "::", "fe80::1", "fd00:ec2::254", "::ffff:10.9.9.9", "::ffff:169.254.169.254", "64:ff9b::a00:1",
        "64:ff9b:1::1", "2002:a00:1::1", "2001:0:a00:1::1", "ff02::1", "2001:db8::1", "::10.9.9.9", "fec0::1",
    ),
}  # fmt: skip
MANY: dict[str, Any] = {"queries_per_second": 5000, "burst": 5000}


def zone() -> dict[tuple[str, str], Sequence[str]]:
    """Return the records of the world's resolver."""
    found: dict[tuple[str, str], Sequence[str]] = {
        ("api.example.com", "A"): [PUBLIC],
        ("api.example.com", "AAAA"): [V6],
        ("api.example.com", "TXT"): ['"secret"'],
        ("other.example.com", "A"): ["198.51.100.7"],
        ("www.example.org", "A"): ["9.9.9.9"],
        ("deep.example.org", "A"): ["93.184.216.34"],
        ("example.org", "A"): ["9.9.9.9"],
        ("mixed.example.org", "A"): ["10.9.9.9", PUBLIC],
        ("alias.example.org", "CNAME"): ["a.elsewhere.net."],
        ("a.elsewhere.net", "CNAME"): ["b.elsewhere.net."],
        ("b.elsewhere.net", "A"): [PUBLIC],
        ("inward.example.org", "CNAME"): ["c.elsewhere.net."],
        ("c.elsewhere.net", "A"): ["169.254.169.254"],
        ("later.example.org", "CNAME"): ["d.elsewhere.net."],
        ("d.elsewhere.net", "LATER"): ["yes"],
        ("d.elsewhere.net", "A"): [PUBLIC],
        ("loop.example.org", "CNAME"): ["loop2.example.org."],
        ("loop2.example.org", "CNAME"): ["loop.example.org."],
        ("long.example.org", "A"): [f"93.184.{i >> 8}.{i & 255}" for i in range(200)],
        ("https.example.org", "HTTPS"): [
            '1 . alpn="h2" ipv4hint=93.184.216.34,10.9.9.9 ech="AAj+DQAEAAAAAA==" ipv6hint=2606:4700::1111',
            "0 elsewhere.net.",
            '2 elsewhere.net. alpn="h2"',
            '3 www.example.org. alpn="h3"',
        ],
    }
    for kind, listed in INWARDS.items():
        for index, address in enumerate(listed):
            found[f"in{index}.example.org", kind] = [address]
    for index in range(60):
        found[f"n{index}.wide.example", "A"] = [f"93.{index}.0.{i}" for i in range(1, 31)]
    return found
