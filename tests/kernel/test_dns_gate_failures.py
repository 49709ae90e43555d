"""The DNS gate under failures and floods: a resolver, a set, the agent's own questions, the gate."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import dns.message
import dns.rcode
import pytest

from policy import errors
from policy.compile.artefacts import Artefacts
from policy.grants.sets import addresses
from sandbox.network.dns import names as dns_names
from tests.kernel import gated_names, three_namespaces
from tests.kernel.gated_zone import ENTRIES, MANY, PUBLIC, zone
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


def test_resolvers_that_fail_are_passed_over(spaces: Namespaces, artefacts: Artefacts) -> None:
    made = Resolver(zone())

    def lower(response: dns.message.Message) -> bytes:
        wire = response.to_wire()
        return wire[:12] + wire[12:29].lower() + wire[29:]

    made.odd = {
        "api.example.com": lower,  # does not keep the case: asked over TCP
        "www.example.org": lambda r: (r.to_wire()[0] ^ 1).to_bytes(1, "big") + r.to_wire()[1:],  # another id
        "deep.example.org": lambda _: b"\0",
        "mixed.example.org": lambda r: dns.message.make_response(_query(r)).to_wire()[:3] + b"\x82" + r.to_wire()[4:],
    }
    # 198.51.100.9 is no host; the second is there and refuses everything; the third is the scripted one.
    resolvers = ("198.51.100.9", "203.0.113.5", gated_names.RESOLVER)
    with gated_names.opened(spaces, artefacts, made, resolvers=resolvers, **MANY) as gated:
        assert gated.texts("alias.example.org") == [PUBLIC]
        assert gated.texts("api.example.com") == [PUBLIC]
        assert ("api.example.com", "A", "tcp") in made.asked
        for name in ("www.example.org", "deep.example.org", "mixed.example.org"):
            assert gated.texts(name) == ["SERVFAIL"], name
            assert (name, "upstream") in gated.codes()
        assert gated.texts("alias.example.org") == [PUBLIC]
        assert gated.error is None


def _query(response: dns.message.Message) -> dns.message.Message:
    """The question that a response answers."""
    question = response.question[0]
    query = dns.message.make_query(question.name, question.rdtype)
    query.id = response.id
    return query


def test_bent_answers_break_nothing_and_lead_nowhere_else(spaces: Namespaces, artefacts: Artefacts) -> None:
    """With any bytes from a resolver, an answer of the gate is whole.

    Its addresses are public and in the sets.
    """
    drawn = random.Random(7)

    def bent(response: dns.message.Message) -> bytes:
        wire = bytearray(response.to_wire())
        for _ in range(drawn.randint(1, 4)):
            wire[drawn.randrange(2, len(wire))] = drawn.choice((0, 1, 4, 10, 127, 192, 255, drawn.randrange(256)))
        return bytes(wire[: drawn.choice((len(wire), len(wire), drawn.randrange(len(wire))))])

    made = Resolver(zone(), odd_over=("udp", "tcp"))
    kinds = {"www": "A", "alias": "A", "https": "HTTPS", "mixed": "A"}
    asked = [(f"{name}{turn}.example.org", name, kind) for turn in range(50) for name, kind in kinds.items()]
    for name, like, _ in asked:  # a name for each turn: an answer that is kept is not asked for again
        made.zone.update({(name, k): v for (n, k), v in zone().items() if n == f"{like}.example.org"})
    made.odd = dict.fromkeys((name for name, _, _ in asked), bent)
    public = dns_names.Public(addresses.PUBLIC)
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        answered: set[str] = set()
        for name, _, kind in asked:
            for rrset in gated.ask(name, kind).answer:
                for rdata in rrset:
                    hints = getattr(rdata, "params", {})
                    assert 5 not in hints
                    answered.update(found := [rdata.address] if kind == "A" else _hints(hints))
                    assert all(ipaddress.ip_address(one).packed in public for one in found), (name, rdata)
        assert gated.error is None
        assert len(answered) > 3
        assert answered <= set(gated.elements("*.example.org"))
        assert gated.texts("api.example.com") == [PUBLIC]


def _hints(params: Mapping[int, Any]) -> list[str]:
    return [address for key in (4, 6) if key in params for address in params[key].addresses]


def test_full_set_is_failure_told(spaces: Namespaces, artefacts: Artefacts) -> None:
    with gated_names.opened(spaces, artefacts, Resolver(zone()), **MANY) as gated:
        answers = [gated.texts(f"n{index}.wide.example") for index in range(40)]
        served = [one for one in answers if one != ["SERVFAIL"]]
        assert len(served) == 34
        assert ("n34.wide.example", "set_full") in gated.codes()
        # Other names are not affected.
        assert gated.texts("api.example.com") == [PUBLIC]


def test_flood_is_held_to_rate(spaces: Namespaces, artefacts: Artefacts) -> None:
    with gated_names.opened(spaces, artefacts, Resolver(zone())) as gated:
        queries = [dns.message.make_query(f"f{n}.wide.example", "A").to_wire() for n in range(3000)]

        def flood() -> set[int]:
            seen: set[int] = set()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
                made.settimeout(30)
                made.connect((gated_names.GATEWAY, 53))
                for query in queries:
                    made.send(query)
                with contextlib.suppress(TimeoutError):
                    while True:
                        seen.add(dns.message.from_wire(made.recv(512)).rcode())
                        made.settimeout(0.2)  # the first comes when the gate has its turn
            return seen

        # What has no turn is not answered: libc asks again.
        assert gated.spaces.within("agent", flood) == {dns.rcode.NXDOMAIN}
        assert "rate" in {code for _, code in gated.codes()}
        # A burst of 40, and 20 a second for as long as it took.
        assert len(gated.resolver.asked) < 400
        assert len(gated.denied) < 1000
        for _ in range(100):
            if gated.texts("api.example.com") == [PUBLIC]:
                break
            gated.ended.wait(0.1)
        else:
            pytest.fail("the gate does not answer again after a flood")
        assert gated.error is None


def test_killed_gate_closes_network_and_ends_run(spaces: Namespaces, artefacts: Artefacts) -> None:
    with gated_names.opened(spaces, artefacts, Resolver(zone()), **MANY) as gated:
        assert gated.texts("api.example.com") == [PUBLIC]
        signal.pidfd_send_signal(gated.gate.process.pidfd, signal.SIGKILL)
        assert gated.ended.wait(30)
        assert isinstance(gated.error, errors.GateError)
        # The kernel answers some datagrams a second, for all of the machine; the others bring nothing.
        assert any(_is_refused(gated) for _ in range(30))


def _is_refused(gated: gated_names.Gated) -> bool:
    try:
        found = gated.udp(dns.message.make_query("api.example.com", "A").to_wire(), wait=1)
    except ConnectionRefusedError:
        return True
    assert found is None, "a gate that was killed answers"
    return False


def test_names_of_services_are_asked_nowhere(spaces: Namespaces) -> None:
    """Where every name is granted, one below `covenant` still stays in the run."""
    everything = sample.compiled(sample.manifest(network="full"))
    with gated_names.opened(spaces, everything, Resolver(zone()), **MANY) as gated:
        for name in ("models.covenant", "data.in.a.name.covenant", "covenant"):
            assert gated.ask(name).rcode() == dns.rcode.NXDOMAIN
        assert gated.resolver.asked == []
        assert gated.texts("api.example.com") == [PUBLIC]
