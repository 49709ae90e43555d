"""Check the ruleset of any network: it contains no manifest text, and its groups and patterns match the grant."""

from __future__ import annotations

import dataclasses
import ipaddress
import re

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from policy import data
from policy.compile.artefacts import Cause, Provenance
from policy.compile.causes import Origins
from policy.compile.network import firewall, quoting
from policy.compile.network.destinations import Destinations
from policy.compile.network.routes import Traced
from policy.grants.effective import Effective
from policy.grants.network import Network
from policy.grants.sets import addresses, hostnames
from policy.rules import nine
from tests.property.policy import grants_strategies as gs
from tests.property.policy.test_network_points import exact_names, points, some_addresses
from tests.unit.policy.compile import sample

MANIFEST = sample.manifest()
BASE = nine.requested(MANIFEST, roles=data.roles())

_PORTS = r"\{ [0-9]+(?:-[0-9]+)?(?:, [0-9]+(?:-[0-9]+)?)* \}"
_MATCH = (
    r'(?:iifname "agent0"|oifname "agent0"|oifname "uplink0"|ip6? daddr @[anx][46](?:_[0-9a-f]{16})?|'
    rf"(?:tcp|udp) dport {_PORTS}|meta l4proto (?:tcp|udp)|ct state established,related|ct status dnat|"
    r"meta skuid 64998|icmpv6 type \{ nd-neighbor-solicit, nd-neighbor-advert \}|limit rate over [0-9]+ bytes/second)"
)
_COUNTER = r'counter name "(?:c_[0-9a-f]{16}|refused_(?:tcp|udp|other))"'
_VERDICT = (
    r"(?:accept|drop|return|goto refuse|jump (?:upward|downward|granted|gate|plain)|reject with tcp reset|"
    r"reject with icmpx port-unreachable|redirect to :8443)"
)
# Every form of a line in firewall.nft: none of them can contain a string of a manifest.
GRAMMAR = [
    r"table inet covenant \{",
    r"\t(?:set|counter|chain) [a-z][a-z0-9_]* \{",
    r"\t\}",
    r"\}",
    r"\t\ttype ipv[46]_addr",
    r"\t\tflags (?:interval|timeout)",
    r"\t\tsize 1024",
    r"\t\telements = \{ [0-9a-f.:-]+(?:, [0-9a-f.:-]+)* \}",
    r"\t\ttype (?:filter|nat) hook (?:forward|input|output|prerouting) priority (?:filter|dstnat); policy [a-z]+;",
    rf"\t\t(?:{_MATCH} )*(?:{_COUNTER} )?{_VERDICT}",
    r"\t\tlimit rate 64/second burst 128 packets log group 27 snaplen 128",
]
_LINE = re.compile("|".join(f"(?:{one})" for one in GRAMMAR))


def ruleset(network: Network, limit: int | None) -> str:
    """Compile the ruleset for a network, without a manifest that requests it."""
    effective: Effective = dataclasses.replace(
        BASE, network=network, resources=structs.replace(BASE.resources, net_bps=limit)
    )
    found = Destinations.of(network)
    rows = found.rows()
    causes = {row.key: Cause("manifest", "permissions.network") for row in rows}
    traced = Traced(found, rows, causes, {row.key: 60 for row in rows})
    return firewall.compile(effective, traced, Origins(MANIFEST, effective), Provenance()).decode()


@given(gs.networks, st.none() | st.integers(1, 10**12))
def test_every_line_is_one_of_grammar(network: Network, limit: int | None) -> None:
    text = ruleset(network, limit)
    assert (text == "") == (network.mode == "off")
    for line in text.split("\n")[:-1]:
        assert _LINE.fullmatch(line), line


@given(st.text(max_size=40))
def test_nothing_but_word_goes_through_door(text: str) -> None:
    word = re.fullmatch("[a-z][a-z0-9_]{0,31}", text) is not None
    for door in (quoting.name, quoting.quoted):
        try:
            out = door(text)
        except ValueError:
            assert not word
        else:
            assert word
            assert out.strip('"') == text


@given(gs.networks)
def test_word_used_is_declared_and_reverse(network: Network) -> None:
    text = ruleset(network, 1)
    declared = re.findall(r"^\t(set|counter|chain) (\w+) \{$", text, re.MULTILINE)
    assert len(set(declared)) == len(declared)
    used = {("set", name) for name in re.findall(r"@(\w+)", text)}
    used |= {("counter", name) for name in re.findall(r'counter name "(\w+)"', text)}
    used |= {("chain", name) for name in re.findall(r"(?:goto|jump) (\w+)", text)}
    hooks = {("chain", name) for name in ("forward", "input", "output", "prerouting")}
    assert used == set(declared) - hooks


@given(gs.networks, some_addresses, points)
def test_groups_reach_address_as_grant_does(network: Network, address: str, point: tuple[str, int]) -> None:
    protocol, port = point
    span = addresses.span(ipaddress.ip_network(address))
    reached = any(
        any(a <= span[0] <= b for a, b in group.where) and any(a <= port <= b for a, b in group.ports)
        for group in Destinations.of(network).groups
        if group.protocol == protocol or (group.protocol, protocol) == ("tcp", "tls")
    )
    assert reached == network.to_address(address).allows(protocol, port)  # type: ignore[arg-type]


@given(gs.networks, exact_names, points)
def test_patterns_reach_name_as_grant_does(network: Network, name: str, point: tuple[str, int]) -> None:
    protocol, port = point
    patterns = {name, *hostnames.above(name)}
    matching = [
        one
        for one in Destinations.of(network).names
        if one.pattern in patterns and (one.protocol == protocol or (one.protocol, protocol) == ("tcp", "tls"))
    ]
    reached, held = (
        any(any(a <= port <= b for a, b in one.ports) for one in matching if one.asked is asked)
        for asked in (False, True)
    )
    assert reached == network.to_name(name).allows(protocol, port)  # type: ignore[arg-type]
    assert (held and not reached) == network.to_asked(name).allows(protocol, port)  # type: ignore[arg-type]


@given(gs.networks, gs.networks)
def test_part_of_network_has_names_of_whole(one: Network, other: Network) -> None:
    """The meaning of a digest does not depend on the other grants."""
    known: dict[str, tuple[object, ...]] = {}
    for network in (one, other, one.meet(other)):
        for row in Destinations.of(network).rows():
            said = (row.kind, row.host, row.protocol, row.ports)
            assert known.setdefault(row.key, said) == said
