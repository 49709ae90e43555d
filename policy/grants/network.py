"""Network grants: which names and addresses may be reached, on which ports, by which protocol.

Everything is one set of destinations. A mode without a table is a set too: every name and every public address, with
port 443 by TLS (``outbound-https-only``) or with everything (``full``). So the meet is right when one side has a
table and the other has none, and ``mode`` is read off the set: the least one that holds it.

Names and addresses are judged apart (decisions.md): a name leads only to public addresses, a private address is
reached only by an address or CIDR entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from policy import errors
from policy.grants.sets import access, addresses, hostnames, spans
from policy.grants.sets.access import Access, Protocol
from policy.grants.sets.spans import Spans
from policy.manifest import text

Mode = Literal["off", "outbound-https-only", "full"]
MODES: tuple[Mode, ...] = ("off", "outbound-https-only", "full")
# What a mode allows where the manifest has no table.
WITHOUT_TABLE: dict[Mode, Access] = {
    "off": access.NOTHING,
    "outbound-https-only": access.HTTPS,
    "full": access.EVERYTHING,
}
ANY_PUBLIC = "any public host"


class Entry(NamedTuple):
    """One line of the set: ``host`` is a name, ``*.name``, ``*``, a CIDR block, or ``any public host``."""

    host: str
    protocol: Protocol
    ports: Spans

    def __str__(self) -> str:
        ports = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.ports)
        return f"{self.host} {self.protocol} {ports}"


@dataclass(frozen=True, slots=True)
class Network:
    """The destinations of an agent; made by ``of``, ``without_table``, ``bottom``, ``top`` and the operations.

    ``asked`` are names, beside ``names``, that are reached only while an operator's lease says so. It has no access
    that ``names`` gives already.
    """

    names: hostnames.Names = ()
    reach: addresses.Reach = ()
    asked: hostnames.Names = ()

    @classmethod
    def of(
        cls,
        entries: Iterable[tuple[str, Iterable[tuple[int, int]], Protocol]],
        asked: Iterable[tuple[str, Iterable[tuple[int, int]], Protocol]] = (),
    ) -> Self:
        """The union of entries (host, spans of ports, protocol), and of entries that need a lease.

        Raises ManifestError for a host that is no name, ``*.name``, address or CIDR block.
        """
        names: list[tuple[str, Access]] = []
        reach: list[tuple[int, int, Access]] = []
        for host, ports, protocol in entries:
            how = Access.of(protocol, ports)
            span = addresses.parse(host)
            if span is None:
                names.append((hostnames.check(host), how))
            else:
                reach.append((*span, how))
        held = [(hostnames.check(host), Access.of(protocol, ports)) for host, ports, protocol in asked]
        return cls.held(hostnames.join(names), addresses.join(reach), hostnames.join([*names, *held]))

    @classmethod
    def held(cls, names: hostnames.Names, reach: addresses.Reach, total: hostnames.Names) -> Self:
        """The destinations whose names are ``total`` with a lease, and ``names`` without one."""
        return cls(names, reach, hostnames.minus(total, names))

    @property
    def total(self) -> hostnames.Names:
        """The names that can be reached at most: with every lease that an operator may give."""
        return hostnames.join([*self.names, *self.asked]) if self.asked else self.names

    @classmethod
    def without_table(cls, mode: Mode) -> Self:
        """Return the destinations that ``mode`` allows where the manifest lists none."""
        return cls.any(WITHOUT_TABLE[mode], addresses.PUBLIC)

    @classmethod
    def bottom(cls) -> Self:
        """Nowhere."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Everywhere, private addresses included; a ceiling that leaves hosts open."""
        return cls.any(access.EVERYTHING)

    @classmethod
    def any(cls, how: Access, where: Spans = addresses.ALL) -> Self:
        """Every name, and every address of ``where``, with this access."""
        return cls(((hostnames.EVERY, how),), addresses.uniform(where, how)) if how else cls()

    def to_name(self, name: str) -> Access:
        """How a host name may be reached. Raises ManifestError for what is no exact name."""
        return self._to(self.names, name)

    def to_asked(self, name: str) -> Access:
        """How a host name may be reached by a lease alone. Raises ManifestError for what is no exact name."""
        return access.minus(self._to(self.asked, name), self.to_name(name))

    @staticmethod
    def _to(names: hostnames.Names, name: str) -> Access:
        if name.startswith("*"):
            raise errors.ManifestError(f"host {text.quote(name)} is no exact name")
        return hostnames.total(dict(names), hostnames.check(name))

    def to_address(self, address: str) -> Access:
        """How an address may be reached. Raises ManifestError for what is no address."""
        span = addresses.parse(address)
        if span is None or span[0] != span[1]:
            raise errors.ManifestError(f"host {text.quote(address)} is no address")
        return addresses.at(self.reach, span[0])

    @property
    def mode(self) -> Mode:
        """The least mode that holds the set."""
        accesses = {how for _, how in (*self.names, *self.asked)} | {how for _, _, how in self.reach}
        if not accesses:
            return "off"
        return "outbound-https-only" if accesses <= {access.HTTPS} else "full"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The set as lines, sorted; what every public host shares is one line."""
        public = self._public()
        rest = self.difference(self.any(public, addresses.PUBLIC))
        lines = [Entry(ANY_PUBLIC, protocol, ports) for protocol, ports in public.by_protocol()]
        for pattern, how in rest.names:
            lines += [Entry(pattern, protocol, ports) for protocol, ports in how.by_protocol()]
        for first, last, how in rest.reach:
            for block in addresses.blocks(first, last):
                lines += [Entry(str(block), protocol, ports) for protocol, ports in how.by_protocol()]
        return tuple(lines)

    @property
    def asked_entries(self) -> tuple[Entry, ...]:
        """The names that need a lease as lines, sorted."""
        return tuple(
            Entry(pattern, protocol, ports) for pattern, how in self.asked for protocol, ports in how.by_protocol()
        )

    def _public(self) -> Access:
        """The access that every name and every public address has in common."""
        how = dict(self.names).get(hostnames.EVERY, access.NOTHING)
        if not how or not self.reach:
            return access.NOTHING
        for _, _, one in addresses.meet(self.reach, addresses.uniform(addresses.PUBLIC, access.EVERYTHING)):
            how = access.meet(how, one)
        covered = tuple((first, last) for first, last, one in self.reach if access.meet(one, how) == how)
        return access.NOTHING if spans.minus(addresses.PUBLIC, spans.join(covered)) else how

    def meet(self, other: Self, /) -> Self:
        """The destinations that both allow."""
        names, reach = hostnames.meet(self.names, other.names), addresses.meet(self.reach, other.reach)
        return self.held(names, reach, hostnames.meet(self.total, other.total))

    def union(self, other: Self, /) -> Self:
        """The destinations that either allows."""
        names, reach = hostnames.join([*self.names, *other.names]), addresses.join([*self.reach, *other.reach])
        return self.held(names, reach, hostnames.join([*self.total, *other.total]))

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows every destination of this."""
        if self == other:
            return True
        if hostnames.minus(self.asked, other.total):
            return False
        return not hostnames.minus(self.names, other.names) and not addresses.minus(self.reach, other.reach)

    def difference(self, other: Self, /) -> Self:
        """The addresses that ``other`` lacks, and the name patterns, whole, with the access that it lacks."""
        names, reach = hostnames.minus(self.names, other.names), addresses.minus(self.reach, other.reach)
        return type(self)(names, reach, hostnames.minus(self.asked, other.total))

    def describe(self) -> tuple[str, ...]:
        """A line a destination and protocol."""
        return (
            *(f"connect {entry}" for entry in self.entries),
            *(f"connect {entry} once an operator grants it" for entry in self.asked_entries),
        )

    def canonical(self) -> dict[str, Any]:
        """Mode and destinations."""
        found: dict[str, Any] = {"mode": self.mode, "entries": [_line(one) for one in self.entries]}
        # Left out where nothing is asked, as before anything could be.
        return {**found, "asked": [_line(one) for one in self.asked_entries]} if self.asked else found


def _line(entry: Entry) -> dict[str, Any]:
    return {"host": entry.host, "protocol": entry.protocol, "ports": [list(span) for span in entry.ports]}
