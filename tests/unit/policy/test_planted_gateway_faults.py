"""Faults that a compiler of gateways could have, planted into its rules, gates and index alike: each is found."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from policy import errors
from tests import proof_kit
from tests.proof_kit import Case, Documents

Fault = Callable[[Documents], None]


@functools.cache
def compiled(name: str) -> Case:
    return proof_kit.CASES[name]()


def grant(d: Documents, host: str) -> Any:
    (found,) = (g for g in d["network.json"]["grants"] if g["host"] == host)
    return found


def sets(d: Documents, host: str) -> list[str]:
    return list(grant(d, host)["sets"])


def gate_name(d: Documents, gate: str, pattern: str) -> Any:
    (found,) = (n for n in d["gates.json"][gate]["names"] if n["pattern"] == pattern)
    return found


def lines(d: Documents, pattern: str, new: str = "", *, at_least: int = 1) -> None:
    """Write ``new`` for every line of the rules that matches, or take it out."""
    text = d.text
    found = re.findall(rf"(?m)^\t+{pattern}\n", text)
    assert len(found) >= at_least, pattern
    d.text = re.sub(rf"(?m)^(\t+){pattern}\n", rf"\1{new}\n" if new else "", text)


def chain(d: Documents, name: str, edit: Callable[[str], str]) -> None:
    """Edit the text of one chain."""
    head, mark, rest = d.text.partition(f"\tchain {name} {{\n")
    assert mark, name
    body, end, rest = rest.partition("\t}\n")
    changed = edit(body)
    assert changed != body, name
    d.text = head + mark + changed + end + rest


def removed(pattern: str) -> Callable[[str], str]:
    return lambda body: re.sub(rf"(?m)^\t\t{pattern}\n", "", body)


def first(line: str) -> Callable[[str], str]:
    """A rule before all others of its chain, after the line of a base chain's policy."""

    def edit(body: str) -> str:
        head = re.match(r"\t\ttype [^\n]*\n", body)
        at = head.end() if head else 0
        return f"{body[:at]}\t\t{line}\n{body[at:]}"

    return edit


def before_the_last(line: str) -> Callable[[str], str]:
    def edit(body: str) -> str:
        head, mark, end = body.rstrip("\n").rpartition("\n")
        return f"{head}{mark}\t\t{line}\n{end}\n"

    return edit


def last(line: str) -> Callable[[str], str]:
    return lambda body: f"{body}\t\t{line}\n"


# --- faults of several places -----


def without_guard(family: str) -> Fault:
    def plant(d: Documents) -> None:
        for name in ("granted", "plain"):
            chain(d, name, removed(rf"{family} daddr @x. .*"))

    return plant


def twice_the_rate(d: Documents) -> None:
    d.nft("125000 bytes", "250000 bytes")
    d["network.json"]["net_bps"] = 250000


def a_port_more(d: Documents) -> None:
    d.nft("{ 5432 }", "{ 5433 }")
    grant(d, "10.0.0.0/8")["ports"] = [[5433, 5433]]


def an_address_more(d: Documents) -> None:
    (name,) = sets(d, "10.0.0.0/8")
    d.nft("elements = { 10.0.0.0-10.255.255.255 }", "elements = { 10.0.0.0-11.0.0.0 }", count=1)
    assert name in d.text
    grant(d, "10.0.0.0/8")["host"] = "10.0.0.0-11.0.0.0"


def an_address_less(d: Documents) -> None:
    d.nft("elements = { 10.0.0.0-10.255.255.255 }", "elements = { 10.0.0.1-10.255.255.255 }", count=1)
    grant(d, "10.0.0.0/8")["host"] = "10.0.0.1-10.255.255.255"


def another_protocol(d: Documents) -> None:
    d.nft("tcp dport { 5432 }", "udp dport { 5432 }")
    grant(d, "10.0.0.0/8")["protocol"] = "udp"


def a_wider_wildcard(d: Documents) -> None:
    gate_name(d, "dns", "*.example.org")["pattern"] = "*.org"
    grant(d, "*.example.org")["host"] = "*.org"


def an_exact_name_for_a_wildcard(d: Documents) -> None:
    gate_name(d, "dns", "*.example.org")["pattern"] = "www.example.org"
    grant(d, "*.example.org")["host"] = "www.example.org"


