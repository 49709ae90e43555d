"""Compare two readings of the same rules, all at once and packet by packet, for made-up and compiled rules."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from policy import data
from policy.compile import plan
from policy.decompile.network import flows, gates, network, nft, packets, reach
from policy.decompile.network.flows import Flow, PacketKind
from policy.decompile.network.packets import Packet
from policy.grants.network import Network
from policy.grants.sets import access, addresses, hostnames, spans
from policy.grants.sets.access import Access
from policy.manifest import parse
from policy.rules import nine
from tests.unit.policy.compile import sample

# --- made-up rules ------------------------------------------------------------------------------------------------

SETS = """\
\tset a4_one {
\t\ttype ipv4_addr
\t\tflags interval
\t\telements = { 10.0.0.0-10.0.0.9, 10.0.0.20 }
\t}
\tset a4_two {
\t\ttype ipv4_addr
\t\tflags interval
\t\telements = { 10.0.0.5-10.0.0.20 }
\t}
\tset a6_one {
\t\ttype ipv6_addr
\t\tflags interval
\t\telements = { 2001:db8::-2001:db8::9 }
\t}
\tset n4_one {
\t\ttype ipv4_addr
\t\tflags timeout
\t\tsize 1024
\t}
\tset n6_one {
\t\ttype ipv6_addr
\t\tflags timeout
\t\tsize 1024
\t}
"""
HEADS = {
    "forward": "type filter hook forward priority filter; policy {};",
    "output": "type filter hook output priority filter; policy {};",
    "prerouting": "type nat hook prerouting priority dstnat; policy {};",
}
DEVICES = ("agent0", "uplink0")
MATCHES = st.lists(
    st.sampled_from(
        [
            "ip daddr @a4_one",
            "ip daddr @a4_two",
            "ip6 daddr @a6_one",
            "ip daddr @n4_one",
            "ip6 daddr @n6_one",
            "tcp dport { 80, 90-100 }",
            "tcp dport { 95-65535 }",
            "udp dport { 0, 80 }",
            "meta l4proto tcp",
            "meta l4proto udp",
            "ct state established,related",
            "ct status dnat",
        ]
    ),
    max_size=3,
    unique_by=lambda match: {"ip": "daddr", "ip6": "daddr", "meta": "proto", "tcp": "dport", "udp": "dport"}.get(
        match.split()[0], match
    ),
)


def consistent(matches: list[str]) -> bool:
    protocols = {
        word for match in matches for word in ("tcp", "udp") if match.startswith((word, f"meta l4proto {word}"))
    }
    return len(protocols) < 2


RULES = st.builds(
    lambda matches, verdict: " ".join([*matches, verdict]),
    MATCHES.filter(consistent),
    st.sampled_from(["accept", "drop", "return", "reject with tcp reset", "redirect to :8443", "jump", "goto"]),
).filter(lambda rule: "tcp reset" not in rule or "udp" not in rule) | st.just(nft.LOG)


@st.composite
def tables(draw: st.DrawFn) -> str:
    """Draw base chains and three others; a chain calls only chains that come after it."""
    names = [*HEADS, "one", "two", "three"]
    parts = []
    for at, name in enumerate(names):
        later = [other for other in names[at + 1 :] if other not in HEADS]
        lines = []
        for rule in draw(st.lists(RULES, max_size=5)):
            if rule.endswith(("jump", "goto")):
                lines.append(f"{rule} {draw(st.sampled_from(later))}" if later else f"{rule[:-4]}accept")
            else:
                lines.append(rule)
        head = [HEADS[name].format(draw(st.sampled_from(["accept", "drop"])))] if name in HEADS else []
        parts.append("".join(f"\t\t{line}\n" for line in (*head, *lines)).join((f"\tchain {name} {{\n", "\t}\n")))
    return f"{nft.TABLE}\n{SETS}{''.join(parts)}}}\n"


POINTS = [
    addresses.span(ipaddress.ip_network(text))[0]
    for text in (
        "9.255.255.255",
        "10.0.0.0",
        "10.0.0.4",
        "10.0.0.5",
        "10.0.0.9",
        "10.0.0.10",
        "10.0.0.20",
        "10.0.0.21",
        "2001:db8::",
        "2001:db8::9",
        "2001:db8::a",
    )
]
PORTS = [0, 1, 79, 80, 81, 89, 90, 94, 95, 100, 101, 65535]


@settings(max_examples=40, deadline=None)
@given(tables(), st.booleans(), st.booleans(), st.sampled_from([frozenset(), frozenset({"n4_one", "n6_one"})]))
def test_all_packets_at_once_fare_as_each_alone(text: str, established: bool, dnat: bool, held: frozenset[str]) -> None:
    table = nft.parse(text.encode())
    for hook in HEADS:
        for protocol in ("tcp", "udp", "other"):
            kind = PacketKind(hook, protocol, established=established, dnat=dnat)
            flow = Flow.of(table, kind)
            for point in POINTS:
                family = 6 if point >= nft.BASE_V6 else 4
                sets = frozenset(
                    s.name
                    for s in table.sets.values()
                    if s.family == family
                    and (s.name in held if s.dynamic else any(a <= point <= b for a, b in s.spans))
                )
                ends = flow.ports(sets)
                for port in PORTS:
                    packet = Packet(point, protocol, port, established=established, dnat=dnat, held=held)
                    expected = packets.verdict(table, hook, packet)
                    (found,) = [o for o, where in ends.items() if any(a <= port <= b for a, b in where)]
                    assert (found if found != flows.POLICY else (flow.policy, 0)) == expected
                    if flow.barrier() is not None:
                        assert expected[0] != "accept"
                    if flow.open():
                        assert expected[0] == "accept"


@settings(max_examples=100, deadline=None)
@given(tables())
def test_additive_rules_give_destination_in_two_sets_what_each_gives(text: str) -> None:
    flow = Flow.of(nft.parse(text.encode()), PacketKind("forward", "tcp"))
    if flows.unordered(flow, ("accept", "drop"), ()) is not None:
        return
    for one, other in (("a4_one", "n4_one"), ("a4_two", "n4_one"), ("a6_one", "n6_one")):
        apart = [flow.accepted(frozenset({name})) for name in (one, other)]
        assert flow.accepted(frozenset({one, other})) == spans.union(*apart)


# --- compiled rules -----------------------------------------------------------------------------------------------

MANIFEST = sample.TOML.replace('network = "off"', 'network = "{network}"')
HOSTS = [
    "example.com", "www.example.com", "*.example.com", "*.api.example.com", "x.api.example.com", "example.org",
    "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "1.1.1.1", "1.1.0.0/16", "2001:db8::/32", "2606:4700::/32", "2606:4700::1",
]  # fmt: skip
PORT_LISTS = ["[80]", "[443]", "[53, 443]", '[80, "8000-8100"]', '["1-65535"]', '[22, "440-450"]']


@st.composite
def manifests(draw: st.DrawFn) -> str:
    entries = draw(
        st.lists(
            st.tuples(st.sampled_from(HOSTS), st.sampled_from(PORT_LISTS), st.sampled_from(access.PROTOCOLS)),
            max_size=6,
            unique=True,
        )
    )
    mode = draw(st.sampled_from(["full", "outbound-https-only"])) if not entries else "full"
    more = "".join(
        f'[[permissions.network]]\nhost = "{host}"\nports = {ports}\nprotocol = "{protocol}"\n'
        for host, ports, protocol in entries
    )
    bps = draw(st.sampled_from(["", "net_bps = 4096"]))
    return MANIFEST.format(more=more, resources=bps, filesystem="ephemeral", runtime="python3", network=mode)


def compiled(text: str) -> tuple[Network, dict[str, bytes]]:
    manifest = parse.parse(text.encode())
    effective = nine.requested(manifest, roles=data.roles())
    return effective.network, dict(plan.compile(effective, manifest, sample.host(), package_digest="d" * 64).files)


class Journey:
    """Follows a first packet through each hook, and through the gates between them that gates.json describes."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.table = nft.parse(files[nft.FIREWALL])
        self.gates = gates.read(files)
        self.verdict = functools.partial(packets.verdict, self.table)

    def access(self, point: int, port: int, held: Iterable[str], name: str | None) -> Access:
        sets = frozenset(held)
        tcp = self._direct(point, port, sets, "tcp")
        tls = not tcp and self._tls(point, port, sets, name)
        udp = self._direct(point, port, sets, "udp")
        spot = ((port, port),)
        return Access(spot if tcp else (), spot if tls else (), spot if udp else ())

    def _direct(self, point: int, port: int, held: frozenset[str], protocol: str) -> bool:
        packet = Packet(point, protocol, port, iif="agent0", held=held)
        if self.verdict("prerouting", packet)[0] != "accept":
            return False
        packet = Packet(point, protocol, port, iif="agent0", oif="uplink0", held=held)
        return self.verdict("forward", packet)[0] == "accept"

    def _tls(self, point: int, port: int, held: frozenset[str], name: str | None) -> bool:
        first = self.verdict("prerouting", Packet(point, "tcp", port, iif="agent0", held=held))
        if first != ("redirect", self.gates.tls_port):
            return False
        # The gateway's own address, which no rule of the input hook matches.
        assert self.gates.tls_port is not None
        if self.verdict("input", Packet(1, "tcp", self.gates.tls_port, iif="agent0", dnat=True))[0] != "accept":
            return False
        out = self.verdict("output", Packet(point, "tcp", port, oif="uplink0", uid=reach.GATE_UID, held=held))
        if out[0] != "accept":
            return False
        if any(a <= point <= b and _in(port, ports) for a, b, ports in self.gates.addresses):
            return True
        return name is not None and any(
            _in(port, self.gates.tls.get(pattern, ())) for pattern in (name, *hostnames.above(name))
        )

    def sets_of(self, name: str) -> Iterator[str]:
        for pattern in (name, *hostnames.above(name)):
            for sets in self.gates.dns.get(pattern, ()):
                yield from sets


