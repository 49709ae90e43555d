"""The DNS gate with resolvers that know no EDNS, no TCP or no case, that are dead, and that change in a live run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import dns.message
import pytest

from policy.compile.artefacts import Artefacts
from tests.kernel import gated_names, three_namespaces
from tests.kernel.gated_names import RESOLVER
from tests.kernel.gated_zone import ENTRIES, MANY, PUBLIC, zone
from tests.kernel.scripted_resolver import Resolver, serving
from tests.kernel.three_namespaces import Namespaces
from tests.unit.policy.compile import sample

OTHER, DEAD = "203.0.113.5", "198.51.100.9"
Odd = Callable[[dns.message.Message], bytes | None]
NAMES = ("api.example.com", "www.example.org", "deep.example.org")


@pytest.fixture(scope="module")
def spaces() -> Iterator[Namespaces]:
    with three_namespaces.made() as made:
        gated_names.links(made)
        yield made


@pytest.fixture(scope="module")
def artefacts() -> Artefacts:
    return sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))


def _header_alone(response: dns.message.Message) -> bytes:
    """Answer EDNS as some resolvers do: FORMERR, without a question."""
    wire = response.to_wire()
    return wire[:2] + b"\x81\x81" + b"\0" * 8 if response.edns >= 0 else wire


def _silent(response: dns.message.Message) -> bytes | None:
    return None if response.edns >= 0 else response.to_wire()


def _lower(response: dns.message.Message) -> bytes:
    wire = response.to_wire()
    end = wire.index(b"\0", 12)
    return wire[:12] + wire[12:end].lower() + wire[end:]


@pytest.mark.parametrize("odd", [_header_alone, _silent], ids=["formerr", "silent"])
def test_resolver_without_edns_is_asked_without(spaces: Namespaces, artefacts: Artefacts, odd: Odd) -> None:
    made = Resolver(zone(), odd=dict.fromkeys(NAMES, odd))
    with gated_names.opened(spaces, artefacts, made, **MANY) as gated:
        for name, address in zip(NAMES, (PUBLIC, "9.9.9.9", PUBLIC), strict=True):
            assert gated.texts(name) == [address]
        # The gate learns it once: later names are asked without EDNS at the first try.
        assert [one[0] for one in made.asked] == [NAMES[0], *NAMES]
        # Longer answers do not fit then: TCP has them.
        assert len(gated.tcp(dns.message.make_query("long.example.org", "A").to_wire())) == 1
        assert made.asked[-1] == ("long.example.org", "A", "tcp")
        assert gated.codes() == set()


def test_resolver_without_tcp_gives_long_answers(spaces: Namespaces, artefacts: Artefacts) -> None:
    made = Resolver(zone())
    with gated_names.opened(spaces, artefacts, made, streams=False, **MANY) as gated:
        (answer,) = gated.tcp(dns.message.make_query("long.example.org", "A").to_wire())
        assert len(dns.message.from_wire(answer).answer[0]) == 32
        assert {transport for _, _, transport in made.asked} == {"udp"}
        assert gated.codes() == set()


def test_truncated_answer_without_tcp_is_better_than_none(spaces: Namespaces, artefacts: Artefacts) -> None:
    def cut(response: dns.message.Message) -> bytes:
        wire = response.to_wire()
        return wire[:2] + bytes([wire[2] | 2]) + wire[3:]

    made = Resolver(zone(), odd={"api.example.com": cut})
    with gated_names.opened(spaces, artefacts, made, streams=False, **MANY) as gated:
        assert gated.texts("api.example.com") == [PUBLIC]


def test_resolver_without_case_nor_tcp_is_believed(spaces: Namespaces, artefacts: Artefacts) -> None:
    made = Resolver(zone(), odd=dict.fromkeys(NAMES, _lower))
    with gated_names.opened(spaces, artefacts, made, streams=False, **MANY) as gated:
        assert [gated.texts(name) for name in NAMES] == [[PUBLIC], ["9.9.9.9"], [PUBLIC]]
        assert gated.codes() == set()


def test_dead_resolver_costs_one_try(spaces: Namespaces, artefacts: Artefacts) -> None:
    dead = Resolver(zone(), odd=dict.fromkeys(NAMES, lambda _: None))
    with (
        gated_names.opened(spaces, artefacts, Resolver(zone()), resolvers=(OTHER, RESOLVER), **MANY) as gated,
        serving(dead, OTHER, lambda call: spaces.within("world", call)),
    ):
        assert gated.texts(NAMES[0]) == [PUBLIC]
        assert dead.asked == [(NAMES[0], "A", "udp")], "control: it is the first of them"
        assert [gated.texts(name) for name in NAMES[1:]] == [["9.9.9.9"], [PUBLIC]]
        assert dead.asked == [(NAMES[0], "A", "udp")]


def test_resolvers_that_change_are_found(spaces: Namespaces, artefacts: Artefacts) -> None:
    resolvers, other = [DEAD], Resolver(zone())
    with contextlib.ExitStack() as stack:
        gated = stack.enter_context(
            gated_names.opened(spaces, artefacts, Resolver(zone()), resolvers=resolvers, **MANY)
        )
        # Control: the only resolver is dead.
        assert gated.texts("api.example.com") == ["SERVFAIL"]
        resolvers[:] = [RESOLVER]
        assert gated.texts("www.example.org") == ["9.9.9.9"]
        stack.enter_context(serving(other, OTHER, lambda call: spaces.within("world", call)))
        # In the middle of a question: the first of them goes away, and another comes.
        resolvers[:] = [OTHER, DEAD]
        assert gated.texts("deep.example.org") == [PUBLIC]
        assert other.names() == {"deep.example.org"}
        resolvers.clear()
        assert gated.texts("fresh.wide.example") == ["SERVFAIL"]
        resolvers[:] = [RESOLVER]
        assert gated.texts("alias.example.org") == [PUBLIC]
        assert gated.error is None


def test_other_resolvers_have_other_answers(spaces: Namespaces, artefacts: Artefacts) -> None:
    """A network that the machine has left is forgotten with its answers."""
    resolvers, other = [RESOLVER], Resolver({**zone(), ("api.example.com", "A"): ["9.9.9.10"]})
    with contextlib.ExitStack() as stack:
        gated = stack.enter_context(
            gated_names.opened(spaces, artefacts, Resolver(zone()), resolvers=resolvers, **MANY)
        )
        stack.enter_context(serving(other, OTHER, lambda call: spaces.within("world", call)))
        assert gated.texts("api.example.com") == [PUBLIC]
        resolvers[:] = [OTHER]
        assert gated.texts("api.example.com") == [PUBLIC]
        # The gate sees the change with its next question to a resolver.
        assert gated.texts("www.example.org") == ["9.9.9.9"]
        assert gated.texts("api.example.com") == ["9.9.9.10"]
