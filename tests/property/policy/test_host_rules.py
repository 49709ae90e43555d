"""Rules of others on the host, as any program may write them: judged without an error, and never missed by a match."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policy.decompile import host_rules
from policy.grants.sets import spans
from policy.prove.connections import span

RUN = host_rules.Run(
    "cv-12345678", "eth0", spans.join([span("198.19.0.40")]), spans.join([span("93.184.216.34"), (10 << 24, 11 << 24)])
)
WORDS = st.sampled_from(
    ["match", "left", "right", "op", "==", "!=", "in", "meta", "key", "iifname", "oifname", "mark", "payload", "saddr",
     "daddr", "protocol", "field", "ip", "ip6", "set", "elem", "val", "prefix", "addr", "len", "range", "concat", "fib",
     "result", "flags", "type", "local", "vmap", "data", "jump", "goto", "target", "c", "mangle", "value", "ct", "xt",
     "name", "dnat", "accept", "@s", "*", "cv-*", "eth0", "10.0.0.1", "198.19.0.40", "tcp option"]
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 300) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)
BASE = {"family": "ip", "table": "t", "name": "c", "type": "filter", "hook": "forward", "prio": 0, "policy": "accept"}


def touching(*rules: Any, elements: Any = ()) -> frozenset[str]:
    items = [{"chain": BASE}, {"set": {"family": "ip", "table": "t", "name": "s", "elem": elements}}]
    items += [{"rule": {"family": "ip", "table": "t", "chain": "c", "expr": one}} for one in rules]
    return host_rules.touching(json.dumps({"nftables": items}).encode(), RUN)


@given(st.lists(ANYTHING, max_size=4), ANYTHING)
def test_rule_of_any_shape_is_judged(expressions: list[Any], elements: Any) -> None:
    touching(expressions, elements=elements)


@given(st.lists(ANYTHING.map(lambda one: {"match": {"op": "==", "left": {"never": "seen"}, "right": one}}), max_size=3))
def test_match_of_no_known_kind_excludes_nothing(matches: list[Any]) -> None:
    assert touching([*matches, {"dnat": {"addr": "10.8.8.8"}}])


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_rule_of_network_touches_if_grants_are_in_it(address: Any, length: int) -> None:
    right = {"prefix": {"addr": str(address), "len": length}}
    left = {"payload": {"protocol": "ip", "field": "daddr"}}
    base = (int(address) >> (32 - length)) << (32 - length)
    inside = spans.meet(((base, base + (1 << (32 - length)) - 1),), RUN.reach)
    # The other direction, whose destination is the host's own address, cannot be excluded here.
    items = [{"chain": {**BASE, "type": "nat", "hook": "prerouting"}}]
    items += [{"rule": {"family": "ip", "table": "t", "chain": "c", "expr": [
        {"match": {"op": "==", "left": left, "right": right}}, {"dnat": {"addr": "10.8.8.8"}}]}}]  # fmt: skip
    found = host_rules.touching(json.dumps({"nftables": items}).encode(), RUN)
    assert bool(found) == bool(inside)
