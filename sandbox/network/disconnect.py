"""The networks of runs cut at once, by somebody else than their keepers: links gone, connections forgotten.

Where there is no link no packet passes in either direction, also none of a connection that stands or that a gate
holds. All links go in one step: the kernel waits for what is under way before it lets one go, which for a tree of runs
one after the other takes a second and more. The rest is taken away by each keeper when it ends (``uplink``).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policy import errors
from sandbox.kernel.net import netlink
from sandbox.kernel.net import netns as spaces
from sandbox.network import addresses, uplink


@dataclass(frozen=True, slots=True)
class Link:
    """One run's network: what was noted of it (``RunDirectory.note_network``), and the process that holds it."""

    run_id: str
    keeper: int
    noted: Mapping[str, Any]


def cut(links: Sequence[Link]) -> list[str]:
    """Take every run's link to the host away, and forget what was begun over it.

    What could not be cut is returned in words; the other links are cut all the same.
    """
    failed: list[str] = []
    if not links:
        return failed
    here = functools.partial(_at_the_host, links)
    with contextlib.ExitStack() as stack:
        # Their keepers are hardly ever in another namespace than whoever revokes.
        for namespace in (None, *_others(links, stack, failed)):
            try:
                failed += here() if namespace is None else spaces.within(namespace, here)
            except (OSError, errors.KernelError) as e:
                failed.append(f"the host's end: {e}")
    return failed


class Aside(threading.Thread):
    """``cut`` in a thread of its own, at once where there is none left; ``result`` waits for it, and raises what it
    raised."""

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__(name="cut")
        self._links, self._value = links, list[str]()
        self._error: BaseException | None = None
        try:
            self.start()
        except RuntimeError:  # how Python says EAGAIN
            self.run()

    def run(self) -> None:
        try:
            self._value = cut(self._links)
        except BaseException as e:  # it is raised again in the waiting thread
            self._error = e

    def result(self) -> list[str]:
        """What could not be cut."""
        if self.ident is not None:
            self.join()
        if self._error is not None:
            raise self._error
        return self._value


def _others(links: Iterable[Link], stack: contextlib.ExitStack, failed: list[str]) -> list[int]:
    """Descriptors of the namespaces in which their keepers are, but for our own; ``failed`` has what cannot be seen."""
    seen, found = {os.stat("/proc/thread-self/ns/net").st_ino}, []
    for keeper in {link.keeper for link in links}:
        try:
            fd = os.open(f"/proc/{keeper}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it is gone, and what it held with it
        except OSError as e:
            failed.append(f"the network that keeper {keeper} is in cannot be seen: {e.strerror}")
            continue
        stack.callback(os.close, fd)
        if (number := os.fstat(fd).st_ino) not in seen:
            seen.add(number)
            found.append(fd)
    return found


def _at_the_host(links: Sequence[Link]) -> list[str]:
    """What of it could not be done, in the namespace of the calling thread; runs without a device there are passed."""
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
    """All of them in one step, in a group of a number that is not taken; one by one where that fails, since a keeper
    may just be taking its own away."""
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
    """Any number that whoever looks after the machine would hardly give a group."""
    return 0x40000000 | secrets.randbits(30)