def tls_turned_tcp(d: Documents) -> None:
    v4, _ = sets(d, "api.example.com")
    hexes = v4.removeprefix("n4_")
    for family, name in (("ip", f"n4_{hexes}"), ("ip6", f"n6_{hexes}")):
        match = f"{family} daddr @{name} tcp dport {{ 443 }}"
        lines(d, rf'{re.escape(match)} counter name "c_{hexes}" accept')
        lines(d, rf'iifname "agent0" {re.escape(match)} redirect to :8443')
        chain(d, "plain", last(f"{match} accept"))
        chain(d, "granted", before_the_last(f"{match} accept"))
    drop(d["gates.json"]["tls"]["names"], pattern="api.example.com")
    grant(d, "api.example.com")["protocol"] = "tcp"


def drop(entries: list[Any], **where: Any) -> None:
    (at,) = (i for i, one in enumerate(entries) if all(one[k] == v for k, v in where.items()))
    del entries[at]


def a_name_fills_anothers_sets(d: Documents) -> None:
    one, other = gate_name(d, "dns", "*.example.org"), gate_name(d, "dns", "api.example.com")
    one["sets"], other["sets"] = other["sets"], one["sets"]


def a_name_fills_anothers_sets_too(d: Documents) -> None:
    one, other = gate_name(d, "dns", "*.example.org"), gate_name(d, "dns", "api.example.com")
    for family in ("v4", "v6"):
        one["sets"][family] = [*one["sets"][family], *other["sets"][family]]


def a_name_more(d: Documents) -> None:
    entry = {"pattern": "evil.example.net", "sets": gate_name(d, "dns", "*.example.org")["sets"]}
    d["gates.json"]["dns"]["names"].append(entry)


def every_name_is_resolved(d: Documents) -> None:
    d["gates.json"]["dns"]["names"].insert(0, {"pattern": "*", "sets": {"v4": [], "v6": []}})


def a_name_less(d: Documents) -> None:
    drop(d["gates.json"]["dns"]["names"], pattern="*.example.org")


def a_hello_more(d: Documents) -> None:
    d["gates.json"]["tls"]["names"].append({"pattern": "evil.example.net", "ports": [[443, 443]]})


def a_port_more_for_a_hello(d: Documents) -> None:
    gate_name(d, "tls", "api.example.com")["ports"] = [[443, 444]]


def no_hello_for_a_name(d: Documents) -> None:
    d["gates.json"]["tls"]["names"] = []


def any_hello_for_an_address(d: Documents) -> None:
    d["gates.json"]["tls"]["addresses"].insert(0, {"first": "1.1.1.1", "last": "1.1.1.1", "ports": [[443, 443]]})


def no_hello_for_an_address(d: Documents) -> None:
    drop(d["gates.json"]["tls"]["addresses"], first="203.0.113.9")


def an_address_more_for_a_hello(d: Documents) -> None:
    for one in d["gates.json"]["tls"]["addresses"]:
        if one["first"] == "8.8.4.0":
            one["last"] = "8.8.5.0"


def an_index_without_a_grant(d: Documents) -> None:
    drop(d["network.json"]["grants"], host="10.0.0.0/8")


def an_index_of_more(d: Documents) -> None:
    grant(d, "10.0.0.0/8")["ports"] = [[5432, 5433]]


ESTABLISHED = "ct state established,related accept"
LOG = "limit rate 64/second burst 128 packets log group 27 snaplen 128"


def told_elsewhere(d: Documents) -> None:
    chain(d, "refuse", removed("limit rate 64.*"))
    chain(d, "granted", first(LOG))


