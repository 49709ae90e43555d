"""The rules of a gateway and its two gates taken together: the access of each address and of each name.

Direct access is what prerouting leaves alone and forward accepts. TLS access is what prerouting redirects to the TLS
gate, input lets in there, the gate connects on for, and output lets out again. A name has what its sets add to an
address, once the DNS gate has put it there. Addresses are read exactly, one evaluation for each membership in sets.
Names are read once each, which is exact because of three things that are checked: rules only add
(``flows.unordered``), what forward accepts is never redirected for the sake of another name, and what is redirected
may leave. Then an address in the sets of several names, or in static ones too, has what each of them gives.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from msgspec import Struct

from policy import errors
from policy.decompile.documents import shown
from policy.decompile.network import flows
from policy.decompile.network.flows import ALL, Flow, PacketKind
from policy.decompile.network.gates import GATES, Gates
from policy.decompile.network.nft import BASE, FIREWALL, NEIGHBOUR, Table
from policy.decompile.network.packets import ACCEPT
from policy.grants.network import Network
from policy.grants.sets import access, addresses, hostnames, spans
from policy.grants.sets.access import Access
from policy.grants.sets.spans import Spans

AGENT: Final = "agent0"
UPLINK: Final = "uplink0"
GATE_UID: Final = 64998
PUBLISH_UID: Final = 64994
REFUSAL: Final = "refuse"
_MAX_NAMED: Final = 8
T = TypeVar("T", int, str)
_Sets = tuple[tuple[str, ...], tuple[str, ...]]
_LINES: Final[Mapping[int, tuple[int, int]]] = {4: addresses.ALL[0], 6: addresses.ALL[1]}
# Memberships that are no set of the table: a name of a set has neither blank nor capital.
_PUBLIC: Final = "Public"


def refuse(message: str, *, line: int | None = None, where: str = FIREWALL) -> errors.ArtefactError:
    """The error for rules and gates that contradict each other, or leave a way that no grant could stand for."""
    return errors.ArtefactError(message, where=f"{where}:{line}" if line else where)


class Raw(Struct, frozen=True):
    """The ports of one destination: forwarded, or redirected to the TLS gate and allowed for it."""

    tcp: Spans
    udp: Spans
    tls: Spans

    @property
    def access(self) -> Access:
        """As grants have it."""
        return Access(self.tcp, spans.minus(self.tls, self.tcp), self.udp)


@dataclass
class Gateway:
    """One table with its gates. ``network`` is what the agent reaches through them."""

    table: Table
    gates: Gates
    _flows: dict[PacketKind, Flow] = field(default_factory=dict)
    _raw: dict[frozenset[str], Raw] = field(default_factory=dict)
    _places: dict[frozenset[str], tuple[tuple[Flow, tuple[int, ...]], ...]] = field(default_factory=dict)

    def flow(self, kind: PacketKind) -> Flow:
        """The rules for one kind of packet."""
        found = self._flows.get(kind)
        if found is None:
            found = self._flows[kind] = Flow.of(self.table, kind)
        return found

    def network(self) -> Network:
        """The destinations.

        Raises:
            errors.ArtefactError: there is a way that no grant stands for, the gates and the rules contradict each
                other, or the rules are not in an order that can be read.
        """
        self._told()
        self._closed_elsewhere()
        self._answers()
        self._additive()
        reach = addresses.join(self._by_address())
        self._inward(reach)
        common = common_access(reach)
        total = self._names(common, *self._merged())
        return Network.held(self._names(common, self.gates.dns, self.gates.tls), reach, total)

    def _merged(self) -> tuple[Mapping[str, _Sets], Mapping[str, Spans]]:
        """The names of both gates with those that need a lease, as if each lease were given."""
        gates = self.gates
        if not gates.asked:
            return gates.dns, gates.tls
        sets, ports = dict(gates.dns), dict(gates.tls)
        held = {name for families in gates.asked.values() for one in families for name in one}
        if shared := sorted(held & {name for families in gates.dns.values() for one in families for name in one}):
            raise refuse(f"set {shown(shared[0])} needs a lease and is filled without one", where=GATES)
        for pattern, (v4, v6) in gates.asked.items():
            one = self.raw(frozenset(v4)).access
            if not v4 or one.tcp or one.udp:
                raise refuse(f"name {shown(pattern)} is asked about, and its sets give more than TLS", where=GATES)
            before = sets.get(pattern, ((), ()))
            sets[pattern] = ((*before[0], *v4), (*before[1], *v6))
            ports[pattern] = spans.union(ports.get(pattern, ()), gates.asked_tls[pattern])
        return sets, ports

    # --- the ways that must not be, and those that must ---------------------------------------------------------

    def _told(self) -> None:
        """Check that each refused packet is logged first, and no other: a logged passing packet is a false denial."""
        telling = [rule for rule in self.table.rules() if rule.verdict.kind == "log"]
        refusals = self.table.chains.get(REFUSAL)
        if refusals is None or len(telling) != 1 or refusals.rules[:1] != tuple(telling):
            raise refuse(f"chain {REFUSAL} does not tell what it refuses, or another chain tells what it does not")

    def _devices(self) -> tuple[str, ...]:
        """The devices that rules name, the two that we make, and one that stands for all others."""
        named = {device for rule in self.table.rules() for device in (rule.iif, rule.oif) if device is not None}
        return (*self._few(named | {AGENT, UPLINK}), "*")

    def _uids(self) -> tuple[int, ...]:
        named = {rule.uid for rule in self.table.rules() if rule.uid is not None} | {GATE_UID}
        return (*self._few(named), max(named) + 1)

    @staticmethod
    def _few(named: set[T]) -> list[T]:
        """Bound the pairs of devices: each is a kind of packet to evaluate, and many would stop the machine."""
        if len(named) > _MAX_NAMED:
            raise refuse(f"the rules name {len(named)} devices or users, of which a gateway has a few")
        return sorted(named)

    def _new(self) -> Iterator[PacketKind]:
        """Every kind of first packet that no grant ever stands for."""
        devices = self._devices()
        for protocol in flows.PROTOCOLS:
            for iif in devices:
                for oif in devices:
                    if (iif, oif) != (AGENT, UPLINK) or protocol not in ("tcp", "udp"):
                        yield PacketKind("forward", protocol, iif=iif, oif=oif)
                if protocol != NEIGHBOUR and (iif != AGENT or protocol == "other"):
                    yield PacketKind("input", protocol, iif=iif)
                    yield PacketKind("input", protocol, iif=iif, dnat=True)
            for oif in devices:
                for uid in self._uids():
                    if protocol != NEIGHBOUR and (oif, uid, protocol) not in self._outward():
                        yield PacketKind("output", protocol, oif=oif, uid=uid)

    def _outward(self) -> tuple[tuple[str, int, str], ...]:
        """The device, user and protocol of the connections that a gate may begin."""
        publish = ((AGENT, PUBLISH_UID, "tcp"),) if self.gates.publish else ()
        return ((UPLINK, GATE_UID, "tcp"), *publish)

    def _closed_elsewhere(self) -> None:
        for kind in self._new():
            if self.flow(kind).barrier() is None:
                between = " to ".join(device for device in (kind.iif, kind.oif) if device)
                raise refuse(f"hook {kind.hook} lets {kind.protocol} of {between} by, for which there is no grant")
        self._brought_elsewhere()
        self._to_the_gates()
        self._to_the_agent()

    def _brought_elsewhere(self) -> None:
        """Redirected packets come to hook input alone: the other hooks are read as if there were none."""
        waiting = [chain for name, chain in self.table.chains.items() if name in BASE and name != "input"]
        seen = {chain.name for chain in waiting}
        while waiting:
            for rule in waiting.pop().rules:
                if rule.dnat:
                    raise refuse("only hook input may ask for what was redirected", line=rule.line)
                if rule.verdict.chain and rule.verdict.chain not in seen:
                    seen.add(rule.verdict.chain)
                    waiting.append(self.table.chains[rule.verdict.chain])

    def _to_the_gates(self) -> None:
        """Check that the agent reaches only the gates in the gateway itself, each in its own way."""
        dns: Spans = () if self.gates.dns_port is None else ((self.gates.dns_port,) * 2,)
        tls: Spans = () if self.gates.tls_port is None else ((self.gates.tls_port,) * 2,)
        service: Spans = () if self.gates.service_port is None else ((self.gates.service_port,) * 2,)
        host = spans.join((port, port) for port in self.gates.host.numbers())
        ssh: Spans = () if self.gates.ssh_port is None else ((self.gates.ssh_port,) * 2,)
        beside = spans.union(spans.union(service, host), ssh)
        for protocol, dnat, allowed in (
            ("tcp", False, spans.union(dns, beside)),
            ("udp", False, dns),
            ("tcp", True, spans.union(spans.union(dns, tls), beside)),
            ("udp", True, dns),
        ):
            flow = self.flow(PacketKind("input", protocol, iif=AGENT, dnat=dnat))
            if any(step.sets for step in flow.steps):
                raise refuse("hook input asks for destinations, which are the gateway itself")
            if spans.minus(flow.accepted(frozenset()), allowed):
                raise refuse(f"the agent reaches more of the gateway than its gates by {protocol}")
            if protocol == "tcp" and spans.minus(host, flow.accepted(frozenset())):
                raise refuse("the agent cannot reach a port of this host that is granted")

    def _to_the_agent(self) -> None:
        """Check that the publish gate reaches the published ports of the agent, and no other."""
        if not self.gates.publish:
            return
        flow = self.flow(PacketKind("output", "tcp", oif=AGENT, uid=PUBLISH_UID))
        if any(step.sets for step in flow.steps):
            raise refuse("hook output asks for destinations, where the agent's own address is meant")
        wanted = spans.join((port, port) for port, _ in self.gates.publish.pairs())
        if flow.accepted(frozenset()) != wanted:
            raise refuse("the publish gate reaches other ports of the agent than those that are published")

    def _answers(self) -> None:
        """Answers come back: without them a grant would be a dead letter."""
        ways = (
            *(
                PacketKind("forward", p, iif=i, oif=o)
                for i, o in ((AGENT, UPLINK), (UPLINK, AGENT))
                for p in ("tcp", "udp")
            ),
            *(PacketKind("input", p, iif=i) for i in (AGENT, UPLINK) for p in ("tcp", "udp")),
            *(PacketKind("output", p, oif=o, uid=GATE_UID) for o in (AGENT, UPLINK) for p in ("tcp", "udp")),
        )
        for way in ways:
            kind = PacketKind(way.hook, way.protocol, way.iif, way.oif, established=True, uid=way.uid)
            flow = self.flow(kind)
            if not flow.open():
                raise refuse(f"hook {kind.hook} drops the packets of connections that were allowed")

    def limits(self) -> tuple[frozenset[int], frozenset[int]]:
        """The lines that stop a rate which is exceeded, towards the uplink and towards the agent.

        Raises:
            errors.ArtefactError: some packets pass however fast they come.
        """
        found = []
        for kinds in (tuple(self._limited(up=True)), tuple(self._limited(up=False))):
            lines = set()
            for kind in kinds:
                line = self.flow(kind).barrier()
                if line is None or not self._is_limit(line):
                    raise refuse(f"hook {kind.hook} lets {kind.protocol} by at any rate", line=line)
                lines.add(line)
            found.append(frozenset(lines))
        return found[0], found[1]

    def _limited(self, *, up: bool) -> Iterator[PacketKind]:
        """Every kind of packet that counts for a direction: forwarded, and to or from the gates."""
        iif, oif = (AGENT, UPLINK) if up else (UPLINK, AGENT)
        for protocol in flows.PROTOCOLS:
            for established in (False, True):
                yield PacketKind("forward", protocol, iif=iif, oif=oif, established=established, over=True)
                if up:
                    for dnat in (False, True):  # what was brought to the TLS gate counts as what is forwarded
                        yield PacketKind("input", protocol, iif=AGENT, established=established, dnat=dnat, over=True)
                else:
                    # For any answer: the resolver has another uid than the TLS gate.
                    for uid in self._uids():
                        yield PacketKind("output", protocol, oif=AGENT, established=established, uid=uid, over=True)

    def _is_limit(self, line: int) -> bool:
        return any(rule.line == line and rule.limit is not None for rule in self.table.rules())

    # --- addresses and names ------------------------------------------------------------------------------------

    def raw(self, sets: frozenset[str]) -> Raw:
        """Return the end of the ports of a destination that is in exactly these sets."""
        found = self._raw.get(sets)
        if found is None:
            found = self._raw[sets] = self._evaluate(sets)
        return found

    def _evaluate(self, sets: frozenset[str]) -> Raw:
        ways = self._ways
        ends, gate = ways.first["tcp"].ports(sets), ("redirect", self.gates.tls_port or 0)
        for outcome in ends.keys() - {gate, ACCEPT, flows.POLICY}:
            raise refuse(f"prerouting ends tcp with {outcome[0]} {outcome[1]}, where no gate is")
        if ways.first["udp"].ports(sets).keys() - {ACCEPT, flows.POLICY}:
            raise refuse("prerouting takes udp elsewhere")
        tcp = _meet(ways.first["tcp"].accepted(sets), ways.through["tcp"].accepted(sets))
        # What is forwarded must be accepted by a rule where any rule redirects it: see the module's text.
        explicit = ends.get(ACCEPT, ())
        if explicit != tcp and (loose := spans.minus(spans.meet(tcp, ways.redirectable), explicit)):
            raise refuse(f"port {loose[0][0]} is forwarded, and would be redirected for the sake of another name")
        redirected = ends.get(gate, ()) if ways.gate_is_let_in else ()
        out = ways.out.accepted(sets)
        if redirected != out and (astray := spans.minus(redirected, out)):
            raise refuse(f"port {astray[0][0]} is brought to the TLS gate, which may not go there")
        if redirected != out and (beyond := spans.minus(out, spans.union(redirected, tcp))):
            raise refuse(f"the TLS gate may go to port {beyond[0][0]}, which is not brought to it")
        udp = _meet(ways.first["udp"].accepted(sets), ways.through["udp"].accepted(sets))
        return Raw(tcp, udp, spans.meet(redirected, out))

    def _additive(self) -> None:
        """Hold the order of the rules to one in which a public address in more sets has more."""
        if not any(one.dynamic for one in self.table.sets.values()):
            return
        private = {
            one.name
            for one in self.table.sets.values()
            if not one.dynamic and not spans.meet(one.spans, addresses.PUBLIC)
        }
        ways = self._ways
        for flow, order in (
            *((flow, ("accept", "redirect", "policy")) for flow in ways.first.values()),
            *((flow, ("accept", "drop")) for flow in (*ways.through.values(), ways.out)),
        ):
            line = flows.unordered(flow, order, private)
            if line is not None:
                raise refuse("the rules are not in an order that can be read", line=line)

    def _by_address(self) -> Iterator[tuple[int, int, Access]]:
        """Every span of addresses with its access; each is cut wherever a set begins or ends."""
        groups: dict[Spans, list[tuple[int, int]]] = {}
        for first, last, ports in self.gates.addresses:
            groups.setdefault(ports, []).append((first, last))
        served = {f"Served {at}": ports for at, ports in enumerate(groups)}
        beside = (
            (_PUBLIC, addresses.PUBLIC),
            *zip(served, (spans.join(where) for where in groups.values()), strict=True),
        )
        for family, line in _LINES.items():
            static = [(s.name, s.spans) for s in self.table.sets.values() if s.family == family and not s.dynamic]
            dynamic = frozenset(s.name for s in self.table.sets.values() if s.family == family and s.dynamic)
            inside = [(name, spans.meet(where, (line,))) for name, where in beside]
            known: dict[frozenset[str], Access] = {}
            for first, last, held in flows.memberships(line, (*static, *inside)):
                how = known.get(held)
                if how is None:
                    how = known[held] = self._access(held, dynamic, served)
                if how:
                    yield first, last, how

    def _access(self, held: frozenset[str], dynamic: frozenset[str], served: Mapping[str, Spans]) -> Access:
        """The access of an address that is in these sets, to which no name leads."""
        sets = held.difference(served, (_PUBLIC,))
        found = self.raw(sets)
        # No rule for a name may be asked at all: all names together may change nothing where one of them would.
        if _PUBLIC not in held and dynamic and self._led_to(sets, dynamic):
            raise refuse("a name changes what an address that is not public may")
        any_hello = spans.join(span for name in held & served.keys() for span in served[name])
        if spans.minus(found.tls, any_hello):
            raise refuse("rules bring an address to the TLS gate, which does not know it", where=GATES)
        if spans.minus(any_hello, spans.union(found.tls, found.tcp)):
            raise refuse("the TLS gate serves an address without a name, which no rule brings to it", where=GATES)
        return found.access

    def _led_to(self, sets: frozenset[str], dynamic: frozenset[str]) -> bool:
        """Whether packets to an address in these sets come by any rule for a name."""
        places = self._places.get(dynamic)
        if places is None:
            ways = self._ways
            places = self._places[dynamic] = tuple(
                (flow, flow.places(dynamic)) for flow in (*ways.first.values(), *ways.through.values(), ways.out)
            )
        return any(flow.passes(sets, where) for flow, where in places)

    def _names(self, common: Access, dns: Mapping[str, _Sets], tls: Mapping[str, Spans]) -> hostnames.Names:
        """Every pattern of ``dns``, with what its sets add and what every public address has."""
        used: set[str] = set()
        own: dict[str, Access] = {}
        for pattern, families in dns.items():
            for family, names in zip(_LINES, families, strict=True):
                self._filled(pattern, family, names)
                used.update(names)
            v4, v6 = (self.raw(frozenset(names)) for names in families)
            if v4 != v6:
                raise refuse(f"name {shown(pattern)} has another access by IPv6 than by IPv4")
            own[pattern] = v4.access
        used.update(name for families in self.gates.asked.values() for names in families for name in names)
        if idle := sorted(name for name, one in self.table.sets.items() if one.dynamic and name not in used):
            raise refuse(f"no name fills set {shown(idle[0])}")
        hello = {pattern: Access(tls=ports) for pattern, ports in tls.items()}
        for pattern in own.keys() | hello.keys():
            brought = access.union(hostnames.total(own, pattern), common)
            if access.minus(hostnames.total(hello, pattern), brought):
                message = f"the TLS gate serves name {shown(pattern)} on a port that no rule brings to it"
                raise refuse(message, where=GATES)
        if not self._ways.dns_is_let_in:
            return ()
        parts = []
        for pattern, how in own.items():
            if spans.minus(how.tls, hostnames.total(hello, pattern).tls):
                # Its addresses could be reached there with a ClientHello for another name.
                raise refuse(f"rules bring name {shown(pattern)} to the TLS gate, which does not know it", where=GATES)
            reached = access.union(how, common)
            if not access.union(hostnames.total(own, pattern), reached):
                # An answer is a channel, so a name that leads nowhere is not resolved either.
                raise refuse(f"the DNS gate answers for name {shown(pattern)}, which leads nowhere", where=GATES)
            parts.append((pattern, reached))
        return hostnames.join(parts)

    def _inward(self, reach: addresses.Reach) -> None:
        """Hold what is not public in a name's answers to what the agent reaches by address on a port of that name."""
        for pattern, (v4, _) in self.gates.dns.items():
            how = self.raw(frozenset(v4)).access
            beside = spans.join((first, last) for first, last, one in reach if _together(how, one))
            wanted = () if pattern == hostnames.EVERY else spans.minus(beside, addresses.PUBLIC)
            if self.gates.inward[pattern] != wanted:
                raise refuse(f"name {shown(pattern)} leads to other private addresses than those granted", where=GATES)

    def _filled(self, pattern: str, family: int, names: Iterable[str]) -> None:
        """Hold the sets of a name to dynamic ones of the family that its addresses are of."""
        for name in names:
            one = self.table.sets.get(name)
            if one is None or not one.dynamic or one.family != family:
                what = f"set {shown(name)} of name {shown(pattern)}"
                raise refuse(f"{what} is none that IPv{family} answers can be put into", where=GATES)

    @functools.cached_property
    def _ways(self) -> _Ways:
        first = {p: self.flow(PacketKind("prerouting", p, iif=AGENT)) for p in ("tcp", "udp")}
        dnat = self.flow(PacketKind("input", "tcp", iif=AGENT, dnat=True)).accepted(frozenset())
        # The resolver has the gateway's own address, which is in no set.
        asked = {
            _holds(
                spans.meet(
                    self.flow(PacketKind("input", p, iif=AGENT)).accepted(frozenset()), flow.accepted(frozenset())
                ),
                self.gates.dns_port,
            )
            for p, flow in first.items()
        }
        if len(asked) > 1:
            raise refuse("the DNS gate can be asked by one of tcp and udp alone")
        return _Ways(
            first,
            {p: self.flow(PacketKind("forward", p, iif=AGENT, oif=UPLINK)) for p in ("tcp", "udp")},
            self.flow(PacketKind("output", "tcp", oif=UPLINK, uid=GATE_UID)),
            spans.join(
                span
                for step in first["tcp"].steps
                if step.outcome is not None and step.outcome[0] == "redirect"
                for span in step.ports or ALL
            ),
            _holds(dnat, self.gates.tls_port),
            asked == {True},
        )


