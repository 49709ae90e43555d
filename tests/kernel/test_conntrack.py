"""Connections that are forgotten by their source: all at once where the kernel can, one by one on every other."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from policy.connections import Connection
from sandbox.kernel.net import conntrack
from sandbox.kernel.net import netns as spaces
from tests.kernel.internet import Internet
from tests.kernel.open_gateway import Opened
from tests.unit.policy.compile import sample

ENTRIES = (("93.184.216.34", "[80]", "tcp"),)


@pytest.mark.parametrize("filters", [True, False])
def test_every_connection_of_one_source_is_forgotten_and_no_other(
    net: Internet, monkeypatch: pytest.MonkeyPatch, filters: bool
) -> None:
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    if not filters:
        # What a kernel without the filter answers: it looks for a connection that has no more than a source.
        real = conntrack._deleted
        monkeypatch.setattr(
            conntrack,
            "_deleted",
            lambda made, at, which: which != conntrack._by_source(at) and real(made, at, which),
        )
    with Opened(net, artefacts) as one, Opened(net, artefacts) as other, contextlib.ExitStack() as stack:
        places = [opened.gateway.place.ipv4 for opened in (one, other)]

        def connect() -> None:
            for _ in range(40):
                stack.enter_context(socket.create_connection(("93.184.216.34", 80), timeout=10))

        for opened in (one, other):
            spaces.within(opened.gateway.spaces.agent, connect)
        assert [_remembered(net, place) for place in places] == [40, 40]
        net.within("host", lambda: conntrack.forget(places[0]))
        assert [_remembered(net, place) for place in places] == [0, 40]


def _remembered(net: Internet, place: str) -> int:
    lines = net.within("host", lambda: Path("/proc/thread-self/net/nf_conntrack").read_text()).splitlines()
    return len([line for line in lines if f"src={place} " in line])


def test_text_and_netlink_list_same_connections(net: Internet) -> None:
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    with Opened(net, artefacts) as one, contextlib.ExitStack() as stack:

        def connect() -> None:
            for _ in range(60):
                stack.enter_context(socket.create_connection(("93.184.216.34", 80), timeout=10))

        spaces.within(one.gateway.spaces.agent, connect)

        def both() -> tuple[set[Connection], set[Connection], int]:
            return set(conntrack.connections()), set(conntrack.dumped()), conntrack.count()

        by_text, by_netlink, count = spaces.within(one.gateway.spaces.gateway, both)
        assert by_text == by_netlink
        assert count == len(by_text) == 60


def test_text_that_misses_entry_is_not_believed(net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    with (
        Opened(net, artefacts) as one,
        contextlib.closing(
            spaces.within(one.gateway.spaces.agent, lambda: socket.create_connection(("93.184.216.34", 80), timeout=10))
        ),
    ):
        monkeypatch.setattr(conntrack, "_LISTED", Path("/dev/null"))
        assert len(spaces.within(one.gateway.spaces.gateway, conntrack.connections)) == 1
        monkeypatch.setattr(conntrack, "_LISTED", Path("/nowhere"))
        assert len(spaces.within(one.gateway.spaces.gateway, conntrack.connections)) == 1