# (case, fault) by what was done wrong.
FAULTS: dict[str, tuple[str, Fault]] = {
    "a port that is one more": ("network", a_port_more),
    "an address at the end of a block": ("network", an_address_more),
    "no first address of a block": ("network", an_address_less),
    "udp for tcp": ("network", another_protocol),
    "a wider wildcard": ("network", a_wider_wildcard),
    "a name for a wildcard": ("network", an_exact_name_for_a_wildcard),
    "tls is forwarded": ("network", tls_turned_tcp),
    "port 0": ("full", lambda d: d.nft("{ 1-65535 }", "{ 0-65535 }")),
    "no last port": ("full", lambda d: d.nft("{ 1-65535 }", "{ 1-65534 }")),
    "a public address is missing": ("full", lambda d: d.nft("11.0.0.0-100.63.255.255", "11.0.0.1-100.63.255.255")),
    "a private address is public": ("full", lambda d: d.nft("100.128.0.0-126.255.255.255", "100.128.0.0-127.0.0.0")),
    "a cloud's metadata address is public": (
        "https",
        lambda d: d.nft("128.0.0.0-168.63.129.15, 168.63.129.17-169.253.255.255", "128.0.0.0-169.253.255.255"),
    ),
    "an element more": (
        "network",
        lambda d: d.nft("elements = { 203.0.113.9 }", "elements = { 203.0.113.8-203.0.113.9 }"),
    ),
    "a rule for no set": (
        "network",
        lambda d: chain(d, "granted", first("tcp dport { 443 } accept")),
    ),
    "all of one address": (
        "network",
        lambda d: lines(d, r"(ip daddr @a4_\w+) tcp dport \{ 5432 \} (counter .*)", r"\2 \3"),
    ),
    "ipv6 is forgotten": ("network", lambda d: chain(d, "granted", removed(r"ip6 daddr @n6_\w+ .*"))),
    "ipv6 is forgotten at the gate": ("network", lambda d: chain(d, "gate", removed(r"ip6 daddr @n6_\w+ .*"))),
    # --- order and ends
    "forward accepts what is left": (
        "network",
        lambda d: d.nft("hook forward priority filter; policy drop", "hook forward priority filter; policy accept"),
    ),
    "input accepts what is left": (
        "network",
        lambda d: d.nft("hook input priority filter; policy drop", "hook input priority filter; policy accept"),
    ),
    "output accepts what is left": (
        "network",
        lambda d: d.nft("hook output priority filter; policy drop", "hook output priority filter; policy accept"),
    ),
    "prerouting drops what is left": (
        "network",
        lambda d: d.nft("priority dstnat; policy accept", "priority dstnat; policy drop"),
    ),
    "another hook": ("network", lambda d: d.nft("filter hook forward", "filter hook input", count=1)),
    "another priority": (
        "network",
        lambda d: d.nft("hook forward priority filter", "hook forward priority raw", count=1),
    ),
    "no forward chain": ("network", lambda d: d.nft("\tchain forward {", "\tchain forwards {")),
    "no refusal and an open end": (
        "network",
        lambda d: chain(d, "granted", lambda body: body.replace("goto refuse\n", "accept\n")),
    ),
    "refusal accepts": ("network", lambda d: chain(d, "refuse", lambda body: body.replace("drop", "accept"))),
    "a refusal of tcp is an accept": (
        "network",
        lambda d: chain(d, "refuse", lambda body: body.replace("reject with tcp reset", "accept")),
    ),
    "all states are established": ("network", lambda d: lines(d, ESTABLISHED, "accept")),
    "answers are dropped": ("network", lambda d: chain(d, "forward", removed(ESTABLISHED))),
    "answers of the gate are dropped": ("network", lambda d: chain(d, "output", removed(ESTABLISHED))),
    "any device behind the agent": (
        "network",
        lambda d: d.nft('iifname "agent0" oifname "uplink0" jump', 'iifname "agent0" jump'),
    ),
    "from the uplink as well": (
        "network",
        lambda d: chain(d, "forward", first('iifname "uplink0" oifname "agent0" tcp dport { 22 } accept')),
    ),
    # --- names and private addresses
    "names lead to private addresses": ("network", without_guard("ip")),
    "names lead to private addresses by IPv6": ("network", without_guard("ip6")),
    "the gate goes to private addresses": ("network", lambda d: chain(d, "gate", removed(r"ip daddr @x4 .*"))),
    "prerouting sends private addresses to the gate": (
        "network",
        lambda d: chain(d, "prerouting", removed(r'iifname "agent0" ip daddr @x4 .*')),
    ),
    "a private block is no longer private": ("network", lambda d: d.nft("169.254.0.0-169.254.255.255, ", "")),
    "a public block is private": (
        "network",
        lambda d: d.nft("169.254.0.0-169.254.255.255, ", "169.254.0.0-169.255.255.255, "),
    ),
    "names before the private addresses": (
        "network",
        lambda d: chain(
            d, "granted", lambda body: "".join(sorted(body.splitlines(keepends=True), key=lambda x: "@x" in x))
        ),
    ),
    # --- the gates
    "a redirect is missing": ("network", lambda d: lines(d, r'iifname "agent0" ip daddr @n4_\w+ .* redirect to :8443')),
    "redirects to another port": ("network", lambda d: d.nft("redirect to :8443", "redirect to :8444")),
    "redirects to the resolver": ("network", lambda d: d.nft("redirect to :8443", "redirect to :53")),
    "every port to the gate": (
        "network",
        lambda d: lines(
            d, r'(iifname "agent0" ip daddr @n4_\w+) tcp dport .* (redirect to :8443)', r"\2 meta l4proto tcp \3"
        ),
    ),
    "the gate goes to every port": (
        "network",
        lambda d: chain(d, "gate", lambda b: b.replace("{ 443 }", "{ 443-444 }")),
    ),
    "the gate goes anywhere": ("network", lambda d: chain(d, "gate", first("meta l4proto tcp accept"))),
    "anybody goes where the gate goes": ("network", lambda d: d.nft("meta skuid 64998 jump gate", "jump gate")),
    "root goes where the gate goes": ("network", lambda d: d.nft("meta skuid 64998", "meta skuid 0")),
    "the gate goes to other devices": ("network", lambda d: d.nft('oifname "uplink0" meta skuid', "meta skuid")),
    "the gate uses udp": (
        "network",
        lambda d: chain(d, "output", first('oifname "uplink0" meta skuid 64998 udp dport { 443 } accept')),
    ),
    "the gate calls the agent": (
        "network",
        lambda d: chain(d, "output", first('oifname "agent0" meta skuid 64998 tcp dport { 80 } accept')),
    ),
    "the gate's port without a redirect": (
        "network",
        lambda d: d.nft("tcp dport { 8443 } ct status dnat", "tcp dport { 8443 }"),
    ),
    "the gate's port is closed": ("network", lambda d: lines(d, r'iifname "agent0" tcp dport \{ 8443 \} .*')),
    "a port of the gateway": ("network", lambda d: d.nft("udp dport { 53 } accept", "udp dport { 53, 123 } accept")),
    "the gateway's ssh": ("network", lambda d: chain(d, "input", first('iifname "agent0" tcp dport { 22 } accept'))),
    "the gateway from the uplink": (
        "network",
        lambda d: chain(d, "input", first('iifname "uplink0" tcp dport { 22 } accept')),
    ),
    "pings": ("network", lambda d: chain(d, "forward", first('iifname "agent0" oifname "uplink0" accept'))),
    "the resolver is closed": ("network", lambda d: lines(d, r'iifname "agent0" udp dport \{ 53 \} accept')),
    "a name fills another's sets": ("network", a_name_fills_anothers_sets),
    "a name fills another's sets too": ("network", a_name_fills_anothers_sets_too),
    "a name more": ("network", a_name_more),
    "every name is resolved": ("network", every_name_is_resolved),
    "a name less": ("network", a_name_less),
    "a hello more": ("network", a_hello_more),
    "a port more for a hello": ("network", a_port_more_for_a_hello),
    "no hello for a name": ("network", no_hello_for_a_name),
    "any hello for an address that a name may lead to": ("network", any_hello_for_an_address),
    "no hello for an address": ("network", no_hello_for_an_address),
    "an address more for a hello": ("network", an_address_more_for_a_hello),
    "another type of question": ("network", lambda d: d["gates.json"]["dns"]["types"].append("TXT")),
    "more questions": ("network", lambda d: d["gates.json"]["dns"].update(queries_per_second=2000)),
    "longer names": ("network", lambda d: d["gates.json"]["dns"].update(name_bytes=65535)),
    "answers for ever": ("network", lambda d: d["gates.json"]["dns"].update(ttl_seconds=[30, 10**9])),
    "another port for the resolver": ("network", lambda d: d["gates.json"]["dns"].update(listen=5353)),
    "no tls gate": ("network", lambda d: d["gates.json"].update(tls=None)),
    "no resolver": ("network", lambda d: d["gates.json"].update(dns=None)),
    # --- rates
    "twice the rate": ("rest", lambda d: d.nft("125000 bytes/second", "250000 bytes/second")),
    "twice the rate, and told so": ("rest", twice_the_rate),
    "a rate after what was accepted": (
        "rest",
        lambda d: chain(
            d,
            "forward",
            lambda b: removed(r'oifname "agent0" jump downward')(b) + '\t\toifname "agent0" jump downward\n',
        ),
    ),
    "no rate towards the agent": ("rest", lambda d: chain(d, "forward", removed(r'oifname "agent0" jump downward'))),
    "no rate at the gate": ("rest", lambda d: chain(d, "input", removed(r'iifname "agent0" jump upward'))),
    "a rate of its own at the gate": (
        "rest",
        lambda d: chain(d, "input", lambda b: b.replace("jump upward", "limit rate over 125000 bytes/second drop")),
    ),
    "one rate for both directions": ("rest", lambda d: d.nft("jump downward", "jump upward")),
    "what is over the rate is accepted": ("rest", lambda d: d.nft("bytes/second drop", "bytes/second accept")),
    "a rate for tcp alone": (
        "rest",
        lambda d: chain(d, "upward", lambda b: b.replace("limit", "meta l4proto tcp limit")),
    ),
    "no rate": ("rest", lambda d: lines(d, r"limit rate over .*")),
    "a rate that was not granted": (
        "network",
        lambda d: chain(d, "forward", first("limit rate over 9 bytes/second drop")),
    ),
    "a rate that is not told": ("rest", lambda d: d["network.json"].update(net_bps=None)),
    # --- what is told
    "refusals are not told": ("network", lambda d: chain(d, "refuse", removed("limit rate 64.*"))),
    "refusals are told after some were refused": (
        "network",
        lambda d: chain(d, "refuse", lambda b: "".join(b.splitlines(keepends=True)[i] for i in (1, 0, 2, 3))),
    ),
    "refusals are told twice": ("network", lambda d: chain(d, "refuse", first(LOG))),
    "what is granted is told as refused": ("network", lambda d: chain(d, "granted", first(LOG))),
    "what is granted is told as refused, and refusals are not": ("network", told_elsewhere),
    "refusals are told without a bound": ("network", lambda d: d.nft("limit rate 64/second burst 128 packets ", "")),
    "refusals are told to another group": ("network", lambda d: d.nft("log group 27", "log group 28")),
    "an index without a grant": ("network", an_index_without_a_grant),
    "an index of more": ("network", an_index_of_more),
    "another mode": ("network", lambda d: d["network.json"].update(mode="outbound-https-only")),
    "no network": ("network", lambda d: d["network.json"].update(mode="off")),
    "another gateway": ("network", lambda d: d["network.json"]["gateway"].update(gate_uid=0)),
    "an interface more": ("network", lambda d: d["network.json"]["interfaces"].append("eth1")),
    "rules for no network": ("much", lambda d: setattr(d, "text", "table inet covenant {\n}\n")),
    "gates for no network": (
        "much",
        lambda d: d["gates.json"].update(tls={"addresses": [], "listen": 8443, "names": []}),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    case, plant = FAULTS[name]
    made = compiled(case)
    made.prove()
    with pytest.raises((errors.ProofError, errors.ArtefactError)):
        made.prove(made.falsified(plant))


# What is another text and no other reach: the proof must not be a comparison of texts.
SAME: dict[str, Fault] = {
    "a drop for a reject": lambda d: chain(d, "refuse", lambda b: b.replace("reject with tcp reset", "drop")),
    "the policy refuses what a rule refused": lambda d: chain(d, "forward", removed('iifname "agent0" goto refuse')),
    "a goto for a jump that ends": lambda d: d.nft("jump granted", "goto granted"),
    "two rules for one set": lambda d: lines(
        d,
        r"(ip daddr @n4_\w+) tcp dport \{ 80, 8000-8010 \} (.*)",
        r"\2 tcp dport { 80 } \3\n\1\2 tcp dport { 8000-8010 } \3",
    ),
    "a rule that is never reached": lambda d: chain(d, "refuse", lambda b: f"{b}\t\taccept\n"),
    "a set in two parts": lambda d: d.nft(
        "10.0.0.0-10.255.255.255 }", "10.0.0.0-10.9.255.255, 10.10.0.0-10.255.255.255 }", count=1
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_another_text_of_same_reach_is_proved(name: str) -> None:
    made = compiled("network")
    artefacts = made.falsified(SAME[name])
    assert artefacts.files["firewall.nft"] != made.artefacts.files["firewall.nft"]
    made.prove(artefacts)
