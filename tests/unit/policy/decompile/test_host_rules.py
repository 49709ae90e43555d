"""Rules of others on the host: each form that touches a run, beside the same form that does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from policy.decompile import host_rules
from policy.grants.sets import spans
from policy.prove.connections import span

RUN = host_rules.Run("cv-12345678", "eth0", spans.join([span("198.19.0.40")]), spans.join([span("93.184.216.34")]))
# The kernel asks a chain of type nat about one direction alone: from the run to the outside.
NAT = {"type": "nat", "hook": "prerouting", "prio": 0, "policy": "accept"}
DNAT = {"dnat": {"addr": "10.8.8.8"}}
ADDRESS = {"payload": {"protocol": "ip", "field": "daddr"}}
DEVICE = {"meta": {"key": "iifname"}}
TYPE = {"fib": {"result": "type", "flags": ["daddr"]}}
OURS, OTHERS = {"meta": {"key": "mark"}}, {"meta": {"key": "priority"}}


def touching(*rules: list[Any], base: dict[str, Any] = NAT, more: tuple[dict[str, Any], ...] = ()) -> frozenset[str]:
    place = {"family": "ip", "table": "t"}
    items: list[dict[str, Any]] = [{"chain": {**place, "name": "c", **base}}]
    items += [{"rule": {**place, "chain": "c", "expr": one}} for one in rules]
    items += [{kind: {**place, **body}} for one in more for kind, body in one.items()]
    return host_rules.touching(json.dumps({"nftables": items}).encode(), RUN)


def match(left: Any, right: Any, operator: str = "==") -> dict[str, Any]:
    return {"match": {"op": operator, "left": left, "right": right}}


FORMS = {
    "address": ([match(ADDRESS, "93.184.216.34"), DNAT], [match(ADDRESS, "93.184.216.35"), DNAT]),
    "prefix": (
        [match(ADDRESS, {"prefix": {"addr": "93.184.0.0", "len": 16}}), DNAT],
        [match(ADDRESS, {"prefix": {"addr": "93.185.0.0", "len": 16}}), DNAT],
    ),
    "range": (
        [match(ADDRESS, {"range": ["93.184.216.30", "93.184.216.40"]}), DNAT],
        [match(ADDRESS, {"range": ["93.184.216.35", "93.184.216.40"]}), DNAT],
    ),
    "other address": ([match(ADDRESS, "10.0.0.1", "!="), DNAT], [match(ADDRESS, "93.184.216.34", "!="), DNAT]),
    "address not understood": ([match(ADDRESS, {"range": ["x"]}), DNAT], [match(ADDRESS, "10.0.0.1"), DNAT]),
    "set": (
        [match(ADDRESS, {"set": ["10.0.0.1", "93.184.216.34"]}), DNAT],
        [match(ADDRESS, {"set": ["10.0.0.1"]}), DNAT],
    ),
    "element with time": (
        [match(ADDRESS, {"set": [{"elem": {"val": "93.184.216.34", "timeout": 5}}]}), DNAT],
        [match(ADDRESS, {"set": [{"elem": {"val": "10.0.0.1", "timeout": 5}}]}), DNAT],
    ),
    "pair": (
        [match({"concat": [DEVICE, ADDRESS]}, {"concat": ["cv-12345678", "93.184.216.34"]}), DNAT],
        [match({"concat": [DEVICE, ADDRESS]}, {"concat": ["eth9", "93.184.216.34"]}), DNAT],
    ),
    "device": ([match(DEVICE, "cv-12345678"), DNAT], [match(DEVICE, "eth9"), DNAT]),
    "devices by prefix": ([match(DEVICE, "cv-*"), DNAT], [match(DEVICE, "veth*"), DNAT]),
    "other device": ([match(DEVICE, "eth9", "!="), DNAT], [match(DEVICE, "cv-12345678", "!="), DNAT]),
    "without mark": ([match(OURS, 0), DNAT], [match(OURS, 7), DNAT]),
    "type of address": ([match(TYPE, "unicast"), DNAT], [match(TYPE, "local"), DNAT]),
    "accept by name": ([match(DEVICE, "cv-12345678"), {"accept": None}], [{"accept": None}]),
    "accept by address": (
        [match({"payload": {"protocol": "ip", "field": "saddr"}}, "198.19.0.40"), {"accept": None}],
        [match({"payload": {"protocol": "ip", "field": "saddr"}}, "0.0.0.0/0"), {"accept": None}],
    ),
    "mark": ([{"mangle": {"key": OURS, "value": 7}}], [{"mangle": {"key": OURS, "value": 0}}]),
    "mark copied": (
        [{"mangle": {"key": OURS, "value": {"|": [OURS, 1]}}}],
        [{"mangle": {"key": OURS, "value": {"ct": {"key": "mark"}}}}],
    ),
    "field": (
        [{"mangle": {"key": {"payload": {"protocol": "ip", "field": "ttl"}}, "value": 1}}],
        [{"mangle": {"key": {"payload": {"protocol": "ip", "field": "dscp"}}, "value": 1}}],
    ),
    "other key": ([{"mangle": {"key": "?", "value": 1}}], [{"mangle": {"key": OTHERS, "value": 1}}]),
    "option": (
        [{"mangle": {"key": {"meta": {"key": "iif"}}, "value": 1}}],
        [{"mangle": {"key": {"tcp option": {"name": "maxseg"}}, "value": 1}}],
    ),
    "target of iptables": (
        [{"xt": {"type": "target", "name": "DNAT"}}],
        [{"xt": {"type": "match", "name": "comment"}}],
    ),
    "target without name": ([{"xt": None}], [{"xt": None}, {"drop": None}]),
    "type by iptables": (
        [{"xt": {"type": "match", "name": "comment"}}, DNAT],
        [{"xt": {"type": "match", "name": "addrtype"}}, DNAT],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_form_touches_beside_one_that_does_not(form: str) -> None:
    touches, does_not = FORMS[form]
    assert len(touching(touches)) == 1
    assert touching(does_not) == frozenset()
    assert touching(touches, does_not) == touching(does_not, touches) == touching(touches)


@pytest.mark.parametrize(
    ("base", "count"),
    [
        (NAT, 1),
        ({**NAT, "hook": "output"}, 0),
        ({**NAT, "dev": "eth0"}, 1),
        ({**NAT, "dev": ["eth9", "cv-12345678"]}, 1),
        ({**NAT, "dev": "eth9"}, 0),
    ],
)
def test_chain_counts_where_run_passes_it(base: dict[str, Any], count: int) -> None:
    assert len(touching([DNAT], base=base)) == count


@pytest.mark.parametrize("how", ["jump", "goto"])
def test_called_chain_is_followed(how: str) -> None:
    called = ({"chain": {"name": "d"}}, {"rule": {"chain": "d", "expr": [DNAT]}})
    assert len(touching([{how: {"target": "d"}}], more=called)) == 1
    assert touching([match(DEVICE, "eth9"), {how: {"target": "d"}}], more=called) == frozenset()


def test_map_leads_where_its_key_may_match() -> None:
    called = ({"chain": {"name": "d"}}, {"rule": {"chain": "d", "expr": [DNAT]}})
    for device, count in (("cv-12345678", 1), ("*", 1), ("eth9", 0)):
        data = {"set": [[device, {"jump": {"target": "d"}}]]}
        assert len(touching([{"vmap": {"key": DEVICE, "data": data}}], more=called)) == count


def test_named_set_has_its_elements() -> None:
    rule = [match(ADDRESS, "@s"), DNAT]
    for kept, added, count in (([], ["93.184.216.34"], 1), (["93.184.216.34"], [], 1), (["10.0.0.1"], [], 0)):
        sets = ({"set": {"name": "s", "elem": kept}}, {"element": {"name": "s", "elem": added}})
        assert len(touching(rule, more=sets)) == count
