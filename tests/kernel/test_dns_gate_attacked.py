"""Attacks on the cache, the queue and the resolvers' answers of the DNS gate."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from policy.compile.artefacts import Artefacts
from tests.kernel import gated_names, three_namespaces
from tests.kernel.gated_zone import ENTRIES, MANY, PUBLIC, zone
from tests.kernel.scripted_resolver import Resolver
from tests.kernel.three_namespaces import Namespaces
from tests.unit.policy.compile import sample

EVIL = "93.189.0.66"


@pytest.fixture(scope="module")
def spaces() -> Iterator[Namespaces]:
    with three_namespaces.made() as made:
        gated_names.links(made)
        yield made


@pytest.fixture(scope="module")
def artefacts() -> Artefacts:
    return sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))


def test_answer_of_one_run_is_no_answer_of_the_next(spaces: Namespaces, artefacts: Artefacts) -> None:
    made = Resolver(zone())
    made.zone["api.example.com", "A"] = [EVIL]
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        assert gated.texts("api.example.com") == [EVIL]
    made.zone["api.example.com", "A"] = [PUBLIC]
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        assert gated.texts("api.example.com") == [PUBLIC]
        assert EVIL not in gated.elements("api.example.com")


def test_records_about_other_names_are_not_kept(spaces: Namespaces, artefacts: Artefacts) -> None:
    """Kashpureff's: an answer that brings addresses of other names along, in every section."""

    def along(response: dns.message.Message) -> bytes:
        for section in (response.answer, response.authority, response.additional):
            for name in ("api.example.com.", "deep.example.org.", "x.wide.example."):
                section.append(dns.rrset.from_text_list(name, 3600, "IN", "A", [EVIL]))
        return response.to_wire()

    made = Resolver(zone(), odd={"www.example.org": along})
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        assert gated.texts("www.example.org") == ["9.9.9.9"]
        assert gated.texts("api.example.com") == gated.texts("deep.example.org") == [PUBLIC]
        assert gated.texts("x.wide.example") == ["NXDOMAIN"]
        assert EVIL not in {*gated.elements("api.example.com"), *gated.elements("*.wide.example")}


def test_answer_to_another_question_is_none(spaces: Namespaces, artefacts: Artefacts) -> None:
    def another(response: dns.message.Message) -> bytes:
        asked = dns.message.make_query("deep.example.org", "A")
        asked.id = response.id
        other = dns.message.make_response(asked)
        other.answer.append(dns.rrset.from_text_list("deep.example.org.", 300, "IN", "A", [EVIL]))
        return other.to_wire()

    made = Resolver(zone(), odd={"www.example.org": another}, odd_over=("udp", "tcp"))
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        assert gated.texts("www.example.org") == ["SERVFAIL"]
        assert gated.texts("deep.example.org") == [PUBLIC]
        assert gated.error is None


@pytest.mark.parametrize("ttl", [0, 1 << 31, (1 << 32) - 1])
def test_times_that_are_none_are_not_kept(spaces: Namespaces, artefacts: Artefacts, ttl: int) -> None:
    """RFC 2181, 8: with the highest bit set a TTL is 0. It is kept for a second, and told as the least of the plan."""

    def timed(response: dns.message.Message) -> bytes:
        wire = response.to_wire()
        at = wire.index(struct.pack("!HHI", 1, 1, 300), 16) + 4
        return wire[:at] + struct.pack("!I", ttl) + wire[at + 4 :]

    made = Resolver(zone(), odd={"api.example.com": timed})
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        assert gated.ask("api.example.com").answer[0].ttl == 30
        assert gated.elements("api.example.com")[PUBLIC] == 40
        made.zone["api.example.com", "A"] = ["9.9.9.9"]
        time.sleep(1.1)
        assert gated.texts("api.example.com") == ["9.9.9.9"]


def test_endless_aliases_end(spaces: Namespaces, artefacts: Artefacts) -> None:
    """Each alias leads to one more name, in one answer or in many: a few questions, then a failure."""
    made = Resolver(zone())
    for index in range(12):
        made.zone[f"c{index}.example.org", "CNAME"] = [f"c{index + 1}.example.org."]
        made.zone[f"l{index}.example.org", "CNAME"] = [f"l{index + 1}.example.org."]
        made.zone[f"l{index + 1}.example.org", "LATER"] = ["yes"]
    made.zone["c12.example.org", "A"] = [PUBLIC]
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        # Control: a long chain in one answer is one question.
        assert gated.texts("c0.example.org") == [PUBLIC]
        assert len(made.asked) == 1
        assert gated.texts("l0.example.org") == ["SERVFAIL"]
        assert len(made.asked) <= 5
        assert ("l0.example.org", "upstream") in gated.codes()


def test_failure_is_kept_for_a_moment_only(spaces: Namespaces, artefacts: Artefacts) -> None:
    """A crowd behind a name that fails is one question; the name is asked again as soon as it may work."""

    def fails(response: dns.message.Message) -> bytes:
        response.answer.clear()
        response.set_rcode(dns.rcode.SERVFAIL)
        return response.to_wire()

    made = Resolver(zone(), odd={"api.example.com": fails})
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        assert [gated.texts("api.example.com") for _ in range(5)] == [["SERVFAIL"]] * 5
        assert len(made.asked) == 1
        made.odd.clear()
        time.sleep(1.1)
        assert gated.texts("api.example.com") == [PUBLIC]


def test_more_answers_than_cache_holds_break_nothing(spaces: Namespaces, artefacts: Artefacts) -> None:
    made = Resolver(zone())
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        assert gated.texts("api.example.com") == [PUBLIC]

        def ask() -> int:
            seen = 0
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
                line.settimeout(10)
                line.connect((gated_names.GATEWAY, 53))
                for index in range(1100):
                    line.send(dns.message.make_query(f"{'x' * 50}{index}.wide.example", "A").to_wire())
                    with contextlib.suppress(TimeoutError):
                        seen += bool(line.recv(512))
            return seen

        assert gated.spaces.within("agent", ask) == 1100
        made.asked.clear()
        # The oldest of them made room, and is asked for again.
        assert gated.texts("api.example.com") == [PUBLIC]
        assert made.asked == [("api.example.com", "A", "udp")]
        assert gated.error is None


def test_dead_name_starves_no_other(spaces: Namespaces, artefacts: Artefacts) -> None:
    """Names whose servers never answer hold their places for seconds; other names are answered meanwhile."""
    dead = [f"dead{index}.wide.example" for index in range(30)]
    made = Resolver(zone(), odd=dict.fromkeys(dead, lambda _: None), odd_over=("udp", "tcp"))
    with gated_names.opened(spaces, artefacts, made) as gated:

        def probe() -> list[tuple[str, str]]:
            # One socket keeps the order in which the gate answered.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
                line.settimeout(60)
                line.connect((gated_names.GATEWAY, 53))
                for name in [*dead, "deep.example.org"]:
                    line.send(dns.message.make_query(name, "A").to_wire())
                answers = [dns.message.from_wire(line.recv(4096)) for _ in range(len(dead) + 1)]
            return [
                (one.question[0].name.to_text(omit_final_dot=True), dns.rcode.to_text(one.rcode())) for one in answers
            ]

        first, *later = gated.spaces.within("agent", probe)
        assert first == ("deep.example.org", "NOERROR")
        # Control: the resolver was asked for all dead names before it.
        assert [name for name, _, _ in made.asked].index("deep.example.org") == len(dead)
        assert sorted(later) == sorted((name, "SERVFAIL") for name in dead)