def _in(port: int, ports: Iterable[tuple[int, int]]) -> bool:
    return any(a <= port <= b for a, b in ports)


def at(granted: Access, port: int) -> Access:
    return access.meet(granted, Access(((port, port),), (), ((port, port),)))


EDGES = sorted(
    {point + shift for host in HOSTS if (span := addresses.parse(host)) for point in span for shift in (-1, 0, 1)}
    | {p for span in addresses.PUBLIC[::4] for p in span}
)
PROBED = [21, 22, 53, 79, 80, 443, 444, 451, 7999, 8000, 8100, 8101, 65535]
NAMES = ["example.com", "www.example.com", "x.api.example.com", "y.api.example.com", "example.org", "other.net"]


@settings(max_examples=40, deadline=None)
@given(manifests(), st.data())
def test_what_is_read_is_what_was_granted_and_what_packets_do(text: str, draw: st.DataObject) -> None:
    granted, files = compiled(text)
    found = network.read(files)
    assert found.network == reach.with_common(granted)
    journey = Journey(files)
    points = draw.draw(st.lists(st.sampled_from(EDGES), min_size=3, max_size=6, unique=True))
    ports = draw.draw(st.lists(st.sampled_from(PROBED), min_size=4, max_size=6, unique=True))
    every = [name for name, one in journey.table.sets.items() if one.dynamic]
    for point in points:
        public = _in(point, addresses.PUBLIC)
        for port in ports:
            own = at(addresses.at(granted.reach, point), port)
            assert journey.access(point, port, (), None) == own
            for name in NAMES:
                known = any(p in journey.gates.dns for p in (name, *hostnames.above(name)))
                by_name = at(granted.to_name(name), port) if public and known else access.NOTHING
                assert journey.access(point, port, journey.sets_of(name), name) == access.union(own, by_name), name
            if not public:
                assert journey.access(point, port, every, "example.com") == own
