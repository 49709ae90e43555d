"""Evaluate rules for one packet: each match of a rule lets by its own packets alone."""

from __future__ import annotations

import pytest
from msgspec import structs

from policy.decompile.network import packets
from policy.decompile.network.nft import BASE_V6, ReadChain, ReadRule, ReadSet, RuleVerdict, Table
from policy.decompile.network.packets import ACCEPT, DROP, Packet

SETS = {
    "a4": ReadSet("a4", 4, False, ((5, 9),)),
    "n4": ReadSet("n4", 4, True, ()),
    "n6": ReadSet("n6", 6, True, ()),
}
PACKET = Packet(7, "tcp", 443, "agent0", "uplink0", established=True, dnat=True, uid=3)


def verdict(packet: Packet, **match: object) -> packets.Outcome:
    rule = structs.replace(ReadRule(1, RuleVerdict("accept")), **match)
    chain = ReadChain("forward", (rule,), "drop")
    return packets.verdict(Table(SETS, {"forward": chain}, frozenset()), "forward", packet)


@pytest.mark.parametrize(
    ("match", "other"),
    [
        ({"iif": "agent0"}, {"iif": "x"}),
        ({"oif": "uplink0"}, {"oif": "x"}),
        ({"protocol": "tcp"}, {"protocol": "udp"}),
        ({"ports": ((1, 2), (443, 443))}, {"port": 444}),
        ({"ports": ((443, 445),)}, {"port": 442}),
        ({"established": True}, {"established": False}),
        ({"dnat": True}, {"dnat": False}),
        ({"uid": 3}, {"uid": 4}),
        ({"uid": 3}, {"uid": None}),
        ({"addresses": "a4"}, {"point": 4}),
        ({"addresses": "a4"}, {"point": 10}),
        ({}, None),
    ],
)
def test_match_lets_by_its_packets_alone(match: dict[str, object], other: dict[str, object] | None) -> None:
    assert verdict(PACKET, **match) == ACCEPT
    if other is not None:
        assert verdict(structs.replace(PACKET, **other), **match) == DROP


@pytest.mark.parametrize("point", [5, 9])
def test_set_has_both_ends_of_a_span(point: int) -> None:
    assert verdict(structs.replace(PACKET, point=point), addresses="a4") == ACCEPT


@pytest.mark.parametrize(
    ("name", "held", "point", "outcome"),
    [
        ("n4", {"n4"}, 7, ACCEPT),
        ("n4", {"n4"}, BASE_V6 - 1, ACCEPT),
        ("n4", {"n4"}, BASE_V6, DROP),
        ("n4", {"n6"}, 7, DROP),
        ("n4", set(), 7, DROP),
        ("n6", {"n6"}, BASE_V6, ACCEPT),
        ("n6", {"n6"}, BASE_V6 + 7, ACCEPT),
        ("n6", {"n6"}, BASE_V6 - 1, DROP),
        ("n6", {"n4"}, BASE_V6, DROP),
    ],
)
def test_answers_are_held_by_family(name: str, held: set[str], point: int, outcome: packets.Outcome) -> None:
    assert verdict(structs.replace(PACKET, point=point, held=frozenset(held)), addresses=name) == outcome


@pytest.mark.parametrize(("over", "outcome"), [(True, ACCEPT), (False, DROP)])
def test_rate_is_matched_when_exceeded(over: bool, outcome: packets.Outcome) -> None:
    assert verdict(structs.replace(PACKET, over=over), limit=1000) == outcome


def test_hook_without_chain_accepts() -> None:
    assert packets.verdict(Table({}, {}, frozenset()), "forward", PACKET) == ACCEPT


def test_redirect_has_its_port() -> None:
    assert verdict(PACKET, verdict=RuleVerdict("redirect", port=8443)) == ("redirect", 8443)


@pytest.mark.parametrize(
    ("first", "outcome"),
    [
        (RuleVerdict("log"), ("accept", 0)),
        (RuleVerdict("return"), ("drop", 0)),
        (RuleVerdict("jump", chain="empty"), ("accept", 0)),
        (RuleVerdict("goto", chain="empty"), ("drop", 0)),
        (RuleVerdict("jump", chain="ends"), ("redirect", 1)),
        (RuleVerdict("goto", chain="ends"), ("redirect", 1)),
        (RuleVerdict("jump", chain="returns"), ("accept", 0)),
        (RuleVerdict("drop"), ("drop", 0)),
    ],
)
def test_chain_goes_on_after_calls_and_logs(first: RuleVerdict, outcome: packets.Outcome) -> None:
    ends = ReadRule(9, RuleVerdict("redirect", port=1))
    chains = {
        "forward": ReadChain("forward", (ReadRule(1, first), ReadRule(2, RuleVerdict("accept"))), "drop"),
        "empty": ReadChain("empty", ()),
        "ends": ReadChain("ends", (ends,)),
        "returns": ReadChain("returns", (ReadRule(8, RuleVerdict("return")), ends)),
    }
    assert packets.verdict(Table({}, chains, frozenset()), "forward", PACKET) == outcome
