"""Destinations that a gateway forwards: each entry of the kernel's table is counted once, with what is new of it."""

from __future__ import annotations

import ipaddress

from policy.connections import Connection, Ends
from sandbox.kernel.net.conntrack import Counted
from sandbox.network import addresses
from sandbox.network.forwarded import ForwardedFlows
from sandbox.network.reached import TARGETS, Reached


def entry(
    number: int, to: str, port: int, carried: int, *, source: str = "", answers: str = "", protocol: int = 6
) -> Counted:
    source = source or (addresses.AGENT6 if ":" in to else addresses.AGENT4)
    agent, there, back = (ipaddress.ip_address(one).packed for one in (source, to, answers or to))
    sent = Ends(agent, there, 40000 + number, port)
    return Counted(number, Connection(protocol, sent, Ends(back, agent, port, 40000 + number)), carried)


def rows(flows: Reached) -> dict[str, tuple[int, int | None]]:
    return {row.target: (row.connections, row.bytes) for row in flows.rows()}


def test_entries_are_counted_once_and_grow() -> None:
    counts = Reached()
    flows = ForwardedFlows(counts.add)
    flows.look([entry(1, "9.9.9.9", 80, 100), entry(2, "9.9.9.9", 80, 10), entry(3, "2606::1", 53, 7, protocol=17)])
    flows.look([entry(1, "9.9.9.9", 80, 150), entry(4, "9.9.9.9", 443, 5)])
    # The kernel gives a number again, to another connection.
    flows.look([entry(1, "8.8.8.8", 80, 1), entry(4, "9.9.9.9", 443, 5)])
    assert rows(counts) == {
        "9.9.9.9:80/tcp": (2, 160),
        "[2606::1]:53/udp": (1, 7),
        "9.9.9.9:443/tcp": (1, 5),
        "8.8.8.8:80/tcp": (1, 1),
    }


def test_gates_and_others_are_not_counted() -> None:
    counts = Reached()
    ForwardedFlows(counts.add).look([
        entry(1, addresses.GATEWAY4, 53, 9, protocol=17),
        entry(2, "9.9.9.9", 443, 9, answers=addresses.GATEWAY4),  # redirected to the TLS gate, which counts it
        entry(3, "9.9.9.9", 443, 9, source="198.19.0.1"),  # the TLS gate's own
        entry(4, "9.9.9.9", 0, 9, protocol=1),
    ])  # fmt: skip
    assert rows(counts) == {}


def test_crowd_of_destinations_is_bounded() -> None:
    counts = Reached()
    flows = ForwardedFlows(counts.add)
    for turn in range(4):
        flows.look([entry(n, f"9.9.{turn}.{n}", 80, 1) for n in range(250)])
    found = rows(counts)
    assert len(found) == TARGETS + 1
    assert sum(count for count, _ in found.values()) == 1000
