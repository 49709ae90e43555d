"""Network grants in the shape that a gateway holds: groups of addresses, and patterns of names, each with its digest.

Addresses that may be reached in the same way share one pair of sets, so that hundreds of entries stay few rules. A
digest is over the grant's own words alone: it stays when other grants come and go.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from policy import errors
from policy.compile.network import quoting
from policy.grants.network import Network
from policy.grants.sets import access, addresses, hostnames, spans
from policy.grants.sets.access import PROTOCOLS, Access, Protocol
from policy.grants.sets.spans import Spans

_V6_BASE = 2**33
ANY_PUBLIC_ADDRESS = "any public address"


class Group(Struct, frozen=True):
    """The addresses that are reached by ``protocol`` on exactly ``ports``; ``where`` on the line of addresses."""

    key: str
    protocol: Protocol
    ports: Spans
    where: Spans

    @property
    def v4(self) -> Spans:
        """The IPv4 part."""
        return tuple(span for span in self.where if span[0] < _V6_BASE)

    @property
    def v6(self) -> Spans:
        """The IPv6 part, still on the line of addresses."""
        return tuple(span for span in self.where if span[0] >= _V6_BASE)

    @property
    def sets(self) -> tuple[tuple[str, Spans], ...]:
        """Name and elements of each set that has any."""
        return tuple((f"a{v}_{self.key}", part) for v, part in ((4, self.v4), (6, self.v6)) if part)

    @property
    def counter(self) -> str:
        """The counter of its rules."""
        return f"c_{self.key}"


@dataclass(frozen=True, slots=True)
class Name:
    """A pattern of names with what it adds to the patterns above it, by one protocol.

    ``bare`` has no sets: every public address has this access anyway. The sets of an ``asked`` one are empty without a
    lease of an operator.
    """

    key: str
    pattern: str
    protocol: Protocol
    ports: Spans
    bare: bool = False
    asked: bool = False

    @property
    def sets(self) -> tuple[str, ...]:
        """The IPv4 and the IPv6 set that the DNS gate fills."""
        return () if self.bare else (f"n4_{self.key}", f"n6_{self.key}")

    @property
    def counter(self) -> str | None:
        """The counter of its rules; None when it has none of its own."""
        return None if self.bare else f"c_{self.key}"


class DestinationRow(Struct, frozen=True):
    """One grant as people read it, with the names that stand for it in the ruleset.

    ``where`` is its place on the line of addresses, empty for a name.
    """

    key: str
    kind: str
    host: str
    protocol: Protocol
    ports: Spans
    sets: tuple[str, ...]
    counter: str | None
    where: Spans = ()

    @property
    def id(self) -> str:
        """Its name in network.json and in the provenance."""
        return f"g_{self.key}"


class Destinations(Struct, frozen=True):
    """Everything that a network grant reaches, in a fixed order. Made by ``of``."""

    groups: tuple[Group, ...]
    names: tuple[Name, ...]

    @classmethod
    def of(cls, network: Network) -> Destinations:
        """The groups and patterns of a network grant.

        Raises:
            errors.NotEnforceableError: two of its grants would have one name.
        """
        found = cls(_groups(network), _names(network))
        # The author of a manifest can make 64 bits collide; then two grants would share a set.
        keys = [*(one.key for one in found.groups), *(one.key for one in found.names)]
        if len(set(keys)) != len(keys):
            raise errors.NotEnforceableError("two network grants have one digest", hint="write one of them differently")
        return found

    def rows(self) -> tuple[DestinationRow, ...]:
        """The index from digests to what they stand for: a row a span of addresses, a row a pattern."""
        out = []
        for group in self.groups:
            if group.where == addresses.PUBLIC:
                out.append(_row(group, ANY_PUBLIC_ADDRESS, tuple(name for name, _ in group.sets), group.where))
                continue
            for span in group.where:
                version = 6 if span[0] >= _V6_BASE else 4
                out.append(_row(group, text(*span), (f"a{version}_{group.key}",), (span,)))
        for n in self.names:
            kind = "asked" if n.asked else "name"
            out.append(DestinationRow(n.key, kind, n.pattern, n.protocol, n.ports, n.sets, n.counter))
        return tuple(out)


def _groups(network: Network) -> tuple[Group, ...]:
    by: dict[tuple[Protocol, Spans], list[tuple[int, int]]] = {}
    for first, last, how in network.reach:
        for pair in how.by_protocol():
            by.setdefault(pair, []).append((first, last))
    ordered = sorted(by, key=lambda pair: (PROTOCOLS.index(pair[0]), pair[1]))
    return tuple(_group(protocol, ports, by[protocol, ports]) for protocol, ports in ordered)


def _group(protocol: Protocol, ports: Spans, where: list[tuple[int, int]]) -> Group:
    key = quoting.digest("address", protocol, quoting.ports(ports))
    return Group(key, protocol, ports, spans.join(where))


def _names(network: Network) -> tuple[Name, ...]:
    out = []
    for pattern, how in network.names:
        bare = pattern == hostnames.EVERY and how == _common(network.reach)
        for protocol, ports in how.by_protocol():
            key = quoting.digest("name", pattern, protocol, quoting.ports(ports))
            out.append(Name(key, pattern, protocol, ports, bare))
    for pattern, how in network.asked:
        for protocol, ports in how.by_protocol():
            key = quoting.digest("asked", pattern, protocol, quoting.ports(ports))
            out.append(Name(key, pattern, protocol, ports, False, asked=True))
    return tuple(out)


def _common(reach: addresses.Reach) -> Access:
    """The access that every public address has."""
    public = addresses.meet(reach, addresses.uniform(addresses.PUBLIC, access.EVERYTHING))
    if spans.minus(addresses.PUBLIC, spans.join((first, last) for first, last, _ in public)):
        return access.NOTHING
    how = access.EVERYTHING
    for _, _, one in public:
        how = access.meet(how, one)
    return how


def _row(group: Group, host: str, sets: tuple[str, ...], where: Spans) -> DestinationRow:
    key = quoting.digest("address", host, group.protocol, quoting.ports(group.ports))
    return DestinationRow(key, "address", host, group.protocol, group.ports, sets, group.counter, where)


def text(first: int, last: int) -> str:
    """A span as people write it: an address, a block, or both ends."""
    size = last - first + 1
    if size == 1:
        return quoting.address(first)
    if size & (size - 1) == 0:
        base, bits = (_V6_BASE, 128) if first >= _V6_BASE else (0, 32)
        if (first - base) % size == 0:
            return f"{quoting.address(first)}/{bits - size.bit_length() + 1}"
    return f"{quoting.address(first)}-{quoting.address(last)}"
