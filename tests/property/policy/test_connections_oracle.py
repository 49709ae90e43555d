"""Connections judged at once, beside the rules read one after the other for each of them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from policy.connections import PROTOCOLS, Connection
from policy.decompile.network import nft, packets
from policy.decompile.network.packets import ACCEPT, Packet
from policy.prove.connections import Ways, point
from tests.connection_kit import AGENT, PLACES, UPLINK, connection, firewall, forwarded, redirected

HOSTS = ("93.184.216.34", "93.184.216.35", "10.0.0.0", "10.255.255.255", "11.0.0.0", "9.9.9.9", "172.16.5.5", "1.2.3.4",
         "172.16.0.1", "2606:4700::1111", "2606:4700::2222", "fd00::1")  # fmt: skip
PORTS = (22, 53, 80, 123, 124, 443, 5432, 8443)


def may(
    hook: str, one: Connection, outcome: packets.Outcome, *, iif: str = "", oif: str = "", uid: int | None = None
) -> bool:
    """Whether the rules may end the first packet so, with its destination in any of the sets of names."""
    table = nft.parse(firewall())
    names = [name for name, held in table.sets.items() if held.dynamic]
    sent, protocol = one.sent, PROTOCOLS[one.protocol]
    return any(
        packets.verdict(
            table,
            hook,
            Packet(point(sent.destination), protocol, sent.destination_port, iif, oif, uid=uid, held=frozenset(held)),
        )
        == outcome
        for count in range(3)
        for held in itertools.combinations(names, count)
    )


def allowed(one: Connection) -> bool:
    return not list(Ways.of(firewall()).refused([one], PLACES))


@given(st.sampled_from(HOSTS), st.sampled_from(PORTS), st.sampled_from((6, 17)))
def test_forwarded_as_rules_say(host: str, port: int, protocol: int) -> None:
    one = forwarded(host, port, protocol)
    assert allowed(one) == may("forward", one, ACCEPT, iif="agent0", oif="uplink0")


@given(st.sampled_from([host for host in HOSTS if ":" not in host]), st.sampled_from(PORTS), st.sampled_from(PORTS))
def test_redirected_as_rules_say(host: str, port: int, to: int) -> None:
    one = redirected(host, port, to)
    assert allowed(one) == may("prerouting", one, ("redirect", to), iif="agent0")


@given(st.sampled_from([host for host in HOSTS if ":" not in host]), st.sampled_from(PORTS), st.sampled_from((6, 17)))
def test_made_by_gate_as_rules_say(host: str, port: int, protocol: int) -> None:
    one = connection(UPLINK, host, port, protocol)
    assert allowed(one) == may("output", one, ACCEPT, oif="uplink0", uid=64998)


@given(st.sampled_from(PORTS), st.sampled_from((6, 17)))
def test_taken_by_gateway_as_rules_say(port: int, protocol: int) -> None:
    one = connection(AGENT, UPLINK, port, protocol)
    assert allowed(one) == may("input", one, ACCEPT, iif="agent0")
