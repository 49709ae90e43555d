"""Rules of others on the host: by direction, by address family, by statement, and through chains, maps and sets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy.decompile import host_rules
from policy.grants.sets import spans
from policy.prove.connections import span

RUN = host_rules.Run(
    "cv-12345678",
    "eth0",
    spans.join([span("198.19.0.40"), span("fd00::40")]),
    spans.join([span("93.184.216.34"), span("2001:db8::34")]),
)
NAT = {"type": "nat", "hook": "prerouting", "prio": 0, "policy": "accept"}
FILTER = {"type": "filter", "hook": "forward", "prio": 0, "policy": "accept"}
DNAT = {"dnat": {"addr": "10.8.8.8"}}
ACCEPT = {"accept": None}


def meta(key: str) -> dict[str, Any]:
    return {"meta": {"key": key}}


def payload(name: str, protocol: str = "ip") -> dict[str, Any]:
    return {"payload": {"protocol": protocol, "field": name}}


def match(left: Any, right: Any, operator: str = "==") -> dict[str, Any]:
    return {"match": {"op": operator, "left": left, "right": right}}


def listing(*rules: Any, base: dict[str, Any], more: tuple[dict[str, Any], ...] = ()) -> bytes:
    place = {"family": "inet", "table": "t"}
    items: list[dict[str, Any]] = [{"chain": {**place, "name": "c", **base}}]
    items += [{"rule": {**place, "chain": "c", "expr": one}} for one in rules]
    items += [{kind: {**place, **body}} for one in more for kind, body in one.items()]
    return json.dumps({"nftables": items}).encode()


def touches(*expressions: Any, base: dict[str, Any] = NAT, more: tuple[dict[str, Any], ...] = ()) -> bool:
    return bool(host_rules.touching(listing(list(expressions), base=base, more=more), RUN))


def by_direction(*expressions: Any) -> tuple[bool, bool]:
    """Whether a rule touches packets of the run alone, and of both directions."""
    return touches(*expressions), touches(*expressions, base=FILTER)


@pytest.mark.parametrize(
    ("matches", "outwards", "both"),
    [
        ([match(meta("iifname"), "cv-12345678")], True, True),
        ([match(meta("iif"), "cv-12345678")], True, True),
        ([match(meta("oifname"), "eth0")], True, True),
        ([match(meta("oif"), "eth0")], True, True),
        ([match(meta("iifname"), "eth0")], False, True),
        ([match(meta("iif"), "eth0")], False, True),
        ([match(meta("oifname"), "cv-12345678")], False, True),
        ([match(meta("oif"), "cv-12345678")], False, True),
        ([match(meta("oif"), "eth9")], False, False),
        ([match(payload("saddr"), "198.19.0.40")], True, True),
        ([match(payload("saddr"), "198.19.0.41")], False, False),
        ([match(payload("saddr"), "93.184.216.34")], False, True),
        ([match(payload("daddr"), "93.184.216.34")], True, True),
        ([match(payload("daddr"), "10.1.1.1")], False, True),
        ([match(payload("saddr", "ip6"), "fd00::40")], True, True),
        ([match(payload("saddr", "ip6"), "fd00::41")], False, False),
        ([match(payload("daddr", "ip6"), "2001:db8::34")], True, True),
        ([match(payload("daddr", "ip6"), "2001:db8::35")], False, True),
        ([match(payload("daddr", "ip6"), {"prefix": {"addr": "2001:db8::", "len": 64}})], True, True),
        # All of one family's addresses of the run, so that none is another.
        ([match(payload("saddr", "ip6"), "fd00::40", "!="), match(meta("iifname"), "cv-12345678")], False, False),
        ([match(payload("saddr"), "198.19.0.40", "!="), match(meta("iifname"), "cv-12345678")], False, False),
        ([match(payload("saddr"), "198.19.0.41", "!="), match(meta("iifname"), "cv-12345678")], True, True),
        # Fields and protocols that are not known exclude nothing.
        ([match(payload("saddr", "arp"), "10.1.1.1")], True, True),
        ([match(payload("ttl"), 1)], True, True),
        ([match(payload("saddr"), {"range": ["198.19.0.1", "198.19.0.40"]})], True, True),
        ([match(payload("saddr"), {"range": ["198.19.0.1", "198.19.0.39"]})], False, False),
        ([match(payload("saddr"), {"range": ["198.19.0.40", "198.19.0.41"]})], True, True),
        ([match(payload("saddr"), {"prefix": {"addr": "198.19.0.1", "len": 24}})], True, True),
        ([match(payload("saddr"), {"prefix": {"addr": "198.19.1.0", "len": 24}})], False, False),
        ([match(payload("saddr"), {"prefix": {"addr": "198.19.1.0"}})], True, True),
        ([match(payload("saddr"), "no address")], True, True),
        ([match(payload("saddr"), "198.19.0.3/24")], True, True),
        ([match(payload("saddr"), ["198.19.0.41", "198.19.0.40"])], True, True),
        # A type of address is known on the way out alone.
        ([match({"fib": {"result": "type", "flags": ["daddr"]}}, "local")], False, True),
        ([match({"fib": {"result": "type", "flags": ["daddr"]}}, {"set": ["local", "unicast"]})], True, True),
        ([match({"fib": {"result": "type", "flags": ["daddr"]}}, "local", "!=")], True, True),
        ([match({"fib": {"result": "type", "flags": ["saddr"]}}, "local")], True, True),
        ([match({"fib": {"result": "oif", "flags": ["daddr"]}}, "local")], True, True),
        # Packets of a run have no mark.
        ([match(meta("mark"), 0)], True, True),
        ([match(meta("mark"), 1)], False, False),
        ([match({"ct": {"key": "mark"}}, 1)], False, False),
        ([match({"ct": {"key": "mark"}}, 0, "!=")], False, False),
        ([match(meta("mark"), 1, "!=")], True, True),
        ([match(meta("mark"), {"set": [1, 0]})], True, True),
        ([match(meta("mark"), "x")], True, True),
        # A set without elements matches nothing.
        ([match(meta("mark"), "@s")], False, False),
        ([match({"ct": {"key": "state"}}, 1)], True, True),
        ([match({"&": [meta("mark"), 1]}, 1)], True, True),
        # Operators and forms that are not known exclude nothing.
        ([match(meta("iifname"), "eth9", "<")], True, True),
        ([match(meta("iifname"), "eth9", "in")], False, False),
        ([match(meta("iifname"), 3)], True, True),
        ([{"match": None}], True, True),
        ([match(meta("iifname"), ["eth9", "cv-*"])], True, True),
        ([match(meta("iifname"), "cv-2*")], False, False),
        ([match(meta("iifname"), ["eth9", "eth8"], "!=")], True, True),
        ([match(meta("iifname"), ["eth9", "cv-*"], "!=")], False, True),
    ],
)
def test_match_excludes_by_direction(matches: list[Any], outwards: bool, both: bool) -> None:
    assert by_direction(*matches, DNAT) == (outwards, both)


def pair(first: Any, second: Any) -> dict[str, Any]:
    return {"concat": [first, second]}


@pytest.mark.parametrize(
    ("right", "operator", "touched"),
    [
        (pair("cv-12345678", "93.184.216.34"), "==", True),
        (pair("cv-12345678", "10.1.1.1"), "==", False),
        (pair("eth9", "93.184.216.34"), "==", False),
        (pair("cv-12345678", "93.184.216.34"), "!=", True),
        ({"set": [pair("eth9", "93.184.216.34"), pair("cv-12345678", "10.1.1.1")]}, "==", False),
        ({"set": [pair("eth9", "93.184.216.34"), pair("cv-*", "93.184.0.0/16")]}, "==", True),
        ({"concat": "x"}, "==", True),
        ("cv-12345678", "==", True),
        ("eth9", "==", False),
    ],
)
def test_pair_matches_part_by_part(right: Any, operator: str, touched: bool) -> None:
    left = pair(meta("iifname"), payload("daddr"))
    assert touches(match(left, right, operator), DNAT) == touched


def test_pair_of_one_is_single_match() -> None:
    assert not touches(match({"concat": [meta("iifname")]}, "cv-12345678", "!="), match(meta("iifname"), "eth9"), DNAT)
    assert touches(match({"concat": [meta("iifname")]}, "eth9"), DNAT)
    assert touches(match({"concat": "x"}, "eth9"), DNAT)


@pytest.mark.parametrize(
    "matches",
    [
        [match(meta("iifname"), "cv-12345678")],
        [match(meta("iifname"), "cv-*")],
        [match(meta("iif"), ["eth9", "cv-12345678"])],
        [match(payload("saddr"), "198.19.0.40")],
        [match(payload("saddr"), "198.19.0.0/24")],
        [match(payload("saddr", "ip6"), "fd00::40")],
        [match(payload("protocol"), 6), match(meta("iifname"), "cv-12345678")],
    ],
)
def test_accept_of_named_run_touches(matches: list[Any]) -> None:
    assert touches(*matches, ACCEPT)
    # To drop its packets only takes away.
    assert not touches(*matches, {"drop": None})


@pytest.mark.parametrize(
    "matches",
    [
        [],
        [match(meta("iifname"), "*")],
        [match(meta("iifname"), "eth9", "!=")],
        [match(meta("oifname"), "eth0")],
        [match(meta("mark"), 0)],
        [match(payload("saddr"), "0.0.0.0/0")],
        [match(payload("saddr", "ip6"), "::/0")],
        [match(payload("saddr"), "198.19.0.41", "!=")],
        [match(payload("daddr"), "93.184.216.34")],
        [match(payload("ttl"), "198.19.0.40")],
        [match({"concat": [meta("iifname")]}, "cv-12345678")],
        [match("x", "cv-12345678")],
    ],
)
def test_accept_of_every_packet_does_not_touch(matches: list[Any]) -> None:
    assert not touches(*matches, ACCEPT)
    assert touches(*matches, ACCEPT, DNAT)


def test_accept_of_answers_by_name_touches() -> None:
    assert touches(match(meta("oifname"), "cv-12345678"), ACCEPT, base=FILTER)
    assert touches(match(payload("daddr"), "198.19.0.40"), ACCEPT, base=FILTER)
    assert not touches(match(payload("daddr"), "198.19.0.41"), ACCEPT, base=FILTER)


@pytest.mark.parametrize(
    "statement",
    [
        *({name: None} for name in ("dnat", "snat", "redirect", "tproxy", "queue", "dup", "fwd", "notrack", "flow")),
        *({name: None} for name in ("synproxy", "ct helper", "ct timeout", "ct expectation")),
        {"xt": {"type": "target", "name": "DNAT"}},
        {"xt": {"type": "target", "name": "MARK"}},
        {"xt": {"name": "CT"}},
        {"xt": None},
        {"mangle": {"key": "x", "value": 1}},
        {"mangle": {"key": meta("mark"), "value": 1}},
        {"mangle": {"key": meta("mark"), "value": {"meta": {"key": "mark"}, "more": 1}}},
        {"mangle": {"key": meta("mark"), "value": {"numgen": {"mod": 2}}}},
        {"mangle": {"key": {"ct": {"key": "mark"}}, "value": 1}},
        {"mangle": {"key": {"ct": {"key": "zone"}}, "value": 0}},
        {"mangle": {"key": meta("pkttype"), "value": 0}},
        {"mangle": {"key": payload("ttl"), "value": 1}},
        {"mangle": {"key": payload("daddr"), "value": "10.0.0.1"}},
    ],
)
def test_statement_that_changes_touches(statement: dict[str, Any]) -> None:
    assert touches(statement)
    assert touches({"counter": None}, statement)


@pytest.mark.parametrize(
    "statement",
    [
        *({name: None} for name in ("counter", "log", "limit", "masquerade", "drop", "reject", "accept", "return")),
        *(
            {"xt": {"type": "target", "name": name}}
            for name in ("MASQUERADE", "LOG", "NFLOG", "TCPMSS", "REJECT", "CHECKSUM", "AUDIT", "TRACE", "IDLETIMER")
        ),
        *({"xt": {"type": "target", "name": name}} for name in ("RATEEST", "LED")),
        {"xt": {"type": "match", "name": "DNAT"}},
        *({"mangle": {"key": meta(name), "value": 1}} for name in ("priority", "nftrace", "hour", "day", "time")),
        {"mangle": {"key": meta("mark"), "value": 0}},
        {"mangle": {"key": meta("mark"), "value": meta("mark")}},
        {"mangle": {"key": meta("mark"), "value": {"ct": {"key": "mark"}}}},
        {"mangle": {"key": {"ct": {"key": "mark"}}, "value": meta("mark")}},
        {"mangle": {"key": {"ct": {"key": "mark"}}, "value": 0}},
        {"mangle": {"key": payload("dscp"), "value": 1}},
        {"mangle": {"key": payload("ecn"), "value": 1}},
        {"mangle": {"key": {"tcp option": {"name": "maxseg"}}, "value": 1}},
        "counter",
        None,
    ],
)
def test_statement_that_changes_nothing_is_left(statement: Any) -> None:
    assert not touches(statement)
    assert touches(statement, DNAT)


@pytest.mark.parametrize("verdict", ["accept", "drop", "reject", "jump", "goto", "return"])
def test_nameless_match_of_iptables_has_a_verdict(verdict: str) -> None:
    assert not touches({"xt": None}, {verdict: None})
    assert touches({"xt": None}, {"counter": None})
    assert touches({"xt": None}, verdict)


CALLED = ({"chain": {"name": "d"}}, {"rule": {"chain": "d", "expr": [DNAT]}})
ACCEPTS = ({"chain": {"name": "d"}}, {"rule": {"chain": "d", "expr": [ACCEPT]}})
JUMP = {"jump": {"target": "d"}}


@pytest.mark.parametrize(
    ("expressions", "base", "touched"),
    [
        ([{"xt": {"type": "match", "name": "addrtype"}}, JUMP], NAT, False),
        ([{"xt": {"type": "match", "name": "addrtype"}}, JUMP], FILTER, True),
        ([{"xt": {"type": "target", "name": "addrtype"}}, JUMP], NAT, True),
        ([{"xt": {"type": "match", "name": "comment"}}, JUMP], NAT, True),
        ([{"xt": {"type": "match", "name": "addrtype", "data": {}}}, JUMP], NAT, True),
        ([{"xt": None}, JUMP], NAT, False),
        ([{"xt": None}, JUMP], FILTER, True),
        ([{"xt": None}, {"goto": {"target": "d"}}], NAT, False),
        ([{"jump": {"target": 1}}], NAT, False),
        ([{"jump": "d"}], NAT, False),
        ([{"else": [JUMP]}], NAT, True),
        ([{"else": {"then": JUMP}}], NAT, True),
    ],
)
def test_call_is_followed_unless_for_the_host(expressions: list[Any], base: dict[str, Any], touched: bool) -> None:
    assert touches(*expressions, base=base, more=CALLED) == touched


def test_called_chain_is_named_by_its_caller() -> None:
    assert touches(match(meta("iifname"), "cv-12345678"), JUMP, more=ACCEPTS)
    assert not touches(JUMP, more=ACCEPTS)
    # Both callers, in either order: the chain is walked for each of the two.
    named, other = [match(meta("iifname"), "cv-12345678"), JUMP], [JUMP]
    for rules in ((named, other), (other, named)):
        assert len(host_rules.touching(listing(*rules, base=NAT, more=ACCEPTS), RUN)) == 1
    # A circle of calls ends, and the rules behind it count.
    circle = ({"chain": {"name": "d"}}, {"rule": {"chain": "d", "expr": [{"jump": {"target": "c"}}]}})
    assert host_rules.touching(listing([JUMP], [DNAT], base=NAT, more=circle), RUN)


@pytest.mark.parametrize(
    ("data", "touched"),
    [
        ({"set": [["cv-12345678", JUMP]]}, True),
        ({"set": [["eth9", JUMP]]}, False),
        ({"set": [["eth9", JUMP], ["cv-*", JUMP]]}, True),
        ({"set": [["eth9", {"drop": None}], JUMP]}, True),
        ({"set": [["cv-12345678", "x", JUMP]]}, True),
        ("@m", True),
        ("@other", False),
        ([["cv-12345678", JUMP]], True),
    ],
)
def test_map_leads_by_element(data: Any, touched: bool) -> None:
    sets = (
        {"map": {"name": "m", "elem": [["eth9", {"drop": None}]]}},
        {"element": {"name": "m", "elem": [["cv-12345678", JUMP]]}},
        {"map": {"name": "other"}},
    )
    assert touches({"vmap": {"key": meta("iifname"), "data": data}}, more=(*CALLED, *sets)) == touched
    assert not touches({"vmap": "x"}, more=CALLED)


@pytest.mark.parametrize(
    ("base", "touched"),
    [
        ({**NAT, "hook": "output"}, False),
        ({"type": "filter"}, False),
        ({**NAT, "dev": "cv-12345678"}, True),
        ({**NAT, "dev": ["cv-12345678"]}, True),
        ({**NAT, "dev": "eth0"}, False),
        ({**NAT, "dev": ["eth9"]}, False),
        ({**NAT, "dev": ["eth9", "eth0"]}, False),
        ({**NAT, "dev": []}, False),
        (NAT, False),
    ],
)
def test_chain_of_the_runs_device_names_it(base: dict[str, Any], touched: bool) -> None:
    assert touches(ACCEPT, base=base) == touched


def test_touching_rule_is_told_with_its_place() -> None:
    raw = listing([match(meta("mark"), 0), DNAT], "no list", base=NAT)
    (text,) = host_rules.touching(raw, RUN)
    assert text.startswith('inet t c: [{"match":')
    assert text.endswith('{"dnat":{"addr":"10.8.8.8"}}]')


def test_listing_is_split_by_table() -> None:
    raw = json.dumps(
        {
            "nftables": [
                {"table": {"family": "ip", "name": "a"}},
                {"table": {"family": "ip6", "name": "a"}},
                {"chain": {"family": "ip", "table": "a", "name": "c"}},
                {"chain": {"family": "ip", "table": "b", "name": "a"}},
                {"rule": {"family": "ip", "table": "a", "chain": "c", "expr": []}},
            ]
        }
    ).encode()
    mine, others = (json.loads(part)["nftables"] for part in host_rules.split(raw, "ip", "a"))
    assert [next(iter(one)) for one in mine] == ["table", "chain", "rule"]
    assert [next(iter(one.values()))["family"] for one in others] == ["ip6", "ip"]
