"""Which names the DNS gate answers for, and which addresses it lets an answer hold: lookups in the plan's tables.

The same meaning as policy.grants.sets.hostnames and policy.grants.sets.addresses (tests/property compares), without
importing them: the gate's process starts at each run and is to hold little.
"""

from __future__ import annotations

import bisect
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

EVERY = "*"
# IANA's AS112-v4 (RFC 7535): public addresses at which no host speaks TLS. Behind a proxy no packet leaves for one.
STAND_INS = bytes([192, 31, 196])
# Numbers are read as addresses, and this name is the host of who looks it up (RFC 6761, 6.3).
_NOT_ELSEWHERE = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*|localhost)")
# Where IPv6 begins on the line of addresses (policy.grants.sets.addresses).
_V6_BASE = 2**33


class Patterns:
    """The patterns of a plan by number; a name is covered by a chain of them."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._numbers: Mapping[str, int] = {pattern: number for number, pattern in enumerate(patterns)}

    def covering(self, host: str) -> tuple[int, ...]:
        """The numbers of all patterns that cover ``host``, a name in lower case; empty when it is not granted."""
        numbers = self._numbers
        found = [numbers[host]] if host in numbers else []
        dot = host.find(".")
        while dot >= 0:
            above = "*" + host[dot:]
            if above in numbers:
                found.append(numbers[above])
            dot = host.find(".", dot + 1)
        if EVERY in numbers:
            found.append(numbers[EVERY])
        return tuple(found)

    def exact(self, host: str) -> bool:
        """Whether ``host`` is granted as it is, and not by a wildcard."""
        return host in self._numbers


class Public:
    """Addresses that a name may lead to, as spans of the line of addresses."""

    def __init__(self, spans: Sequence[Sequence[int]]) -> None:
        self._firsts = [first for first, _ in spans]
        self._lasts = [last for _, last in spans]

    def __contains__(self, packed: bytes) -> bool:
        """Whether a packed address is one of them."""
        point = int.from_bytes(packed, "big") + (_V6_BASE if len(packed) == 16 else 0)
        index = bisect.bisect_right(self._firsts, point) - 1
        return index >= 0 and point <= self._lasts[index]


def stand_in(host: str) -> bytes:
    """The packed address that stands for a name which the operator's proxy alone can look up.

    Two names may have the same one: the TLS gate tells them apart by the name in the hello.
    """
    return STAND_INS + bytes([1 + zlib.crc32(host.encode("ascii")) % 254])


def is_elsewhere(patterns: Patterns, host: str) -> bool:
    """Whether the proxy of these patterns alone looks ``host`` up. Never what would lead to an address of the agent's
    choice, or to the proxy's own host."""
    return bool(patterns.covering(host)) and _NOT_ELSEWHERE.fullmatch(host) is None


def clamp(ttl: int | None, bounds: Sequence[int]) -> int:
    """A time to live within the plan's (least, most), in seconds."""
    least, most = bounds
    return max(least, min(ttl if ttl is not None else least, most))


def tables(plan: Mapping[str, Any]) -> tuple[Patterns, Public]:
    """Both lookups of a plan."""
    return Patterns(row["pattern"] for row in plan["names"]), Public(plan["public"])
