"""Rules of other programs, as the kernel lists them: which of them touch a run, and which say that they do not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.decompile import host_rules
from policy.grants.sets import spans
from policy.prove.connections import span
from sandbox.kernel.net import netns, nft

NFT = Path("/usr/sbin/nft")
OWN = spans.join([span("198.19.0.40"), span("fd00:c0:0:2::28")])
RUN = host_rules.Run("cv-12345678", "eth0", OWN, spans.join([span("93.184.216.34"), (0x0A000000, 0x0AFFFFFF)]))
BASES = {
    "pre": "type nat hook prerouting priority -100",
    "post": "type nat hook postrouting priority 100",
    "raw": "type filter hook prerouting priority -300",
    "pass": "type filter hook forward priority -20",
    "sent": "type filter hook output priority 0",
}
TABLE = """\
flush ruleset
table ip t {{
	map services {{
		type ipv4_addr . inet_proto . inet_service : verdict
	}}
	set some {{
		type ipv4_addr
		flags interval
		elements = {{ 93.184.216.0/24 }}
	}}
	set few {{
		type ipv4_addr
		elements = {{ 8.8.8.8 }}
	}}
	chain aside {{
		meta l4proto tcp dnat to 1.1.1.1:81
	}}
	chain lets {{
		tcp dport 80 accept
	}}
	chain {chain} {{
		{base};
		{rule}
	}}
}}
"""
TOUCHING = (
    ("pre", "ip daddr 93.184.216.34 dnat to 10.8.8.8"),
    ("pre", "tcp dport 80 dnat to 10.8.8.8:81"),
    ("pre", 'iifname "cv-12345678" meta l4proto tcp redirect to :99'),
    ("pre", 'iifname != "docker0" tcp dport 8080 dnat to 172.17.0.2:80'),
    ("pre", "ip daddr { 93.184.216.34, 8.8.8.8 } dnat to 1.1.1.1"),
    ("pre", "ip daddr @some dnat to 1.1.1.1"),
    ("pre", "ip daddr 10.0.0.0/24 dnat to 1.1.1.1"),
    ("pre", "ip daddr 10.0.0.7-10.0.0.9 dnat to 1.1.1.1"),
    ("pre", "ip saddr 198.19.0.0/16 dnat to 1.1.1.1"),
    ("pre", "dnat to ip daddr map { 93.184.216.34 : 1.1.1.1 }"),
    ("pre", "ip daddr . tcp dport vmap { 93.184.216.34 . 80 : goto aside }"),
    ("pre", "ip daddr vmap { 8.8.8.8 : accept, 10.0.0.1 : jump aside }"),
    ("pre", "ip daddr 93.184.216.34 jump aside"),
    ("pre", "fib daddr type unicast dnat to 1.1.1.1"),
    ("post", 'oifname "eth0" snat to 10.77.0.9'),
    ("raw", "meta mark set 0x7"),
    ("raw", "meta mark 0x0 ct mark set 0x7"),
    ("raw", "notrack"),
    ("raw", 'iifname "eth0" notrack'),
    ("raw", "ip daddr set 1.1.1.1"),
    ("raw", "ip saddr 93.184.216.34 ct zone set 7"),
    ("pass", 'iifname "cv-*" accept'),
    ("pass", 'iifname "cv-12345678" counter accept'),
    ("pass", "ip saddr 198.19.0.40 accept"),
    ("pass", 'oifname { "cv-12345678", "eth1" } accept'),
    ("pass", 'iifname "cv-*" jump lets'),
    ("pass", "dup to 1.2.3.4"),
)
OTHERS = (
    ("pre", 'iifname "docker0" dnat to 10.8.8.8'),
    ("pre", 'iifname { "docker0", "br-1" } dnat to 10.8.8.8'),
    ("pre", "ip daddr 8.8.8.8 dnat to 1.1.1.1"),
    ("pre", "ip daddr @few dnat to 1.1.1.1"),
    ("pre", "ip daddr != 0.0.0.0/1 ip daddr 1.1.1.1 dnat to 1.1.1.1"),
    ("pre", "ip saddr != 198.18.0.0/15 dnat to 1.1.1.1"),
    ("pre", "fib daddr type local tcp dport 80 dnat to 1.1.1.1"),
    ("pre", "fib daddr type local jump aside"),
    ("pre", "ip daddr . tcp dport vmap { 8.8.8.8 . 80 : goto aside }"),
    ("pre", "meta mark 0x9 dnat to 1.1.1.1"),
    ("post", 'oifname "eth0" masquerade'),
    ("post", "ip saddr 172.17.0.0/16 snat to 10.77.0.9"),
    ("raw", "meta mark set ct mark"),
    ("raw", "ct mark set meta mark"),
    ("raw", 'iifname "eth1" notrack'),
    ("raw", "ip dscp set cs1"),
    ("raw", "tcp flags syn tcp option maxseg size set 1400"),
    ("raw", "meta priority set 1:1"),
    ("pass", 'iifname "cv-99999999" accept'),
    ("pass", 'iifname "cv-*" drop'),
    ("pass", "ip saddr 198.19.0.41 accept"),
    ("pass", "accept"),
    ("pass", "counter drop"),
    ("pass", 'iifname "cv-12345678" counter'),
    ("sent", "meta mark set 0x7"),
)


@pytest.fixture(scope="module")
def space() -> Iterator[int]:
    (fd,) = netns.make()
    yield fd
    os.close(fd)


def touching(space: int, text: str) -> frozenset[str]:
    def listed() -> bytes:
        nft.apply(NFT, text.encode())
        return nft.listed(NFT, "ruleset")

    _, others = host_rules.split(netns.within(space, listed), "inet", "covenant_uplink")
    return host_rules.touching(others, RUN)


@pytest.mark.parametrize(("chain", "rule"), TOUCHING)
def test_rule_that_touches_run_is_told(space: int, chain: str, rule: str) -> None:
    found = touching(space, TABLE.format(chain=chain, base=BASES[chain], rule=rule))
    assert [text.startswith("ip t ") for text in found] == [True]


@pytest.mark.parametrize(("chain", "rule"), OTHERS)
def test_rule_about_others_is_not_told(space: int, chain: str, rule: str) -> None:
    assert touching(space, TABLE.format(chain=chain, base=BASES[chain], rule=rule)) == frozenset()


def test_rule_of_service_map_is_told_by_its_address(space: int) -> None:
    table = TABLE.format(chain="pre", base=BASES["pre"], rule="ip daddr . meta l4proto . th dport vmap @services")
    element = "add element ip t services {{ {} . tcp . 80 : goto aside }}\n"
    assert touching(space, table + element.format("8.8.8.8")) == frozenset()
    assert len(touching(space, table + element.format("10.0.0.1"))) == 1


def test_rules_keep_their_text_when_counters_move(space: int) -> None:
    rule = TABLE.format(chain="pass", base=BASES["pass"], rule="ip saddr 198.19.0.40 counter packets 1 bytes 0 accept")
    found = touching(space, rule)
    assert len(found) == 1
    assert touching(space, rule.replace("packets 1", "packets 2")) == found


def test_own_table_is_split_from_others(space: int) -> None:
    table = TABLE.replace("ip t {{", "inet covenant_uplink {{").replace("dnat to", "dnat ip to")
    text = table.format(chain="pass", base=BASES["pass"], rule='iifname "cv-*" accept')
    assert touching(space, text) == frozenset()
