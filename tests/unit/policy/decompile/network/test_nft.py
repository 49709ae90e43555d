"""Reading a table of nft rules: what is understood, and that everything else is refused with its line."""

from __future__ import annotations

import pytest

from policy import errors
from policy.decompile.network import nft
from policy.decompile.network.nft import ReadRule, RuleVerdict
from policy.grants.sets import addresses

SET = "\tset a4_x {\n\t\ttype ipv4_addr\n\t\tflags interval\n\t\telements = { 10.0.0.0-10.0.0.9, 10.0.0.11 }\n\t}\n"
DYNAMIC = "\tset n6_x {\n\t\ttype ipv6_addr\n\t\tflags timeout\n\t\tsize 1024\n\t}\n"
COUNTER = "\tcounter c_x {\n\t}\n"


def table(*parts: str) -> bytes:
    return (f"{nft.TABLE}\n" + "".join(parts) + "}\n").encode()


def chain(*rules: str, name: str = "some") -> str:
    return f"\tchain {name} {{\n" + "".join(f"\t\t{one}\n" for one in rules) + "\t}\n"


def base(name: str = "forward", kind: str = "filter", priority: str = "filter", policy: str = "drop") -> str:
    return chain(f"type {kind} hook {name} priority {priority}; policy {policy};", name=name)


def test_table_is_its_sets_chains_and_counters() -> None:
    found = nft.parse(
        table(SET, DYNAMIC, COUNTER, base(), base("prerouting", "nat", "dstnat", "accept"), chain("drop"))
    )
    low = addresses.parse("10.0.0.0")
    assert low is not None
    assert found.sets["a4_x"] == nft.ReadSet("a4_x", 4, False, ((low[0], low[0] + 9), (low[0] + 11, low[0] + 11)))
    assert found.sets["n6_x"] == nft.ReadSet("n6_x", 6, True, ())
    assert found.counters == {"c_x"}
    assert found.chains["forward"] == nft.ReadChain("forward", (), "drop")
    assert found.chains["prerouting"].policy == "accept"
    assert found.chains["some"] == nft.ReadChain("some", (ReadRule(21, RuleVerdict("drop")),))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("accept", ReadRule(1, RuleVerdict("accept"))),
        ("drop", ReadRule(1, RuleVerdict("drop"))),
        ("return", ReadRule(1, RuleVerdict("return"))),
        ("goto more", ReadRule(1, RuleVerdict("goto", "more"))),
        ("jump more", ReadRule(1, RuleVerdict("jump", "more"))),
        ("redirect to :8443", ReadRule(1, RuleVerdict("redirect", port=8443))),
        ("reject with icmpx port-unreachable", ReadRule(1, RuleVerdict("drop"))),
        ("reject with tcp reset", ReadRule(1, RuleVerdict("drop"), protocol="tcp")),
        ('iifname "agent0" oifname "uplink0" drop', ReadRule(1, RuleVerdict("drop"), iif="agent0", oif="uplink0")),
        ("ip daddr @a4_x drop", ReadRule(1, RuleVerdict("drop"), family=4, addresses="a4_x")),
        ("ip6 daddr @a6_x drop", ReadRule(1, RuleVerdict("drop"), family=6, addresses="a6_x")),
        ("tcp dport { 80, 90-99 } drop", ReadRule(1, RuleVerdict("drop"), protocol="tcp", ports=((80, 80), (90, 99)))),
        ("udp dport { 80, 81 } drop", ReadRule(1, RuleVerdict("drop"), protocol="udp", ports=((80, 81),))),
        ("meta l4proto udp udp dport { 0 } drop", ReadRule(1, RuleVerdict("drop"), protocol="udp", ports=((0, 0),))),
        (
            "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept",
            ReadRule(1, RuleVerdict("accept"), protocol=nft.NEIGHBOUR),
        ),
        ("ct state established,related accept", ReadRule(1, RuleVerdict("accept"), established=True)),
        ("ct status dnat accept", ReadRule(1, RuleVerdict("accept"), dnat=True)),
        ("meta skuid 64998 accept", ReadRule(1, RuleVerdict("accept"), uid=64998)),
        ("limit rate over 9 bytes/second drop", ReadRule(1, RuleVerdict("drop"), limit=9)),
        ('counter name "c_x" drop', ReadRule(1, RuleVerdict("drop"), counter="c_x")),
        (nft.LOG, ReadRule(1, RuleVerdict("log"))),
    ],
)
def test_rule_is_its_matches_and_verdict(text: str, rule: ReadRule) -> None:
    assert nft.rule(text, 1) == rule


