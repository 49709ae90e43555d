"""Our own netlink compared with pyroute2 in the same namespaces: what one makes the other must read.

Links are made and dumped by messages of our own (docs/adr/0024); another implementation must see the same things.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

import pytest
from pyroute2 import IPRoute  # type: ignore[import-untyped]

from sandbox.kernel.net import dump
from sandbox.kernel.net import netns as spaces
from sandbox.network import addresses, namespaces
from tests.kernel.live_runs import until

_PERMANENT = 0x80  # linux/neighbour.h, NUD_PERMANENT
_KINDS = {1: "unicast", 2: "local", 3: "broadcast", 4: "anycast"}
_FAMILIES = (2, 10)


@pytest.fixture
def run() -> Iterator[namespaces.Spaces]:
    with namespaces.made() as made:
        namespaces.connect(made)
        namespaces.open_link(made)
        yield made


def _dumped() -> dict[str, set[str]]:
    """The namespace of this thread in the words of readback_net, as far as pyroute2 has to say."""
    with IPRoute() as route:
        links = {
            f"device {one['index']} {one.get('ifname')} {_kind(one)} {one.get('address')} mtu {one.get('mtu')} "
            f"up {one['flags'] & 1}"
            for one in route.get_links()
        }
        held = {
            f"address {one.get('local') or one.get('address')}/{one['prefixlen']} at device {one['index']}"
            for one in route.get_addr()
        }
        neighbours = {
            f"neighbour {one.get('dst')} {one.get('lladdr')} at device {one['ifindex']}"
            for one in route.get_neighbours()
            if one["state"] & _PERMANENT
        }
        routes = {_route(one) for family in _FAMILIES for one in route.get_routes(family=family)}
    return {"device": links, "address": held, "neighbour": neighbours, "route": routes - {""}}


def _kind(link: object) -> str:
    info = link.get("linkinfo")  # type: ignore[attr-defined]
    return str(info.get("kind")) if info is not None else ""


def _route(one: object) -> str:
    get = one.get  # type: ignore[attr-defined]
    kind, length, family = (one[name] for name in ("type", "dst_len", "family"))  # type: ignore[index]
    to = f"{get('dst') or ('0.0.0.0' if family == 2 else '::')}/{length}"
    if kind not in _KINDS:
        return ""  # the kernel's multicast routes, which readback_net leaves out as well
    via = f" via {get('gateway')}" if get("gateway") else ""
    return f"route {_KINDS[kind]} {to} in table {get('table')}{via} by device {get('oif')}"


@pytest.mark.parametrize("place", ["agent", "gateway"])
def test_another_reader_sees_what_we_read(run: namespaces.Spaces, place: str) -> None:
    fd = getattr(run, place)

    def between_two_equal_reads() -> tuple[dict[str, set[str]], frozenset[str]] | None:
        # The kernel adds the local route of an IPv6 address a moment after the address.
        before = spaces.within(fd, dump.lines)
        theirs = spaces.within(fd, _dumped)
        return (theirs, before) if before == spaces.within(fd, dump.lines) else None

    theirs, ours = until(between_two_equal_reads)
    for what, lines in theirs.items():
        assert lines == {line for line in ours if line.startswith(f"{what} ")}, what
        assert lines


def test_another_reader_sees_what_was_to_be_made(run: namespaces.Spaces) -> None:
    theirs = spaces.within(run.gateway, _dumped)
    assert f"address {addresses.GATEWAY4}/{addresses.PREFIX4} at device 2" in theirs["address"]
    assert f"address {addresses.GATEWAY6}/{addresses.PREFIX6} at device 2" in theirs["address"]
    assert f"neighbour {addresses.AGENT4} {addresses.AGENT_MAC} at device 2" in theirs["neighbour"]
    network = ipaddress.ip_interface(f"{addresses.GATEWAY4}/{addresses.PREFIX4}").network
    assert f"route unicast {network} in table 254 by device 2" in theirs["route"]
    agent = spaces.within(run.agent, _dumped)
    assert f"route unicast 0.0.0.0/0 in table 254 via {addresses.GATEWAY4} by device 2" in agent["route"]
