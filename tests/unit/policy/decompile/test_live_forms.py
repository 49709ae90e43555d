"""Check each form of nft's JSON, beside the same form with a value of another type in its place.

No output of the kernel may cause an internal error: the reader either accepts or refuses it.
"""

from __future__ import annotations

import copy
import ipaddress
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.compile import bundle
from policy.decompile import live, mounts
from policy.decompile import read as decompile
from policy.decompile.network import live_nft, nft, reach
from policy.grants.sets import addresses
from policy.prove.live import Standing
from tests.proof_kit import Documents
from tests.unit.policy.decompile.network.test_live_nft import ITEMS, NAMED, NAMES, SET, WHOLE, listing
from tests.unit.policy.test_prove_live import RUN, UID, compiled, readout, standings

CHAIN: dict[str, Any] = {"chain": {**NAMED, "name": "c", "handle": 4}}


def _payload(field: str, right: object) -> dict[str, Any]:
    protocol, name = field.split()
    return {"match": {"op": "==", "left": {"payload": {"protocol": protocol, "field": name}}, "right": right}}


def _of(kind: str, key: str, right: object, operator: str = "==") -> dict[str, Any]:
    return {"match": {"op": operator, "left": {kind: {"key": key}}, "right": right}}


def _bytes(**values: Any) -> dict[str, Any]:
    whole = {"rate": 3, "burst": 0, "per": "second", "inv": True, "rate_unit": "bytes", "burst_unit": "bytes"}
    return {"limit": {**whole, **values}}


# An expression -> the text of its rule.
FORMS: list[tuple[Any, str]] = [
    (_payload("ip daddr", "@a4"), "ip daddr @a4"),
    (_payload("ip6 daddr", "@a6"), "ip6 daddr @a6"),
    (_payload("tcp dport", 443), "tcp dport { 443 }"),
    (_payload("tcp dport", {"set": [443, {"range": [8000, 8010]}]}), "tcp dport { 443, 8000-8010 }"),
    (_payload("ip protocol", {"set": ["tcp", "udp"]}), "ip protocol { tcp, udp }"),
    (_of("ct", "state", ["established", "related"], "in"), "ct state established,related"),
    (_of("ct", "state", "new", "in"), "ct state new"),
    (_of("meta", "oifname", "uplink0"), 'oifname "uplink0"'),
    (_of("meta", "skuid", 64998), "meta skuid 64998"),
    (_bytes(), "limit rate over 3 bytes/second"),
    (_bytes(rate_unit="kbytes"), "limit rate over 3072 bytes/second"),
    (_bytes(rate_unit="mbytes"), "limit rate over 3145728 bytes/second"),
    ({"limit": {"rate": 10, "burst": 5, "per": "second"}}, "limit rate 10/second burst 5 packets"),
    ({"reject": {"type": "tcp reset"}}, "reject with tcp reset"),
    ({"reject": {"type": "icmpx", "expr": "port-unreachable"}}, "reject with icmpx port-unreachable"),
    ({"log": {"group": 5, "snaplen": 64}}, "log group 5 snaplen 64"),
    ({"redirect": {"port": 8443}}, "redirect to :8443"),
    ({"goto": {"target": "x"}}, "goto x"),
    ({"jump": {"target": "x"}}, "jump x"),
    *(({word: None}, word) for word in ("accept", "drop", "return")),
]
# Near misses: a value of another type, an extra key, or a value that is not in the tables.
NO_FORMS: list[Any] = [
    *("accept", 1, None, [], {}),
    {"match": {"op": "==", "left": ["payload"], "right": 1}},
    {"match": {"op": "==", "left": [["payload"]], "right": 1}},
    {"match": {"op": "==", "left": {"meta": {"key": "iifname"}, "ct": {"key": "state"}}, "right": "a"}},
    {"match": {"op": "==", "left": {}, "right": "a"}},
    _payload("ip daddr", 1),
    _payload("ip daddr", ["@a4"]),
    _payload("ip daddr", "a4"),
    _payload("tcp dport", None),
    _payload("tcp dport", {"set": 443}),
    _payload("tcp dport", {"set": [[443]]}),
    _payload("tcp dport", {"range": "12"}),
    _payload("tcp dport", {"range": [1, 2, 3]}),
    _payload("tcp dport", {"range": [1]}),
    _payload("tcp dport", {"rang": [1, 2]}),
    {"match": {"op": "==", "left": {"payload": "tcp"}, "right": 1}},
    {"match": {"op": "==", "left": {"meta": "iifname"}, "right": "agent0"}},
    {"match": {"op": "==", "left": "meta", "right": 1}},
    {"match": {"op": ["=="], "left": {"meta": {"key": "iifname"}}, "right": "agent0"}},
    {"match": ["op", "left", "right"]},
    _of("meta", "iifname", ["agent0"]),
    _of("meta", "iifname", {"set": ["agent0"]}),
    _of("meta", "iifname", "agent0", "in"),
    _of("ct", "state", "new", "i"),
    _of("ct", "state", "new"),
    _bytes(rate_unit="gbytes"),
    _bytes(per="minute"),
    _bytes(inv=False),
    _bytes(burst=1),
    _bytes(burst=-1),
    {"limit": {"rate": 10, "burst": 5, "per": "second", "inv": True}},
    {"limit": "10"},
    {"reject": None},
    {"reject": {"type": "icmpx", "expr": "port-unreachable", "more": 1}},
    {"counter": {"packets": 1, "bytes": 1}},
    {"dro": None},
    {"drop": 1},
]