@pytest.mark.parametrize(
    "text",
    [
        "", "accept ", " accept", "accept drop", "accept;", "ACCEPT", "queue", "log accept",
        "log", "log group 27 snaplen 128", f"{nft.LOG} drop", f"ct status dnat {nft.LOG}",
        "limit rate 64/second burst 128 packets log group 28 snaplen 128",
        "limit rate 65/second burst 128 packets log group 27 snaplen 128", "continue", "masquerade",
        "goto", "goto 1x", "jump a b", "redirect to :0", "redirect to :65536", "redirect to :08443", "redirect",
        "reject", "reject with icmp port-unreachable", "meta l4proto udp reject with tcp reset", "dnat to 1.2.3.4",
        "iif agent0 drop", "iifname agent0 drop", 'iifname "agent*" drop', 'iifname != "agent0" drop',
        'iifname "agent0" iifname "agent0" drop', "ip saddr @a4_x drop", "ip daddr 1.2.3.4 drop",
        "ip daddr @a4_x ip6 daddr @a6_x drop", "ip daddr != @a4_x drop", "tcp dport 80 drop", "tcp dport { } drop",
        "tcp dport { 80,81 } drop", "tcp dport { 81, 80 } drop", "tcp dport { 80, 80 } drop",
        "tcp dport { 80-80 } drop",
        "tcp dport { 90-80 } drop", "tcp dport { 080 } drop", "tcp dport { 65536 } drop", "tcp dport { 1-99999 } drop",
        "tcp dport { 80-90, 85 } drop", "tcp dport { 80 } udp dport { 80 } drop",
        "meta l4proto udp tcp dport { 80 } drop",
        "tcp sport { 80 } drop", "meta l4proto icmp drop", "ct state new accept", "ct state established accept",
        "ct status snat accept", "meta skuid root accept", "meta skuid 4294967295 accept", "meta mark 1 accept",
        "icmpv6 type { nd-neighbor-solicit } accept", "limit rate 9 bytes/second drop",
        "limit rate over 0 bytes/second drop", "limit rate over 9 packets/second drop",
        "limit rate over 9 bytes/second accept", "limit rate over 9 bytes/second burst 9 bytes drop",
        "limit rate over 9 bytes/second meta l4proto tcp drop", 'counter name "c_x"', "counter drop",
        'counter name "C_X" drop', 'counter name "c_x" meta l4proto tcp drop', "\u0661",
    ],
)  # fmt: skip
def test_any_other_rule_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(errors.ArtefactError) as found:
        nft.rule(text, 7)
    assert found.value.where == "firewall.nft:7"


