"""Crowds at the DNS gate: many questions at once are answered, by one question to the resolver or in turn."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import dns.message
import dns.rcode
import pytest

from policy.compile.artefacts import Artefacts
from tests.kernel import gated_names, three_namespaces
from tests.kernel.gated_names import Gated
from tests.kernel.gated_zone import ENTRIES, PUBLIC, V6, zone
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
    """One gate with the rate of every run."""
    with gated_names.opened(spaces, artefacts, Resolver(zone())) as made:
        yield made


@pytest.fixture
def gated(shared: Gated) -> Iterator[Gated]:
    """The gate, which must have survived."""
    shared.forget()
    shared.resolver.asked.clear()
    yield shared
    assert shared.error is None


def crowd(gated: Gated, questions: Sequence[tuple[str, str]], *, seconds: float) -> list[dns.message.Message]:
    """Send the questions at once, each from its own socket, and collect the answers of ``seconds``.

    A question without an answer is sent again after five seconds, as libc does.
    """

    def probe() -> list[dns.message.Message]:
        lines: dict[int, tuple[socket.socket, bytes]] = {}
        poll = select.poll()
        for name, kind in questions:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.connect((gated_names.GATEWAY, 53))
            lines[made.fileno()] = made, dns.message.make_query(name, kind).to_wire()
            poll.register(made, select.POLLIN)
        found = []
        until, again = time.monotonic() + seconds, 0.0
        while lines and time.monotonic() < until:
            if time.monotonic() >= again:
                again = time.monotonic() + 5
                for made, wire in lines.values():
                    made.send(wire)
            for fd, _ in poll.poll(200):
                made, _ = lines.pop(fd)
                found.append(dns.message.from_wire(made.recv(4096)))
                poll.unregister(fd)
                made.close()
        for made, _ in lines.values():
            made.close()
        return found

    return gated.spaces.within("agent", probe)


@pytest.mark.parametrize("size", [30, 300])
def test_crowd_behind_one_name_is_one_question(gated: Gated, size: int) -> None:
    name = f"crowd{size}.wide.example"
    gated.resolver.zone[name, "A"], gated.resolver.zone[name, "AAAA"] = [PUBLIC], [V6]
    answers = crowd(gated, [(name, kind) for kind in ("A", "AAAA", "HTTPS")] * size, seconds=20)
    assert len(answers) == 3 * size
    assert {dns.rcode.to_text(one.rcode()) for one in answers} == {"NOERROR"}
    assert sum(bool(one.answer) for one in answers) == 2 * size
    assert sorted(gated.resolver.asked) == [(name, kind, "udp") for kind in ("A", "AAAA", "HTTPS")]
    assert gated.codes() == set()


def test_crowd_of_names_waits_its_turn(gated: Gated) -> None:
    names = [f"turn{index}.wide.example" for index in range(100)]
    for name in names:
        gated.resolver.zone[name, "A"] = [PUBLIC]
    begun = time.monotonic()
    answers = crowd(gated, [(name, "A") for name in names], seconds=20)
    took = time.monotonic() - begun
    assert len(answers) == 100
    assert all(one.answer for one in answers)
    assert {asked[0] for asked in gated.resolver.asked} == set(names)
    # A burst of 40 at most, then 20 a second: the rate to the resolvers is what it was.
    assert took > 2
    assert gated.codes() == set()


def test_answers_are_kept_for_their_time(gated: Gated) -> None:
    gated.resolver.zone["short.wide.example", "A"] = [PUBLIC]
    gated.resolver.ttl = 2
    try:
        assert gated.texts("short.wide.example") == gated.texts("SHORT.wide.example") == [PUBLIC]
        assert len(gated.resolver.asked) == 1
        gated.resolver.zone["short.wide.example", "A"] = ["9.9.9.9"]
        time.sleep(2.1)
        assert gated.texts("short.wide.example") == ["9.9.9.9"]
    finally:
        gated.resolver.ttl = 300
    assert gated.texts("gone.wide.example") == gated.texts("gone.wide.example") == ["NXDOMAIN"]
    assert [one[0] for one in gated.resolver.asked].count("gone.wide.example") == 1


def test_kept_answer_ends_before_its_element(gated: Gated) -> None:
    gated.resolver.zone["old.wide.example", "A"] = ["93.188.0.1"]
    first = gated.ask("old.wide.example").answer[0].ttl
    time.sleep(2.1)
    later = gated.ask("old.wide.example").answer[0].ttl
    assert first == 300
    assert 290 < later < 299
    assert gated.elements("*.wide.example")["93.188.0.1"] >= first


def test_flood_of_names_starves_no_granted_one(gated: Gated) -> None:
    """Names invented below a wildcard wait behind a name that the manifest grants as it is."""
    flood = [(f"flood{index}.wide.example", "A") for index in range(200)]
    asked = gated.resolver.asked
    thread = threading.Thread(target=lambda: crowd(gated, flood, seconds=4))
    thread.start()
    until = time.monotonic() + 60
    # More than the burst of 40: the others wait for turns, 20 a second.
    while len(asked) < 45 and time.monotonic() < until:
        time.sleep(0.01)
    before = len(asked)
    assert gated.texts("deep.example.org") == [PUBLIC]
    turn = [name for name, _, _ in asked].index("deep.example.org")
    # Control: the flood is not over. In order of their arrival the name would come after all of it.
    assert 45 <= before <= turn < len(asked) < 200
    # The turns of 3 seconds: how long the machine needed is not counted.
    assert turn - before < 60
    thread.join(60)


def test_full_queue_is_silent_and_told(gated: Gated) -> None:
    flood = [(f"full{index}.wide.example", "A") for index in range(700)]
    answers = crowd(gated, flood, seconds=2)
    assert len(answers) < 300
    # Nothing was refused: libc would take that for an answer, and a question that is sent again may find a turn.
    assert {dns.rcode.to_text(one.rcode()) for one in answers} <= {"NXDOMAIN"}
    assert any(code == "rate" for _, code in gated.codes())
    # What is known is answered in the middle of it.
    assert gated.texts("deep.example.org") == [PUBLIC]