def _rule(expression: Any) -> bytes:
    rule = {"rule": {**NAMED, "chain": "c", "handle": 5, "expr": [expression]}}
    return live_nft.text(listing([*WHOLE, CHAIN, rule]))


@pytest.mark.parametrize(("expression", "says"), FORMS, ids=[says for _, says in FORMS])
def test_every_form_is_its_text(expression: Any, says: str) -> None:
    assert _rule(expression).decode() == f"table inet covenant {{\n\tchain c {{\n\t\t{says}\n\t}}\n}}\n"


@pytest.mark.parametrize("expression", NO_FORMS, ids=str)
def test_what_looks_like_form_and_is_none_is_refused(expression: Any) -> None:
    with pytest.raises(errors.ArtefactError):
        _rule(expression)


def test_chain_on_no_hook_has_its_rules_alone_and_one_on_hook_its_priority() -> None:
    def hooked(prio: int) -> str:
        body = {**CHAIN["chain"], "type": "nat", "hook": "prerouting", "policy": "accept", "prio": prio}
        return live_nft.text(listing([*WHOLE, {"chain": body}])).decode()

    assert live_nft.text(listing([*WHOLE, CHAIN])).decode() == "table inet covenant {\n\tchain c {\n\t}\n}\n"
    assert "hook prerouting priority dstnat; policy accept;" in hooked(-100)
    assert "hook prerouting priority -99; policy accept;" in hooked(-99)
    assert "hook prerouting priority filter; policy accept;" in hooked(0)


def test_addresses_of_both_families_are_sets() -> None:
    found = {"set": {**SET["set"], "name": "a6", "type": "ipv6_addr", "elem": ["2001:db8::1"]}}
    assert "type ipv6_addr" in live_nft.text(listing([*WHOLE, found])).decode()


def test_what_counter_counts_is_read_past_and_must_be_named() -> None:
    counter = {"family": "inet", "table": "covenant", "name": "c", "handle": 3, "packets": 9, "bytes": 99}
    assert "counter c {" in live_nft.text(listing([*WHOLE, {"counter": counter}])).decode()
    assert counter.keys() == live_nft.COUNTER.keys()
    for name in ("packets", "bytes"):
        less = {key: value for key, value in counter.items() if key != name}
        with pytest.raises(errors.ArtefactError):
            live_nft.text(listing([*WHOLE, {"counter": less}]))


@pytest.mark.parametrize(
    "element", [1, None, [], {"range": "12"}, {"range": 5}, {"prefix": "10"}, ["range"], ["prefix"]]
)
def test_element_of_another_type_is_refused(element: Any) -> None:
    with pytest.raises(errors.ArtefactError):
        live_nft.text(listing([*WHOLE, {"set": {**SET["set"], "elem": [element]}}]))


# The longest time that an answer stays, by its timeout and by its remaining time, to the second.
@pytest.mark.parametrize(
    ("held", "stays"),
    [
        ({"timeout": 3610}, True),
        ({"timeout": 3611}, False),
        ({"timeout": 3610, "expires": 3610}, True),
        ({"timeout": 60, "expires": 3611}, False),
        ({"timeout": 1}, True),
        ({"timeout": 1, "expires": 0}, True),
    ],
)
def test_answer_stays_for_as_long_as_gate_may_give_it(held: dict[str, int], stays: bool) -> None:
    found = {"set": {**NAMES["set"], "elem": [{"elem": {"val": "93.184.216.34", **held}}]}}
    if stays:
        live_nft.text(listing([*WHOLE, found]))
        return
    with pytest.raises(errors.ArtefactError, match="longer than any"):
        live_nft.text(listing([*WHOLE, found]))


def _leads(point: int) -> bool:
    kind, address = ("ipv4_addr", ipaddress.IPv4Address(point)) if point < nft.BASE_V6 else (
        "ipv6_addr", ipaddress.IPv6Address(point - nft.BASE_V6)
    )  # fmt: skip
    held = {**NAMES["set"], "type": kind, "elem": [{"elem": {"val": str(address), "timeout": 60}}]}
    try:
        live_nft.text(listing([*WHOLE, {"set": held}]))
    except errors.ArtefactError:
        return False
    return True


