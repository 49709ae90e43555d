"""Network grants to sets, rules and gates: what is in them, how they are named, and where each comes from."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from policy import data, errors
from policy.compile import plan
from policy.compile.artefacts import Artefacts
from policy.compile.network import destinations, firewall, quoting
from policy.compile.network.destinations import Destinations
from policy.explain import report
from policy.grants.network import Network
from policy.grants.sets import addresses, spans
from policy.manifest.agent import Manifest
from policy.rules import nine
from tests.unit.policy.compile import sample

MIXED = (
    ("api.example.com", "[443]", "tls"),
    ("*.example.org", '[80, "8000-8010"]', "tcp"),
    ("10.0.0.0/8", "[5432]", "tcp"),
    ("192.0.2.7", "[5432]", "tcp"),
    ("2001:db8::/32", "[53]", "udp"),
    ("203.0.113.9", "[443]", "tls"),
)


def full(*entries: tuple[str, str, str], resources: str = "") -> Manifest:
    return sample.manifest(network="full", more=sample.entries(*entries), resources=resources)


def lines(artefacts: Artefacts) -> list[str]:
    return [line.strip() for line in artefacts.files["firewall.nft"].decode().split("\n")]


def chain(artefacts: Artefacts, name: str) -> list[str]:
    every = lines(artefacts)
    start = every.index(f"chain {name} {{") + 1
    return every[start : every.index("}", start)]


def rows(artefacts: Artefacts) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["host"], row["protocol"]): row for row in artefacts.json("network.json")["grants"]}


# --- modes ----------------------------------------------------------------------------------------------


def test_off_has_no_ruleset_no_gate_and_loopback_alone() -> None:
    artefacts = sample.compiled(sample.manifest())
    assert artefacts.files["firewall.nft"] == b""
    assert artefacts.json("gates.json") == {"version": 1, "dns": None, "tls": None}
    network = artefacts.json("network.json")
    assert (network["interfaces"], network["gateway"], network["grants"]) == (["lo"], None, [])
    assert artefacts.json("runtime.json")["flags"]["--network"] == "none"


def test_network_gives_agent_one_interface_and_gvisors_own_stack() -> None:
    artefacts = sample.compiled(full(*MIXED))
    assert artefacts.json("network.json")["interfaces"] == ["eth0", "lo"]
    assert artefacts.json("runtime.json")["flags"]["--network"] == "sandbox"
    wanted = {"agent": "agent0", "uplink": "uplink0", "dns_port": 53, "tls_port": 8443, "gate_uid": 64998}
    assert artefacts.json("network.json")["gateway"] == wanted


@pytest.mark.parametrize(
    ("mode", "protocols", "ports"), [("outbound-https-only", {"tls"}, 443), ("full", {"tcp", "udp"}, 65535)]
)
def test_mode_without_table_is_every_public_address_and_every_name(mode: str, protocols: set[str], ports: int) -> None:
    artefacts = sample.compiled(sample.manifest(network=mode))
    found = rows(artefacts)
    assert set(found) == {(host, p) for host in ("any public address", "*") for p in protocols}
    assert all(row["ports"][0][1] == ports for row in found.values())
    # Every name leads to what every address has anyway: no set of its own, so no element to be added.
    assert all(not row["sets"] and row["counter"] is None for (host, _), row in found.items() if host == "*")
    assert "x4" not in artefacts.files["firewall.nft"].decode()
    assert artefacts.json("gates.json")["dns"]["names"] == [
        {"inward": [], "pattern": "*", "sets": {"v4": [], "v6": []}}
    ]


def test_every_name_with_another_access_than_every_address_has_sets_of_its_own() -> None:
    # No manifest says so; a meet of ceilings may.
    public = Network.without_table("full")
    for names in (Network.without_table("outbound-https-only").names, public.names):
        found = Destinations.of(dataclasses.replace(public, names=names))
        assert all(one.bare is (names == public.names) for one in found.names)
    part = dataclasses.replace(public, reach=public.reach[1:])
    assert not any(one.bare for one in Destinations.of(part).names)


# --- sets and their names -------------------------------------------------------------------------------


def test_addresses_reached_alike_share_one_pair_of_sets() -> None:
    entries = [(f"198.18.{n}.4", "[443]", "tls") for n in range(128)]
    entries += [(f"2001:db8:{n:x}::1", "[443]", "tls") for n in range(1, 129)]
    artefacts = sample.compiled(full(*entries))
    text = lines(artefacts)
    assert sum(line.startswith("set a") for line in text) == 2
    assert len(chain(artefacts, "gate")) == 3
    (elements,) = (line for line in text if line.startswith("elements = { 198.18.0.4,"))
    assert elements.count(",") == 127
    assert len(artefacts.json("network.json")["grants"]) == 256


def test_grants_names_do_not_change_when_others_come_and_go() -> None:
    alone = {entry[0]: rows(sample.compiled(full(entry))) for entry in MIXED}
    together = rows(sample.compiled(full(*MIXED)))
    for found in alone.values():
        for key, row in found.items():
            assert together[key] == row


def test_neighbours_become_one_span_and_it_is_written_as_block_where_it_is_one() -> None:
    artefacts = sample.compiled(
        full(("192.0.2.0", "[80]", "tcp"), ("192.0.2.1", "[80]", "tcp"), ("192.0.2.4", "[80]", "tcp"),
             ("192.0.2.5", "[80]", "tcp"), ("192.0.2.6", "[80]", "tcp"))
    )  # fmt: skip
    assert {host for host, _ in rows(artefacts)} == {"192.0.2.0/31", "192.0.2.4-192.0.2.6"}
    assert "elements = { 192.0.2.0-192.0.2.1, 192.0.2.4-192.0.2.6 }" in lines(artefacts)


def test_one_address_with_three_accesses_is_in_three_groups() -> None:
    found = Destinations.of(
        Network.of(
            [("192.0.2.7", [(80, 80)], "tcp"), ("192.0.2.7", [(443, 443)], "tls"), ("192.0.2.7", [(53, 53)], "udp")]
        )
    )
    assert [(g.protocol, g.ports) for g in found.groups] == [
        ("tcp", ((80, 80),)),
        ("tls", ((443, 443),)),
        ("udp", ((53, 53),)),
    ]


def test_mapped_addresses_are_ipv4() -> None:
    found = Destinations.of(Network.of([("::ffff:192.0.2.7", [(80, 80)], "tcp")]))
    assert [name[:3] for name, _ in found.groups[0].sets] == ["a4_"]


def test_what_no_name_leads_to_is_everything_not_public() -> None:
    for version, low in ((4, 0), (6, 2**33)):
        artefacts = sample.compiled(full(("api.example.com", "[443]", "tls")))
        text = lines(artefacts)
        at = text.index(f"set x{version} {{")
        kind, whole = ("ipv4_addr", 2**32) if version == 4 else ("ipv6_addr", 2**128)
        assert text[at + 1 : at + 3] == [f"type {kind}", "flags interval"]
        rest = spans.minus(((low, low + whole - 1),), addresses.PUBLIC)
        assert text[at + 3] == f"elements = {{ {quoting.elements(rest)} }}"


def test_two_grants_with_one_digest_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Destinations.of(Network.of([("a.example.com", [(1, 1)], "tcp"), ("b.example.com", [(1, 1)], "tcp")]))
    monkeypatch.setattr(quoting, "digest", lambda *parts: "0" * 16)
    with pytest.raises(errors.NotEnforceableError, match="one digest"):
        Destinations.of(Network.of([("a.example.com", [(1, 1)], "tcp"), ("b.example.com", [(1, 1)], "tcp")]))


# --- rules ----------------------------------------------------------------------------------------------


def test_static_addresses_come_first_then_what_no_name_leads_to_then_names() -> None:
    artefacts = sample.compiled(full(*MIXED))
    for name in ("granted", "gate"):
        kinds = [next((m for m in ("@a", "@x", "@n") if m in line), "end") for line in chain(artefacts, name)]
        assert kinds == sorted(kinds, key=["@a", "@x", "@n", "end"].index)
        assert {"@a", "@x", "@n", "end"} == set(kinds)


def test_tls_grants_are_never_forwarded_and_plain_ones_never_redirected() -> None:
    artefacts = sample.compiled(full(*MIXED))
    tls = {name for (_, protocol), row in rows(artefacts).items() if protocol == "tls" for name in row["sets"]}
    plain = {name for (_, protocol), row in rows(artefacts).items() if protocol != "tls" for name in row["sets"]}
    assert not any(name in line for name in tls for line in chain(artefacts, "granted"))
    assert not any(name in line for name in plain for line in chain(artefacts, "gate"))
    redirected = [line for line in chain(artefacts, "prerouting") if "redirect" in line]
    assert {name for name in tls if any(name in line for line in redirected)} == tls
    assert not any(name in line for name in plain for line in redirected)


def test_without_tls_grants_there_is_no_gate_and_without_names_no_dns() -> None:
    artefacts = sample.compiled(full(("192.0.2.7", "[80]", "tcp")))
    text = artefacts.files["firewall.nft"].decode()
    for absent in ("prerouting", "redirect", "8443", "64998", "dport { 53 }", "@x4"):
        assert absent not in text, absent
    assert artefacts.json("gates.json") == {"version": 1, "dns": None, "tls": None}


def test_rate_is_one_bucket_each_way_and_no_higher_than_kernel_takes() -> None:
    for asked, held in ((1_000_000, 1_000_000), (10**12, firewall.MAX_BYTES_PER_SECOND)):
        artefacts = sample.compiled(full(*MIXED, resources=f"net_bps = {asked}"))
        assert artefacts.json("network.json")["net_bps"] == asked
        for name in ("upward", "downward"):
            assert chain(artefacts, name) == [f"limit rate over {held} bytes/second drop"]
        # Before anything is accepted, at every hook that the agent's packets pass.
        assert chain(artefacts, "forward")[1:3] == [
            'iifname "agent0" jump upward',
            'oifname "agent0" jump downward',
        ]
        assert chain(artefacts, "input")[1] == 'iifname "agent0" jump upward'
        assert chain(artefacts, "output")[1] == 'oifname "agent0" jump downward'
    assert "limit rate over" not in sample.compiled(full(*MIXED)).files["firewall.nft"].decode()


def test_what_is_refused_is_told_first_within_rate_and_in_one_place() -> None:
    for grants in (MIXED, (("192.0.2.7", "[80]", "tcp"),)):
        artefacts = sample.compiled(full(*grants))
        told = "limit rate 64/second burst 128 packets log group 27 snaplen 128"
        assert chain(artefacts, "refuse")[0] == told
        assert artefacts.files["firewall.nft"].decode().count(" log ") == 1


def test_gates_know_patterns_ports_and_addresses() -> None:
    gates = sample.compiled(full(*MIXED)).json("gates.json")
    assert [entry["pattern"] for entry in gates["dns"]["names"]] == ["*.example.org", "api.example.com"]
    assert all(len(entry["sets"][v]) == 1 for entry in gates["dns"]["names"] for v in ("v4", "v6"))
    assert gates["tls"]["names"] == [{"pattern": "api.example.com", "ports": [[443, 443]]}]
    assert gates["tls"]["addresses"] == [{"first": "203.0.113.9", "last": "203.0.113.9", "ports": [[443, 443]]}]


# --- causes ---------------------------------------------------------------------------------------------


def test_every_rule_of_network_names_its_line() -> None:
    found = full(*MIXED, resources="net_bps = 5")
    artefacts = sample.compiled(found)
    by_rule = {f"{r.artefact}:{r.rule}": r for r in report.explain(artefacts, where=found.where)}
    where = {host: found.where(f"permissions.network[{i}]") for i, (host, _, _) in enumerate(MIXED)}
    assert len(set(where.values())) == len(MIXED)
    for (host, _), row in rows(artefacts).items():
        assert by_rule[f"network.json:grant/{row['id']}"].where == where[host]
    # A group's set stands for its first address.
    for host in ("api.example.com", "10.0.0.0/8", "203.0.113.9"):
        for name in next(row for (h, _), row in rows(artefacts).items() if h == host)["sets"]:
            assert by_rule[f"firewall.nft:set/{name}"].where == where[host]
    assert by_rule["gates.json:dns/name/*.example.org"].where == where["*.example.org"]
    assert by_rule["gates.json:tls/address/203.0.113.9-203.0.113.9"].where == where["203.0.113.9"]
    assert by_rule["firewall.nft:chain/upward/0"].key == "resources.net_bps"
    assert by_rule["firewall.nft:chain/refuse/0"].kind == "built-in"
    assert by_rule["firewall.nft:chain/refuse/1"].kind == "built-in"


def test_destination_that_manifest_does_not_cover_is_not_compiled() -> None:
    found = full(*MIXED)
    own = nine.requested(found, roles=data.roles())
    for entry in (
        ("evil.example.net", ((443, 443),), "tls"),
        ("api.example.com", ((80, 80),), "tcp"),
        ("api.example.com", ((443, 443),), "tcp"),
        ("11.0.0.1", ((5432, 5432),), "tcp"),
        ("10.0.0.1", ((5433, 5433),), "tcp"),
    ):
        wider = dataclasses.replace(own, network=Network.of([entry]))
        with pytest.raises(errors.UnexplainedError, match="no key of the manifest covers"):
            plan.compile(wider, found, sample.host(), package_digest="d" * 64)
    off = sample.manifest()
    wider = dataclasses.replace(nine.requested(off, roles=data.roles()), network=own.network)
    with pytest.raises(errors.UnexplainedError):
        plan.compile(wider, off, sample.host(), package_digest="d" * 64)
    https = sample.manifest(network="outbound-https-only")
    for more in (Network.without_table("full"), Network.of([("10.0.0.1", ((443, 443),), "tls")])):
        wider = dataclasses.replace(nine.requested(https, roles=data.roles()), network=more)
        with pytest.raises(errors.UnexplainedError):
            plan.compile(wider, https, sample.host(), package_digest="d" * 64)


TAMPERED = {
    "a rule more": (b"\tchain input {\n", b"\tchain input {\n\t\taccept\n\t\taccept\n"),
    "a chain more": (b"\tchain input {\n", b"\tchain extra {\n\t\taccept\n\t}\n\tchain input {\n"),
    "a set that nothing names": (b"\tset x4 {\n", b"\tset a4_0000000000000000 {\n\t}\n\tset x4 {\n"),
    "a line of a set": (b"\t\tflags timeout\n", b"\t\tflags timeout\n\t\tpolicy memory\n"),
    "two tables": (b"table inet covenant {\n", b"table inet other {\n}\ntable inet covenant {\n"),
    "a statement outside": (b"\tset x4 {\n", b'\tinclude "x"\n\tset x4 {\n'),
    "two statements on a line": (b"\t\tgoto refuse\n\t}", b"\t\tgoto refuse \n\t}"),
    "a counter with a value": (b"\tcounter refused_tcp {\n", b"\tcounter refused_tcp {\n\t\tpackets 9\n"),
    "a block without an end": (b"\t}\n}\n", b"}\n"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_ruleset_with_something_more_is_not_explained(case: str) -> None:
    found = full(*MIXED)
    artefacts = sample.compiled(found)
    report.explain(artefacts, where=found.where)
    old, new = TAMPERED[case]
    text = artefacts.files["firewall.nft"]
    assert old in text
    changed = Artefacts({**artefacts.files, "firewall.nft": text.replace(old, new, 1)})
    with pytest.raises(errors.UnexplainedError):
        report.explain(changed, where=found.where)


def test_ruleset_without_network_and_network_without_one_are_not_explained() -> None:
    off, on = sample.compiled(sample.manifest()), sample.compiled(full(*MIXED))
    for one, other in ((off, on), (on, off)):
        swapped = Artefacts({**one.files, "firewall.nft": other.files["firewall.nft"]})
        with pytest.raises(errors.UnexplainedError):
            report.explain(swapped, where=str)


def test_text_of_span() -> None:
    assert destinations.text(0x0A000000, 0x0AFFFFFF) == "10.0.0.0/8"
    assert destinations.text(2**33, 2**33 + 2**128 - 1) == "::/0"
