"""Hosts of a source as destinations: names and patterns in one spelling, without each one that a denial touches."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from msgspec import Struct
from pydantic_core import PydanticCustomError

from policy.importing.vocabulary import Draft, shown
from policy.manifest import hosts


class SourceHost(Struct, frozen=True):
    """A host or a pattern of hosts, as the source writes it, with its place."""

    place: str
    written: str

    @property
    def host(self) -> str:
        """The host in lower case, without the dot of the root."""
        return self.written.strip().lower().rstrip(".")


def granted(draft: Draft, allowed: Sequence[SourceHost], denied: Sequence[SourceHost]) -> list[str]:
    """Return the names and patterns that can be granted, and add a loss for each of the rest.

    Addresses are not among them: a proxy by name takes them otherwise than a destination does.
    """
    found = []
    for one in allowed:
        try:
            hosts.check(one.host)
        except PydanticCustomError as e:
            why = str((e.context or {}).get("message", "it is no host"))
            draft.refused(one.place, f"{shown(one.written)} is not granted: {why}")
            continue
        if hosts.kind(one.host) in ("address", "cidr"):
            line = f'[[permissions.network]] host = "{one.host}", ports = [443], protocol = "tls"'
            draft.narrower(one.place, f"{shown(one.written)} is not granted: it is an address, and not a name", line)
            continue
        taken = next((two for two in denied if overlaps(one.host, two.host)), None)
        if taken is not None:
            message = f"{shown(taken.written)} ({taken.place}) is denied, and a grant has no exceptions"
            draft.narrower(one.place, f"{shown(one.written)} is not granted: {message}")
            continue
        if one.host not in found:
            found.append(one.host)
    return found


def overlaps(one: str, other: str) -> bool:
    """Whether two hosts or patterns may name one host. A pattern that is not ``*.name`` may name any."""
    for pattern in (one, other):
        if "*" in pattern.removeprefix("*.") or not pattern.removeprefix("*."):
            return True
    return _covers(one, other) or _covers(other, one)


def _covers(pattern: str, host: str) -> bool:
    """Whether a name or ``*.name`` may be another. The name itself counts as its pattern's: tools differ there."""
    name = pattern.removeprefix("*.")
    mine = host.removeprefix("*.")
    return mine == name or (pattern != name and mine.endswith(f".{name}"))


def blocks(draft: Draft, place: str, words: Iterable[str]) -> list[str]:
    """Return the addresses and blocks that can be granted, in their usual spelling."""
    found = []
    for word in words:
        try:
            block = ipaddress.ip_network(word, strict=False)
        except ValueError:
            draft.inexpressible(place, f"{shown(word)} is no address and no block")
            continue
        written = str(block.network_address) if block.prefixlen == block.max_prefixlen else str(block)
        special = next((name for name, test in _SPECIAL if any(block.overlaps(one) for one in test[block.version])), "")
        if special:
            draft.narrower(place, f"{shown(word)} is not granted: it holds {special}")
            continue
        try:
            found.append(hosts.check(written))
        except PydanticCustomError as e:
            draft.refused(place, f"{shown(word)} is not granted: {(e.context or {}).get('message', 'it is no block')}")
    return found


def _nets(*blocks: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_network(block) for block in blocks]


# INVARIANT: an address of these means another thing in an agent's own namespace, or speaks with the machine below it.
_SPECIAL = (
    ("every address", {4: _nets("0.0.0.0/32"), 6: _nets("::/128")}),
    ("loopback addresses", {4: _nets("127.0.0.0/8"), 6: _nets("::1/128")}),
    ("link-local and metadata addresses", {4: _nets("169.254.0.0/16"), 6: _nets("fe80::/10", "fd00:ec2::254/128")}),
    ("multicast addresses", {4: _nets("224.0.0.0/4", "255.255.255.255/32"), 6: _nets("ff00::/8")}),
)