@pytest.mark.parametrize("span", addresses.PUBLIC, ids=str)
def test_public_space_has_its_first_and_its_last_address(span: tuple[int, int]) -> None:
    first, last = span
    assert _leads(first)
    assert _leads(last)
    assert first in (0, nft.BASE_V6) or not _leads(first - 1)
    assert last + 1 in (2**32, nft.BASE_V6 + 2**128) or not _leads(last + 1)


def test_self_test_is_what_it_was_asked_to_run_and_otherwise_agent() -> None:
    canary = ("/canary", "a")
    found = structs.replace(
        readout(compiled()),
        config=bundle.instantiate(compiled().artefacts, run_id=RUN, uid=UID, arguments=canary),
        arguments=canary,
    )
    assert standings(found) == {}
    assert standings(structs.replace(found, arguments=("/canary", "b"))) == {"bundle": Standing.UNREADABLE}
    assert standings(structs.replace(found, arguments=())) != {}


def test_flag_of_mount_that_stands_twice_is_not_understood() -> None:
    found = readout(compiled())
    twice = {**found.mounts, "/opt/a": (*found.mounts["/opt/a"], found.mounts["/opt/a"][0])}
    assert standings(structs.replace(found, mounts=twice)) == {"mounts": Standing.UNREADABLE}


def test_rules_of_policy_need_gateway_that_holds_them() -> None:
    with pytest.raises(errors.ArtefactError, match="no gateway"):
        live.layers(compiled("network").artefacts.files, readout(compiled()))["firewall"]()


def test_what_reader_says_names_place_where_there_is_one() -> None:
    assert live.said(errors.ArtefactError("it is not", where="x.json")) == "x.json: it is not"
    assert live.said(errors.ArtefactError("it is not")) == "it is not"


def test_whole_of_other_test_is_read_again_with_each_part_left_out() -> None:
    """Each object of the sample matters: without it the text differs or is refused."""
    whole = live_nft.text(listing(ITEMS))
    for index in range(1, len(ITEMS)):
        items = copy.deepcopy(ITEMS)
        del items[index]
        try:
            assert live_nft.text(listing(items)) != whole
        except errors.ArtefactError:
            continue


@pytest.mark.parametrize("mb", [0, -1, True, "8", None])
def test_room_of_written_path_is_whole_number_from_one_on(mb: Any) -> None:
    falsified = compiled("writes").falsified(lambda d: d["mounts.json"]["rooms"].update({"/srv/data": mb}))
    with pytest.raises(errors.ArtefactError, match="does not bound"):
        decompile.read(falsified.files)


def test_resolver_is_there_exactly_where_names_are_resolved() -> None:
    def taken_away(documents: Documents) -> None:
        plan, config = documents["mounts.json"], documents["config.json"]
        at = [one["destination"] for one in plan["mounts"]].index(mounts.RESOLVER)
        del plan["mounts"][at], config["mounts"][at], plan["root"]["mount_points"][at]
        for index, one in enumerate(config["mounts"]):
            if one["type"] == "bind":  # its number is the place that it is attached to
                one["source"] = f"{one['source'].rpartition('/')[0]}/{index}"

    with pytest.raises(errors.ArtefactError, match="resolver"):
        decompile.read(compiled("network").falsified(taken_away).files)


def test_gateway_without_its_chain_of_refusals_is_refused_and_no_fault() -> None:
    files = dict(compiled("network").artefacts.files)
    files[nft.FIREWALL] = files[nft.FIREWALL].replace(reach.REFUSAL.encode(), b"elsewhere")
    with pytest.raises(errors.ArtefactError, match="does not tell"):
        decompile.read(files)


def test_noexec_of_the_root_alone_is_found() -> None:
    """On the host the flag would keep the agent's own libraries from being mapped; a written path has it there."""
    found = readout(compiled())
    assert "noexec" not in found.mounts["/opt/a"]
    marked = {**found.mounts, "/opt/a": (*found.mounts["/opt/a"], "noexec")}
    with pytest.raises(errors.ArtefactError, match="noexec is not set on the host"):
        live.layers(compiled().artefacts.files, structs.replace(found, mounts=marked))["mounts"]()
    written = readout(compiled("writes"))
    assert "noexec" in written.mounts["/srv/data"]
    live.layers(compiled("writes").artefacts.files, written)["mounts"]()
    with pytest.raises(AttributeError):
        found.image = "x"  # type: ignore[misc]


def test_elements_that_change_are_left_out() -> None:
    held = {"name": "s", "elem": ["10.0.0.1"], "handle": 1}
    assert live_nft.resting({**held, "flags": ["interval"]})["elem"] == ["10.0.0.1"]
    assert "elem" not in live_nft.resting({**held, "flags": ["interval", "timeout"]})
    assert live_nft.resting([{**held, "flags": "timeout"}])[0]["elem"] == ["10.0.0.1"]
