"""Check the closed reading of nft's JSON: any element that is not in its tables is refused, at any place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from policy import errors
from policy.compile.network import gates
from policy.decompile.network import live_nft
from sandbox.network.dns import broker

NAMED = {"family": "inet", "table": "covenant"}
SET = {"set": {**NAMED, "name": "a4", "type": "ipv4_addr", "handle": 1, "flags": ["interval"], "elem": ["10.0.0.1"]}}
ANSWERED = {"elem": {"val": "93.184.216.34", "timeout": 60, "expires": 5}}
NAMES = {
    "set": {**NAMED, "name": "n4", "type": "ipv4_addr", "handle": 2, "size": 1024, "flags": ["timeout"],
            "elem": [ANSWERED]},
}  # fmt: skip
COUNTER = {"counter": {**NAMED, "name": "c", "handle": 3, "packets": 9, "bytes": 99}}
CHAIN = {"chain": {**NAMED, "name": "forward", "handle": 4, "type": "filter", "hook": "forward", "prio": 0,
                   "policy": "drop"}}  # fmt: skip
MATCH = {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": "agent0"}}
RULE = {"rule": {**NAMED, "chain": "forward", "handle": 5, "expr": [MATCH, {"counter": "c"}, {"accept": None}]}}
WHOLE = [{"metainfo": {"version": "1"}}, {"table": {"family": "inet", "name": "covenant", "handle": 1}}]
ITEMS = [*WHOLE, SET, NAMES, COUNTER, CHAIN, RULE]
TEXT = """\
table inet covenant {
	set a4 {
		type ipv4_addr
		flags interval
		elements = { 10.0.0.1 }
	}
	set n4 {
		type ipv4_addr
		flags timeout
		size 1024
	}
	counter c {
	}
	chain forward {
		type filter hook forward priority filter; policy drop;
		iifname "agent0" counter name "c" accept
	}
}
"""


def listing(items: list[Any]) -> bytes:
    return json.dumps({"nftables": items}).encode()


def test_what_is_listed_is_text() -> None:
    assert live_nft.text(listing(ITEMS)).decode() == TEXT


def test_elements_are_put_in_order_and_prefixes_and_ranges_are_spans() -> None:
    elements = ["10.9.0.1", {"range": ["10.2.0.5", "10.2.0.9"]}, {"prefix": {"addr": "10.1.0.0", "len": 16}}]
    text = live_nft.text(listing([*WHOLE, {"set": {**SET["set"], "elem": elements}}])).decode()
    assert "elements = { 10.1.0.0-10.1.255.255, 10.2.0.5-10.2.0.9, 10.9.0.1 }" in text


def test_answer_in_its_last_moment_is_one() -> None:
    last = {"set": {**NAMES["set"], "elem": [{"elem": {"val": "93.184.216.34", "timeout": 60}}]}}
    assert live_nft.text(listing([*WHOLE, last])) == live_nft.text(listing([*WHOLE, NAMES]))


@pytest.mark.parametrize(("listed", "read"), [("tcp", "tcp"), (6, "tcp"), (17, "udp"), (47, "47")])
def test_protocol_has_its_name_where_machine_has_no_table_of_them(listed: int | str, read: str) -> None:
    """nft prints a number if /etc/protocols is missing (a Debian without netbase)."""
    match = {"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": listed}}
    rule = {"rule": {**RULE["rule"], "expr": [match, {"accept": None}]}}
    assert f"meta l4proto {read} accept" in live_nft.text(listing([*WHOLE, CHAIN, rule])).decode()


def _in(index: int, **values: Any) -> Callable[[list[Any]], None]:
    def edit(items: list[Any]) -> None:
        (body,) = items[index].values()
        body.update(values)

    return edit


def _expression(*expressions: Any) -> Callable[[list[Any]], None]:
    return _in(6, expr=list(expressions))


# Listed element -> a word of the refusal.
REFUSED: dict[str, tuple[Callable[[list[Any]], None], str]] = {
    "a key more in a rule": (_in(6, comment="x"), "comment"),
    "a key more in a chain": (_in(5, dev="eth0"), "dev"),
    "a key more in a set": (_in(2, policy="memory"), "policy"),
    "a key more in the table": (lambda items: items[1]["table"].update(flags="dormant"), "flags"),
    "another object": (lambda items: items.append({"flowtable": {**NAMED, "name": "f"}}), "flowtable"),
    "two tables": (lambda items: items.append(items[1]), "not there"),
    "no table": (lambda items: items.pop(1), "not there"),
    "two kinds in one": (lambda items: items.append({"a": {}, "b": {}}), "one kind"),
    "a rule of no chain": (_in(6, chain="other"), "no chain"),
    "a set of ports": (_in(2, type="inet_service"), "inet_service"),
    "an element of another family": (_in(2, elem=["::1"]), "no address of this set"),
    "an element that is none": (_in(2, elem=[{"concat": []}]), "not understood"),
    "a prefix that is none": (_in(2, elem=[{"prefix": {"addr": "10.0.0.1", "len": 8}}]), "no prefix"),
    "a static element with an end": (_in(2, elem=[ANSWERED]), "not understood"),
    "an answer for a year": (
        _in(3, elem=[{"elem": {"val": "93.184.216.34", "timeout": 31536000, "expires": 5}}]), "longer than any",
    ),
    "an answer of which a year is left": (
        _in(3, elem=[{"elem": {"val": "93.184.216.34", "timeout": 60, "expires": 31536000}}]), "longer than any",
    ),
    "an answer for ever": (_in(3, elem=["93.184.216.34"]), "for ever"),
    "an answer that never ends": (
        _in(3, elem=[{"elem": {"val": "93.184.216.34", "timeout": 0, "expires": 0}}]), "never ends",
    ),
    "a private answer": (
        _in(3, elem=[{"elem": {"val": "10.0.0.1", "timeout": 60, "expires": 5}}]), "may lead to",
    ),
    "the metadata service as an answer": (
        _in(3, elem=[{"elem": {"val": "169.254.169.254", "timeout": 60, "expires": 5}}]), "may lead to",
    ),
    "an answer with more": (
        _in(3, elem=[{"elem": {"val": "93.184.216.34", "timeout": 60, "expires": 5, "counter": None}}]), "counter",
    ),
    "another statement": (_expression({"tproxy": {"port": 1}}), "tproxy"),
    "a verdict with more": (_expression({"accept": {"to": "x"}}), "accept"),
    "a match that is none": (_expression({"match": {"op": "!=", **{k: v for k, v in MATCH["match"].items()
                                                                  if k != "op"}}}), "not understood"),
    "a mark": (_expression({"mangle": {"key": {"meta": {"key": "mark"}}, "value": 1}}), "mangle"),
    "an address and not a set": (
        _expression({"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}},
                               "right": "10.0.0.1"}}),
        "not understood",
    ),
    "a limit of another kind": (_expression({"limit": {"rate": 1, "burst": 5, "per": "hour"}}), "limit"),
    "two expressions in one": (_expression({"accept": None, "drop": None}), "not understood"),
    "a name with a line's end": (_in(5, name="forward {\n}"), "name"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_in_tables_is_refused(name: str) -> None:
    edit, says = REFUSED[name]
    items = copy.deepcopy(ITEMS)
    edit(items)
    with pytest.raises(errors.ArtefactError) as caught:
        live_nft.text(listing(items))
    assert says in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"nftables": 1}', b'{"nftables": [1]}', b"\xff", b"[" * 99_999])
def test_what_is_no_listing_is_refused(raw: bytes) -> None:
    with pytest.raises(errors.ArtefactError):
        live_nft.read(raw)


def test_other_tables_are_told_without_what_changes_by_itself() -> None:
    other: dict[str, dict[str, Any]] = {"rule": {"family": "inet", "table": "walls", "chain": "c", "handle": 7,
                      "expr": [{"counter": {"packets": 3, "bytes": 4}}, {"drop": None}]}}  # fmt: skip
    counted = copy.deepcopy(other)
    counted["rule"].update(handle=8)
    counted["rule"]["expr"][0]["counter"]["packets"] = 5
    changed = copy.deepcopy(other)
    changed["rule"]["expr"].pop()
    first = live_nft.read(listing([*ITEMS, other])).others
    assert live_nft.read(listing([*ITEMS, counted])).others == first
    assert live_nft.others(listing([counted])) == first
    assert live_nft.read(listing([*ITEMS, changed])).others != first
    assert live_nft.read(listing(ITEMS)).others == b"[]\n"


def test_longest_answer_is_longest_that_gates_give() -> None:
    """The reader shares no code with the compilers, so it repeats the number."""
    assert gates.TTL_SECONDS[1] + broker.GRACE_SECONDS == live_nft.LONGEST_SECONDS
