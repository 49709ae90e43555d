"""Judge the connections that the kernel tracks in a run's namespaces by the run's rules.

An entry in the conntrack table lets packets by without another look at the rules (``ct state established``). So each
entry must be one that the rules would let begin:

    (1) no zone, helper or master connection: our rules make none
    (2) agent -> world: hook forward accepts it, and answers come from the same place to the gateway
    (3) agent -> world, redirected: hook prerouting redirects it to the TLS gate's port
    (4) agent -> gateway: hook input accepts it
    (5) gateway -> world: hook output accepts it for the TLS gate
    (6) gateway -> agent: hook output accepts it for the publish gate

Elements of the sets of names come and go, and a connection lives longer than its element. So a name grant accepts here
any address that a name may lead to. Conntrack does not name the user of a socket: (5) and (6) hold for
any of the gateway's.
"""

from __future__ import annotations

import bisect
import functools
import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from policy.connections import PROTOCOLS, Connection, Ends
from policy.decompile.network import flows, nft
from policy.decompile.network.flows import Flow, PacketKind
from policy.decompile.network.packets import ACCEPT
from policy.decompile.network.reach import AGENT, GATE_UID, PUBLISH_UID, UPLINK
from policy.grants.sets import addresses, spans
from policy.grants.sets.spans import Spans

# Addresses that no packet to another machine carries: multicast, and the broadcast of IPv4.
_NEARBY: Final = tuple(ipaddress.ip_network(one) for one in ("224.0.0.0/4", "255.255.255.255/32", "ff00::/8"))
_MOST_KNOWN: Final = 4096


class Places(Struct, frozen=True):
    """Packed addresses of a run: its agent's, the gateway's towards the agent, and the gateway's towards the world.
    ``link`` holds the networks of the link between agent and gateway."""

    agent: frozenset[bytes]
    gateway: frozenset[bytes]
    uplink: frozenset[bytes]
    link: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


@dataclass(slots=True)
class Ways:
    """The ways that the rules of one gateway open. Made by ``of``."""

    _flows: Mapping[PacketKind, Flow]
    _starts: list[int]
    _static: list[frozenset[str]]
    _dynamic: tuple[frozenset[str], ...]
    _known: dict[Connection, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, firewall: bytes) -> Ways:
        """The ways of this ruleset (firewall.nft).

        Raises:
            errors.ArtefactError: the ruleset is not understood.
        """
        return _read(firewall)

    def refused(self, found: Iterable[Connection], places: Places) -> Iterator[Connection]:
        """The connections that no rule lets begin."""
        for one in found:
            allowed = self._known.get(one)
            if allowed is None:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                allowed = self._known[one] = self._allows(one, places)
            if not allowed:
                yield one

    def _allows(self, one: Connection, places: Places) -> bool:
        protocol = PROTOCOLS.get(one.protocol)
        # (1)
        if protocol is None or one.odd or len(one.sent.source) != len(one.sent.destination):
            return False
        sent, answered = one.sent, one.answered
        if sent.source in places.uplink:
            # (5)
            kind = _kind("output", protocol, oif=UPLINK, uid=GATE_UID)
            return one.direct and answered.destination in places.uplink and ACCEPT in self._ends(kind, sent)
        if sent.source in places.gateway:
            # (6)
            kind = _kind("output", protocol, oif=AGENT, uid=PUBLISH_UID)
            back = answered.destination in places.gateway and answered.source == sent.destination
            return one.direct and back and sent.destination in places.agent and ACCEPT in self._ends(kind, sent)
        if sent.source not in places.agent:
            return False
        back = (answered.destination, answered.destination_port) == (sent.source, sent.source_port)
        if not one.direct:
            # (3)
            kind = _kind("prerouting", protocol, iif=AGENT)
            redirected = ("redirect", answered.source_port) in self._ends(kind, sent)
            return redirected and back and answered.source in places.gateway
        if _local(sent.destination, places):
            # (4)
            return back and ACCEPT in self._ends(_kind("input", protocol, iif=AGENT), sent)
        # (2)
        kind = _kind("forward", protocol, iif=AGENT, oif=UPLINK)
        return answered.destination in places.uplink and ACCEPT in self._ends(kind, sent)

    def _ends(self, kind: PacketKind, sent: Ends) -> set[tuple[str, int]]:
        """How a first packet may end: by the static sets alone, or with what a name may have led to."""
        flow = self._flows.get(kind)
        if flow is None:
            return set()
        static = self._static[bisect.bisect_right(self._starts, point(sent.destination)) - 1]
        found = set()
        # A rule asks for one set of names at most, so what several of them open one of them opens.
        for dynamic in self._dynamic:
            for outcome, ports in flow.ports(static | dynamic).items():
                if _holds(ports, sent.destination_port):
                    found.add((flow.policy, 0) if outcome == flows.POLICY else outcome)
        return found


@functools.lru_cache(maxsize=8)
def _read(firewall: bytes) -> Ways:
    table = nft.parse(firewall)
    kinds = [_kind(hook, one, iif=AGENT) for hook in ("prerouting", "input") for one in PROTOCOLS.values()]
    kinds += [_kind("forward", one, iif=AGENT, oif=UPLINK) for one in PROTOCOLS.values()]
    kinds += [_kind("output", one, oif=UPLINK, uid=GATE_UID) for one in PROTOCOLS.values()]
    kinds += [_kind("output", one, oif=AGENT, uid=PUBLISH_UID) for one in PROTOCOLS.values()]
    static = [(one.name, one.spans) for one in table.sets.values() if not one.dynamic]
    whole = (addresses.ALL[0][0], addresses.ALL[1][1])
    cuts = list(flows.memberships(whole, static))
    dynamic = (frozenset[str](), *(frozenset({one.name}) for one in table.sets.values() if one.dynamic))
    made = {kind: Flow.of(table, kind) for kind in kinds if kind.hook in table.chains}
    return Ways(made, [first for first, _, _ in cuts], [held for _, _, held in cuts], dynamic)


def point(packed: bytes) -> int:
    """An address as a point of the line of policy.grants.sets.addresses. IPv4 written as IPv6 is IPv6 in a packet."""
    return int.from_bytes(packed) + (nft.BASE_V6 if len(packed) == 16 else 0)


def span(address: str) -> tuple[int, int]:
    """One address as a span of that line."""
    at = point(ipaddress.ip_address(address).packed)
    return at, at


def reachable(firewall: bytes) -> Spans:
    """All destinations that a grant names, or that a granted name may lead to.

    Raises:
        errors.ArtefactError: the ruleset is not understood.
    """
    table = nft.parse(firewall)
    # Every grant has ports; the rules about what no name may lead to have none.
    named = {rule.addresses for rule in table.rules() if rule.ports is not None}
    held = [one for one in table.sets.values() if one.name in named]
    static = spans.join(span for one in held for span in one.spans)
    return spans.union(static, addresses.PUBLIC) if any(one.dynamic for one in held) else static


def _kind(hook: str, protocol: str, *, iif: str = "", oif: str = "", uid: int | None = None) -> PacketKind:
    return PacketKind(hook, protocol, iif=iif, oif=oif, uid=uid)


def _holds(ports: Spans, port: int) -> bool:
    return any(first <= port <= last for first, last in ports)


def _local(packed: bytes, places: Places) -> bool:
    """Whether a packet to this address stays in the gateway."""
    if packed in places.gateway or packed in places.uplink:
        return True
    address = ipaddress.ip_address(packed)
    return any(address in one for one in (*places.link, *_NEARBY) if one.version == address.version)