HEAD = f"{nft.TABLE}\n"


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"", 1),
        (b"table inet covenant {", 1),
        (b"table ip covenant {\n}\n", 1),
        (b"table inet covenant {\n", 1),
        (table() + b"\n", 3),
        (table() + table(), 3),
        (b"flush ruleset\n" + table(), 1),
        (table("\n"), 2),
        (table("  set a4_x {\n"), 2),
        (table("\tset A {\n"), 2),
        (table("\tmap m {\n\t}\n"), 2),
        (table("\tset a4_x {\n\t\ttype inet_service\n"), 3),
        (table("\tset a4_x {\n\t\ttype ipv4_addr\n\t\tflags constant\n"), 4),
        (table(SET.replace("\t\telements", "\t\tauto-merge\n\t\telements")), 5),
        (table("\tset a4_x {\n\t\ttype ipv4_addr\n\t\tflags interval\n\t}\n"), 5),
        (table(SET.replace("elements = { 10.0.0.0-10.0.0.9, 10.0.0.11 }", "elements = {  }")), 5),
        (table(SET.replace("10.0.0.11", "10.0.0.9")), 5),
        (table(SET.replace("10.0.0.11", "10.0.0.5-10.0.0.12")), 5),
        (table(SET.replace("10.0.0.11", "10.0.0.12-10.0.0.11")), 5),
        (table(SET.replace("10.0.0.11", "10.0.0.11-10.0.0.11")), 5),
        (table(SET.replace("10.0.0.11", "10.0.0.011")), 5),
        (table(SET.replace("10.0.0.11", "10.0.1.0/24")), 5),
        (table(SET.replace("10.0.0.11", "2001:db8::")), 5),
        (table(SET.replace("10.0.0.11", "example.com")), 5),
        (table(SET.replace("\t}\n", "\t\tcounter\n\t}\n")), 6),
        (table(DYNAMIC.replace("1024", "65535")), 5),
        (table(DYNAMIC.replace("\t\tsize 1024\n", "")), 5),
        (table(DYNAMIC.replace("\t}\n", "\t\telements = { 2001:db8:: }\n\t}\n")), 6),
        (table(SET, SET), 7),
        (table(COUNTER, COUNTER), 4),
        (table("\tcounter c_x {\n\t\tpackets 1 bytes 1\n\t}\n"), 3),
        (table(base(), base()), 5),
        (table(chain(name="forward")), 3),
        (table(base("forward", priority="raw")), 3),
        (table(base("forward", kind="route")), 3),
        (table(base("input").replace("chain input", "chain output")), 3),
        (table(base(policy="queue")), 3),
        (table(chain("type filter hook forward priority filter; policy drop;")), 3),
        (table("\tchain some {\n\taccept\n\t}\n"), 3),
        (table("\tchain some {\n\t\t\taccept\n\t}\n"), 3),
        (table(chain("jump there")), 3),
        (table(base(), chain("jump forward")), 6),
        (table(chain("ip daddr @a4_x accept")), 3),
        (table(SET, chain("ip6 daddr @a4_x accept")), 8),
        (table(DYNAMIC, chain("ip daddr @n6_x accept")), 8),
        (table(chain('counter name "c_x" accept')), 3),
        (table(chain("accept  # no comment")), 3),
        (HEAD.encode() + b"\xc3\xa9\n}\n", 1),
        (HEAD.encode() + b"\n" * (nft.MAX_LINES + 1), 1),
        (b"x" * (nft.MAX_BYTES + 1), 1),
    ],
)
def test_any_other_text_is_refused_with_its_line(raw: bytes, line: int) -> None:
    with pytest.raises(errors.ArtefactError) as found:
        nft.parse(raw)
    assert found.value.where == f"firewall.nft:{line}"


def test_what_is_refused_is_shown_without_its_control_characters() -> None:
    with pytest.raises(errors.ArtefactError) as found:
        nft.rule("\x1b[31m`" + "x" * 200, 1)
    assert found.value.message.isprintable()
    assert found.value.message.count("`") == 2
    assert len(found.value.message) < 120


def forward_rule(rule: str) -> nft.Table:
    dynamic = "\tset n4_x {\n\t\ttype ipv4_addr\n\t\tflags timeout\n\t\tsize 1024\n\t}\n"
    head = "type filter hook forward priority filter; policy drop;"
    return nft.parse(table(dynamic, chain(head, rule, name="forward")))


@pytest.mark.parametrize(
    ("rule", "reads"),
    [
        ('oifname "a" accept', True),
        ('oifname "a23456789012345" accept', True),
        ('oifname "a234567890123456" accept', False),
        ('iifname "a" accept', True),
        ('iifname "a23456789012345" accept', True),
        ('iifname "a234567890123456" accept', False),
        ("limit rate over 1 bytes/second drop", True),
        ("limit rate over 999999999999999 bytes/second drop", True),
        ("limit rate over 9999999999999999 bytes/second drop", False),
        ("ip daddr @a accept", False),
        ("ip daddr @n4_x accept", True),
    ],
)
def test_words_of_a_rule_have_bounded_length(rule: str, reads: bool) -> None:
    if reads:
        assert len(forward_rule(rule).chains["forward"].rules) == 1
        return
    with pytest.raises(errors.ArtefactError):
        forward_rule(rule)