class _Ways(Struct, frozen=True):
    """The rules on the way of an agent's packet, by protocol, and whether the gates can be reached at all."""

    first: Mapping[str, Flow]
    through: Mapping[str, Flow]
    out: Flow
    redirectable: Spans
    gate_is_let_in: bool
    dns_is_let_in: bool


def _together(name: Access, address: Access) -> bool:
    """Whether a name and an address are granted on a common port."""
    by_tcp = spans.meet(spans.union(name.tcp, name.tls), spans.union(address.tcp, address.tls))
    return bool(by_tcp or spans.meet(name.udp, address.udp))


def _meet(a: Spans, b: Spans) -> Spans:
    """The ports in both, at once where prerouting leaves every port alone."""
    return b if a == ALL else spans.meet(a, b)


def _holds(ports: Spans, port: int | None) -> bool:
    return port is not None and any(first <= port <= last for first, last in ports)


def common_access(reach: addresses.Reach) -> Access:
    """The access that every public address has."""
    how: Access | None = None
    covered = []
    for first, last, one in addresses.meet(reach, addresses.uniform(addresses.PUBLIC, access.EVERYTHING)):
        how = one if how is None else access.meet(how, one)
        covered.append((first, last))
    return access.NOTHING if how is None or spans.join(covered) != addresses.PUBLIC else how


def with_common(network: Network) -> Network:
    """The same destinations, each name with what every public address has beside its own.

    A name leads to public addresses, so each way to all of those reaches it; grants keep the two apart, and
    rules cannot.
    """
    common = common_access(network.reach)
    if not common:
        return network
    names, total = (
        hostnames.join((name, access.union(how, common)) for name, how in one) for one in (network.names, network.total)
    )
    return Network.held(names, network.reach, total)
