"""Links as we make them by rtnetlink are as ip(8) shows them, and what the kernel refuses is said in its words."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from policy import errors
from sandbox.kernel.net import netlink
from sandbox.kernel.net import netns as spaces
from sandbox.network import addresses as own
from sandbox.network import namespaces


def ip(namespace: int, *command: str) -> list[dict[str, Any]]:
    """Return the output of `ip -j` in a namespace of this process."""
    entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", "ip", "-j", *command]
    found: list[dict[str, Any]] = json.loads(subprocess.run(entered, capture_output=True, check=True).stdout or b"[]")
    return found


def test_run_has_two_devices_with_what_was_asked_for_and_no_more() -> None:
    with namespaces.made() as made:
        namespaces.connect(made)
        namespaces.open_link(made)
        for space, device, mac, at4, at6, neighbours in (
            (made.agent, own.AGENT_DEVICE, own.AGENT_MAC, own.AGENT4, own.AGENT6, {own.GATEWAY4, own.GATEWAY6}),
            (made.gateway, own.GATEWAY_DEVICE, own.GATEWAY_MAC, own.GATEWAY4, own.GATEWAY6, {own.AGENT4, own.AGENT6}),
        ):
            links = {one["ifname"]: one for one in ip(space, "address", "show")}
            assert links.keys() == {"lo", device}
            link = links[device]
            assert link["address"] == mac
            assert "UP" in link["flags"]
            held = {(a["local"], a["prefixlen"]) for a in link["addr_info"]}
            assert held == {(at4, own.PREFIX4), (at6, own.PREFIX6)}
            assert not any(a.get("tentative") for a in link["addr_info"])
            known = ip(space, "neighbour", "show", "nud", "permanent")
            assert {(n["dst"], n["dev"]) for n in known} == {(n, device) for n in neighbours}
        for family, gateway in (("-4", own.GATEWAY4), ("-6", own.GATEWAY6)):
            (route,) = [r for r in ip(made.agent, family, "route") if r["dst"] == "default"]
            assert (route["gateway"], route["dev"]) == (gateway, own.AGENT_DEVICE)
            assert [r for r in ip(made.gateway, family, "route") if r["dst"] == "default"] == []


def test_what_is_there_twice_is_refused_in_words_and_with_its_errno() -> None:
    (space,) = spaces.make()
    try:
        with spaces.within(space, netlink.Route) as route:
            pair = netlink.veth(netlink.End("one", own.AGENT_MAC, index=7), netlink.End("two", own.GATEWAY_MAC))
            route.do([pair, netlink.address(7, own.AGENT4, 29), netlink.up(7)])
            assert route.links().keys() == {"lo", "one", "two"}
            assert route.links()["one"] == 7
            for again, words in (
                (pair, "make the devices one and two"),
                (netlink.address(7, own.AGENT4, 29), f"give device 7 the address {own.AGENT4}/29"),
            ):
                with pytest.raises(errors.KernelError, match=words) as caught:
                    route.do([again])
                assert isinstance(caught.value.__cause__, FileExistsError)
            with pytest.raises(errors.KernelError, match="bring device 99 up") as caught:
                route.do([netlink.up(99), netlink.up(7)])
            assert caught.value.__cause__ is not None
            # The others of the same message were done, and the socket is still good.
            route.do([netlink.delete(7)])
            assert route.links().keys() == {"lo"}
    finally:
        os.close(space)


def test_namespace_is_gone_with_its_last_descriptor() -> None:
    (space,) = spaces.make()
    outside = spaces.current()
    try:
        with spaces.within(space, netlink.Route) as route:
            route.do([netlink.up(1)])
            assert spaces.within(space, lambda: os.stat("/proc/thread-self/ns/net").st_ino) == os.fstat(space).st_ino
        assert os.fstat(outside).st_ino != os.fstat(space).st_ino
        assert os.stat("/proc/thread-self/ns/net").st_ino == os.fstat(outside).st_ino
    finally:
        os.close(space)
        os.close(outside)


def test_error_inside_namespace_is_raised_outside() -> None:
    (space,) = spaces.make()

    def fails() -> None:
        raise ValueError("inside")

    try:
        with pytest.raises(ValueError, match="inside"):
            spaces.within(space, fails)
    finally:
        os.close(space)
    with pytest.raises(errors.KernelError):
        spaces.within(space, fails)
