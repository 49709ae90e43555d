"""The DNS gate in its real process, in front of real sockets and the real ruleset: what it answers, and what it lets
out.

What is asked from the agent's namespace goes through ordinary sockets here; tests/kernel/test_names_in_a_run.py asks
from inside runsc. Each refusal has its control: the same question about a granted name is answered.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
from collections.abc import Iterator

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import pytest

from policy.compile.artefacts import Artefacts
from tests.kernel import gated_names, three_namespaces
from tests.kernel.gated_names import Gated
from tests.kernel.gated_zone import ENTRIES, INWARDS, MANY, PUBLIC, V6, zone
from tests.kernel.scripted_resolver import Resolver
from tests.kernel.three_namespaces import Namespaces
from tests.unit.policy.compile import sample


@pytest.fixture(scope="module")
def spaces() -> Iterator[Namespaces]:
    with three_namespaces.made() as made:
        gated_names.links(made)
        yield made


@pytest.fixture(scope="module")
def artefacts() -> Artefacts:
    return sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))


@pytest.fixture(scope="module")
def shared(spaces: Namespaces, artefacts: Artefacts) -> Iterator[Gated]:
    """One gate for the tests that leave it as it was; its rate is out of the way."""
    with gated_names.opened(spaces, artefacts, Resolver(zone()), **MANY) as made:
        yield made


@pytest.fixture
def gated(shared: Gated) -> Iterator[Gated]:
    """The gate, which must have survived."""
    shared.forget()
    shared.resolver.asked.clear()
    yield shared
    assert shared.error is None
    assert shared.texts("api.example.com") == [PUBLIC]


def test_granted_names_are_answered_and_nothing_else(gated: Gated) -> None:
    assert gated.texts("api.example.com") == [PUBLIC]
    assert gated.texts("API.Example.COM") == [PUBLIC]
    assert gated.texts("api.example.com", "AAAA") == [V6]
    assert gated.texts("www.example.org") == ["9.9.9.9"]
    assert gated.texts("missing.example.org") == ["NXDOMAIN"]
    assert gated.codes() == set()
    asked = gated.resolver.names()
    for name in ("other.example.com", "example.org", "com", "example.com", "x.api.example.com", "localhost", "1.2.3.4"):
        assert gated.texts(name) == ["NXDOMAIN"], name
        assert (name, "name_not_granted") in gated.codes()
    assert gated.resolver.names() == asked


def test_question_is_given_back_as_it_was_asked(gated: Gated) -> None:
    answer = gated.ask("aPi.exAMPLE.com", use_edns=0, payload=4096)
    assert answer.question[0].name.to_text() == "aPi.exAMPLE.com."
    assert answer.edns == 0
    assert answer.flags & dns.flags.RA
    assert not answer.flags & dns.flags.AA
    assert gated.ask("api.example.com", use_edns=False).edns == -1


def test_connection_right_after_answer_passes(gated: Gated) -> None:
    gated.spaces.run("world", "ip", "route", "replace", "local", "93.187.0.0/24", "dev", "lo")
    with gated.spaces.listen("world", "0.0.0.0", 80) as server:
        for last in range(200):
            address = f"93.187.0.{last}"
            if last < 20:  # the control
                assert gated.connect(address, 80) == "ECONNREFUSED"
            gated.resolver.zone[f"fresh{last}.wide.example", "A"] = [address]
            assert gated.texts(f"fresh{last}.wide.example") == [address]
            assert gated.connect(address, 80) == "connected"
            server.accept()[0].close()
            assert gated.connect(address, 81) == "ECONNREFUSED"


def test_address_is_in_sets_of_every_pattern_that_covers_name(gated: Gated) -> None:
    assert gated.texts("deep.example.org") == [PUBLIC]
    assert PUBLIC in gated.elements("deep.example.org")
    listed = [
        gated.spaces.run("gateway", "nft", "list", "set", "inet", "covenant", s) for s in gated.sets["*.example.org"]
    ]
    assert len([one for one in listed if f"{PUBLIC} timeout" in one]) == 2


def test_other_types_and_classes_reach_no_resolver(gated: Gated) -> None:
    for kind in ("TXT", "NULL", "ANY", "MX", "SRV", "NS", "SOA", "CNAME", "AXFR", "TYPE65280", "SVCB"):
        answer = gated.ask("api.example.com", kind)
        assert (answer.rcode(), answer.answer) == (dns.rcode.NOERROR, []), kind
    assert gated.codes() == {("api.example.com", "type_refused")}
    assert gated.ask("api.example.com", "TXT", rdclass=dns.rdataclass.CH).rcode() == dns.rcode.REFUSED
    assert gated.ask("other.example.com", "TXT").rcode() == dns.rcode.NXDOMAIN
    assert gated.resolver.asked == []


def test_no_answer_leads_inwards(gated: Gated) -> None:
    for kind, listed in INWARDS.items():
        for index in range(len(listed)):
            assert gated.texts(f"in{index}.example.org", kind) == ["NOERROR"], listed[index]
            assert (f"in{index}.example.org", "rebinding") in gated.codes()
    assert gated.texts("inward.example.org") == ["NOERROR"]
    assert gated.texts("mixed.example.org") == [PUBLIC]
    assert {("inward.example.org", "rebinding"), ("mixed.example.org", "rebinding")} <= gated.codes()
    assert set(gated.elements("*.example.org")).isdisjoint({*INWARDS["A"], *INWARDS["AAAA"]})


def test_aliases_are_followed_and_answered_under_name_that_was_asked(gated: Gated) -> None:
    for name in ("alias.example.org", "later.example.org"):
        answer = gated.ask(name)
        assert [(r.name.to_text(), [d.to_text() for d in r]) for r in answer.answer] == [(f"{name}.", [PUBLIC])]
    assert gated.texts("loop.example.org") == ["SERVFAIL"]
    assert gated.codes() == {("loop.example.org", "upstream")}
    # What an alias leads to may not be asked for itself.
    assert gated.texts("b.elsewhere.net") == ["NXDOMAIN"]


def test_https_records_come_without_ech_and_without_what_leads_inwards(gated: Gated) -> None:
    assert sorted(gated.texts("https.example.org", "HTTPS")) == [
        '1 . alpn="h2" ipv4hint="93.184.216.34" ipv6hint="2606:4700::1111"',
        '3 www.example.org. alpn="h3"',
    ]
    assert gated.codes() == {("https.example.org", "rebinding")}
    assert V6 in gated.elements("*.example.org")


@pytest.mark.parametrize(("ttl", "shown"), [(0, 30), (29, 30), (300, 300), (3601, 3600), (2**31 - 1, 3600)])
def test_times_are_held_within_plan(gated: Gated, ttl: int, shown: int) -> None:
    gated.resolver.ttl, name = ttl, f"t{ttl}.wide.example"
    gated.resolver.zone[name, "A"] = [f"93.185.0.{shown % 251}"]
    try:
        assert gated.ask(name).answer[0].ttl == shown
    finally:
        gated.resolver.ttl = 300
    # The element outlives the answer by a little: a connection at its last moment passes.
    assert shown < gated.elements("*.wide.example")[f"93.185.0.{shown % 251}"] <= shown + 60


def test_element_is_prolonged_by_later_answer(gated: Gated) -> None:
    for ttl in (60, 600, 61):
        gated.resolver.zone[f"kept{ttl}.wide.example", "A"] = ["93.186.0.1"]
        gated.resolver.ttl = ttl
        gated.texts(f"kept{ttl}.wide.example")
    gated.resolver.ttl = 300
    assert gated.elements("*.wide.example")["93.186.0.1"] > 600


def test_answers_that_do_not_fit_are_asked_again_over_tcp(gated: Gated) -> None:
    answer = gated.ask("long.example.org", use_edns=False)
    assert answer.flags & dns.flags.TC
    assert answer.answer == []
    query = dns.message.make_query("long.example.org", "A")
    (found,) = gated.tcp(query.to_wire())
    assert len(dns.message.from_wire(found).answer[0]) == 32
    assert ("long.example.org", "A", "tcp") in gated.resolver.asked


def test_tcp_takes_several_questions_connection(gated: Gated) -> None:
    queries = [dns.message.make_query(n, "A") for n in ("api.example.com", "other.example.com", "www.example.org")]
    answers = [dns.message.from_wire(one) for one in gated.tcp(*(query.to_wire() for query in queries))]
    assert [a.rcode() for a in answers] == [dns.rcode.NOERROR, dns.rcode.NXDOMAIN, dns.rcode.NOERROR]
    assert all(query.is_response(answer) for query, answer in zip(queries, answers, strict=True))


def test_connections_that_say_nothing_keep_nobody_out(gated: Gated) -> None:
    def hold() -> list[socket.socket]:
        return [socket.create_connection((gated_names.GATEWAY, 53), timeout=10) for _ in range(40)]

    held = gated.spaces.within("agent", hold)
    try:
        # More than the bound are closed at once, and UDP is answered beside them.
        assert sum(bool(select.select([one], [], [], 0.5)[0]) for one in held[8:]) == 32
        assert gated.texts("api.example.com") == [PUBLIC]
    finally:
        for one in held:
            one.close()
    assert gated.tcp(dns.message.make_query("api.example.com", "A").to_wire())


def _garbage() -> list[bytes]:
    good = dns.message.make_query("api.example.com", "A", use_edns=0).to_wire()
    drawn = random.Random(1)
    header = good[:2] + b"\x01\x00"
    found = [
        b"", b"\0", good[:11], good[:12], good[:-1], good + b"\0",
        header + struct.pack("!HHHH", 2, 0, 0, 0) + good[12:33] * 2,  # two questions
        header + struct.pack("!HHHH", 1, 1, 0, 0) + good[12:],  # an answer in the question
        header + struct.pack("!HHHH", 65535, 65535, 65535, 65535) + good[12:],
        header + struct.pack("!HHHH", 1, 0, 0, 0) + b"\xc0\x0c\x00\x01\x00\x01",  # a name that points to itself
        header + struct.pack("!HHHH", 1, 0, 0, 0) + b"\x3f" + b"a" * 10,
        header + struct.pack("!HHHH", 1, 0, 0, 0) + b"\x41" + b"a" * 80,
        header + struct.pack("!HHHH", 1, 0, 0, 0) + (b"\x3f" + b"a" * 63) * 5 + b"\0\0\1\0\1",  # over 255 bytes
    ]  # fmt: skip
    for _ in range(100):
        bent = bytearray(good)
        for _ in range(drawn.randint(1, 6)):
            bent[drawn.randrange(2, len(bent))] = drawn.randrange(256)
        found.append(bytes(bent))
    return found


def test_garbage_is_refused_and_next_question_answered(gated: Gated) -> None:
    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            for wire in _garbage():
                made.sendto(wire, (gated_names.GATEWAY, 53))

    gated.spaces.within("agent", send)
    assert gated.texts("api.example.com") == [PUBLIC]
    assert {code for _, code in gated.codes()} >= {"malformed"}
    for raw in (b"\0", b"\xff\xff" + b"\0" * 70000, b"\0\0" * 50, os.urandom(2000)):
        gated.tcp(raw=raw)
    assert gated.tcp(dns.message.make_query("api.example.com", "A").to_wire())
    # Nothing but names that are granted, in the types that are answered, came by the resolver.
    assert all(name.endswith(("api.example.com", "example.org", "wide.example")) for name in gated.resolver.names())
    assert {kind for _, kind, _ in gated.resolver.asked} <= {"A", "AAAA", "HTTPS"}


def test_answer_is_no_question(gated: Gated) -> None:
    """Or two gates could answer each other for ever."""
    response = dns.message.make_response(dns.message.make_query("api.example.com", "A"))
    assert gated.udp(response.to_wire(), wait=0.5) is None
    update = bytearray(dns.message.make_query("api.example.com", "A").to_wire())
    update[2] |= 5 << 3
    answer = gated.udp(bytes(update))
    assert answer is not None
    assert dns.message.from_wire(answer, ignore_trailing=True).rcode() == dns.rcode.NOTIMP


def test_only_agent_is_heard(gated: Gated) -> None:
    query = dns.message.make_query("api.example.com", "A").to_wire()

    def ask(source: str, *, wait: float = 1) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.settimeout(wait)
            made.bind((source, 0))
            try:
                made.sendto(query, (gated_names.GATEWAY, 53))
                return bool(made.recv(512))
            except OSError:
                return False

    within = gated.spaces.within
    assert within("agent", lambda: ask(gated_names.AGENT, wait=20))
    assert not within("agent", lambda: ask(three_namespaces.AGENT))
    assert not within("gateway", lambda: ask(gated_names.GATEWAY))
    gated.spaces.run("world", "ip", "route", "replace", "192.0.0.0/29", "via", "10.201.0.1")
    assert not within("world", lambda: ask("10.201.0.2"))


def test_tunnel_finds_no_way_out(gated: Gated) -> None:
    """Data in labels, in types, in options and in flags of a question: the resolver's log holds none of it."""
    secret = "c0ffee" * 10
    for name in (f"{secret}.evil.net", f"{'.'.join([secret] * 4)}.evil.net", f"{secret}.api.example.com"):
        for kind in ("A", "TXT", "NULL"):
            assert gated.texts(name, kind) == ["NXDOMAIN"]
    gated.resolver.zone["told.wide.example", "A"] = [PUBLIC]
    query = dns.message.make_query("told.wide.example", "A", use_edns=0)
    query.use_edns(0, options=[dns.edns.GenericOption(dns.edns.OptionType.NSID, secret.encode())])
    query.flags |= dns.flags.AD | dns.flags.CD
    gated.resolver.seen.clear()
    answer = gated.udp(query.to_wire())
    assert answer is not None
    assert dns.message.from_wire(answer).answer
    assert gated.resolver.names() == {"told.wide.example"}
    asked = dns.message.from_wire(gated.resolver.seen[0])
    assert (asked.options, asked.flags) == ((), dns.flags.RD)
    assert asked.id != query.id
