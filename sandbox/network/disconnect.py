"""Cut the networks of many runs at once, from outside their shims: delete the links, forget the connections.

Without its link a run sends and receives no packet, also none of an open connection or of one that a gate holds. All
links are deleted in one step: for each deletion the kernel waits for packets in flight, which one by one takes a second
and more for a tree of runs. Each shim removes the rest when it ends (``uplink``).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from policy import errors
from sandbox.kernel.net import netlink
from sandbox.kernel.net import netns as spaces
from sandbox.network import addresses, uplink


class Link(Struct, frozen=True):
    """One run's network: its note (``RunDirectory.note_network``), and the process that holds it."""

    run_id: str
    keeper: int
    noted: Mapping[str, Any]


def cut(links: Sequence[Link]) -> list[str]:
    """Delete every run's link to the host, and forget its connections.

    Returns a description of each failure. The other links are cut all the same.
    """
    failed: list[str] = []
    if not links:
        return failed
    here = functools.partial(_at_the_host, links)
    with contextlib.ExitStack() as stack:
        # The shims are hardly ever in another namespace than the revoking process.
        for namespace in (None, *others(links, stack, failed)):
            try:
                failed += here() if namespace is None else spaces.within(namespace, here)
            except (OSError, errors.KernelError) as e:
                failed.append(f"the host's end: {e}")
    return failed


class Aside(threading.Thread):
    """Runs ``cut`` in its own thread, or directly if no thread is left.

    ``result`` waits for it and re-raises its error.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__(name="cut")
        self._links, self._value = links, list[str]()
        self._error: BaseException | None = None
        try:
            self.start()
        except RuntimeError:  # Python raises it for EAGAIN
            self.run()

    def run(self) -> None:
        try:
            self._value = cut(self._links)
        except BaseException as e:  # it is raised again in the waiting thread
            self._error = e

    def result(self) -> list[str]:
        """Wait for the thread, and return the descriptions of its failures."""
        if self.ident is not None:
            self.join()
        if self._error is not None:
            raise self._error
        return self._value


def others(links: Iterable[Link], stack: contextlib.ExitStack, failed: list[str]) -> list[int]:
    """Open the network namespaces of the shims, except our own. Appends failures to ``failed``."""
    seen, found = {os.stat("/proc/thread-self/ns/net").st_ino}, []
    for keeper in {link.keeper for link in links}:
        try:
            fd = os.open(f"/proc/{keeper}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            continue  # the shim is gone, and its namespaces with it
        except OSError as e:
            failed.append(f"the network that keeper {keeper} is in cannot be seen: {e.strerror}")
            continue
        stack.callback(os.close, fd)
        if (number := os.fstat(fd).st_ino) not in seen:
            seen.add(number)
            found.append(fd)
    return found


def _at_the_host(links: Sequence[Link]) -> list[str]:
    """Cut the links in the calling thread's namespace, and return the failures.

    Runs without a device there are skipped.
    """
    with netlink.Route() as route:
        there = route.links_in_groups()
        own = {name: link for link in links if (name := addresses.host_device(link.run_id)) in there}
        failed = _take_away(route, [there[name][0] for name in own], {group for _, group in there.values()})
    for link in own.values():
        place = uplink.noted(link.noted)
        if place is not None:
            uplink.forget(place)
    return failed


def _take_away(route: netlink.Route, devices: Sequence[int], taken: Collection[int]) -> list[str]:
    """Delete the devices in one step, as a new device group.

    If that fails they are set down one by one: a shim may be deleting its own at the same time.
    """
    if not devices:
        return []
    group = next(number for number in iter(_any_group, None) if number not in taken)
    with contextlib.suppress(errors.KernelError):
        route.do([*(netlink.grouped(device, group) for device in devices), netlink.delete_group(group)])
        return []
    failed = []
    left = set(route.links().values())
    for device in left.intersection(devices):
        try:
            route.do([netlink.down(device)])
        except errors.KernelError as e:
            if not isinstance(e.__cause__, OSError) or e.__cause__.errno != errno.ENODEV:
                failed.append(e.message)
    return failed


def _any_group() -> int:
    """Return a random group number that an administrator would hardly use."""
    return 0x40000000 | secrets.randbits(30)
