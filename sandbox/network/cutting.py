"""The networks of runs cut at once, by somebody else than their keepers: links down, connections forgotten.

A link that is down passes no packet in either direction, also none of a connection that stands or that a gate holds.
What it is made of is taken away by the keeper when it ends (``uplink``).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policy import errors
from sandbox.kernel import conntrack, netlink
from sandbox.kernel import netns as spaces
from sandbox.network import addresses, uplink


@dataclass(frozen=True, slots=True)
class Link:
    """One run's network: what was noted of it (``bundle.RunDirectory.note_network``), and the process that holds it."""

    run_id: str
    keeper: int
    noted: Mapping[str, Any]


def cut(links: Sequence[Link]) -> list[str]:
    """Take every link down, at the host's end and in the gateway, then forget what was begun over it.

    What could not be cut is returned in words; the other links are cut all the same, and so is the other end.
    """
    failed: list[str] = []
    if not links:
        return failed
    here = functools.partial(_at_the_host, links)
    with contextlib.ExitStack() as stack:
        # Their keepers are hardly ever in another namespace than whoever revokes.
        for namespace in (None, *_others(links, stack)):
            try:
                failed += here() if namespace is None else spaces.within(namespace, here)
            except (OSError, errors.KernelError) as e:
                failed.append(f"the host's end: {e}")
    for link in links:
        with contextlib.suppress(OSError, errors.KernelError):  # its keeper is gone, and its namespaces with it
            _in_the_gateway(link)
    return failed


def _others(links: Iterable[Link], stack: contextlib.ExitStack) -> list[int]:
    """Descriptors of the namespaces in which their keepers are, but for our own."""
    seen, found = {os.stat("/proc/thread-self/ns/net").st_ino}, []
    for keeper in {link.keeper for link in links}:
        with contextlib.suppress(OSError):  # it is gone, and what it held with it
            fd = os.open(f"/proc/{keeper}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            if (number := os.fstat(fd).st_ino) not in seen:
                seen.add(number)
                found.append(fd)
    return found


def _at_the_host(links: Sequence[Link]) -> list[str]:
    """What of it could not be done, in the namespace of the calling thread; runs without a device there are passed."""
    failed = []
    with netlink.Route() as route:
        there = route.links()
        own = [link for link in links if addresses.host_device(link.run_id) in there]
        for link in own:
            try:
                route.do([netlink.down(there[addresses.host_device(link.run_id)])])
            except errors.KernelError as e:
                failed.append(f"{link.run_id}: {e.message}")
    for link in own:
        place = uplink.noted(link.noted)
        if place is not None:
            uplink.forget(place)
    return failed


def _in_the_gateway(link: Link) -> None:
    """Both ends of the gateway: towards the agent, and towards the host."""
    fd = os.open(f"/proc/{link.keeper}/fd/{int(link.noted['gateway'])}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        spaces.within(fd, _all_down)
    finally:
        os.close(fd)


def _all_down() -> None:
    with netlink.Route() as route:
        there = route.links()
        own = [there[name] for name in (addresses.GATEWAY_DEVICE, addresses.UPLINK_DEVICE) if name in there]
        route.do([netlink.down(index) for index in own])
    with contextlib.suppress(errors.KernelError):
        conntrack.forget(addresses.AGENT4)
        conntrack.forget(addresses.AGENT6)
