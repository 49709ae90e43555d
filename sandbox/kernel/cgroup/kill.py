"""Many leaves ended at once: all of them stopped before the first is killed, and all killed before one is waited for.

One after the other, the last of a tree would run on while the first dies; and each would be waited for alone. Who waits
leaves the processor to who dies: it sleeps until a process is gone, and reads the lists of the cgroups seldom.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from policy import errors
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.cgroup.cgroup import Leaf
from sandbox.kernel.fs import hanging

# How long the lists are left unread while what was killed is dying: at first, since on a machine without a freezer
# somebody may have forked between the list and the signal, and at most.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.004, 0.032
_WITHOUT_LIMIT = {
    1: (("cpu.cfs_quota_us", "-1"), ("cpu.shares", "262144")),
    2: (("cpu.max", "max"), ("cpu.weight", "10000")),
}


def stop(leaves: Iterable[Leaf]) -> None:
    """Ask the kernel to stop every thread in each of them, and wait for none. Where there is no freezer, they run on
    until they are killed. Whoever joins a leaf that is stopped stands as well."""
    for leaf in leaves:
        _ask(leaf, frozen=True)


def listed(leaf: Leaf) -> list[int]:
    """Who is in a leaf, by one hierarchy if that lists anybody: asking all of them takes longer than many deaths.

    Raises:
        errors.KernelError: a list is there and cannot be read.
    """
    first = next(iter(leaf.paths.values()), None)
    return (first is not None and cgroup.members(first)) or leaf.pids()


def kill(leaves: Sequence[Leaf], *, deadline_seconds: float = 10.0) -> None:
    """SIGKILL everything in each of them until all are empty. One that was empty stays stopped: what was about to begin
    in it does not.

    Raises:
        errors.KernelError: something is still alive at the deadline, or it cannot be seen whether there is; everything
            that could be seen was sent its signal.
    """
    until, look = time.monotonic() + deadline_seconds, _FIRST_LOOK_SECONDS
    left = _occupied(leaves)
    with contextlib.closing(_Killed()) as killed:
        while left:
            # Whoever is on its way out is left alone: frozen again, it would not get there.
            fresh = [(leaf, new) for leaf, pids, _ in left if (new := killed.others(pids))]
            stop(leaf for leaf, _ in fresh)
            for leaf, _ in fresh:
                _hasten(leaf)
            for leaf, pids in fresh:
                _kill(leaf, pids, killed)
            # Version 1 delivers SIGKILL only after the thaw (sandbox-facts), with no instruction of its own in between.
            # At each look: a keeper that was just asked to suspend its run may have frozen it once more.
            for leaf, pids, _ in left:
                if pids:
                    _ask(leaf, frozen=False)
            if time.monotonic() > until:
                names = ", ".join(f"{leaf.name} ({unread or hanging.survivors(pids)})" for leaf, pids, unread in left)
                raise errors.KernelError(f"something survives SIGKILL in the cgroups {names}")
            look = _FIRST_LOOK_SECONDS if fresh else min(look * 2, _LOOK_SECONDS)
            killed.wait(look)
            left = _occupied(leaf for leaf, _, _ in left)


def _occupied(leaves: Iterable[Leaf]) -> list[tuple[Leaf, list[int], str]]:
    """Those in which somebody is, with them; and those of which that cannot be seen, with why."""
    found: list[tuple[Leaf, list[int], str]] = []
    for leaf in leaves:
        try:
            if pids := listed(leaf):
                found.append((leaf, pids, ""))
        except errors.KernelError as e:
            found.append((leaf, [], e.message))
    return found


class _Killed:
    """Processes that were sent SIGKILL and may be dying still, each by a descriptor that tells of its end."""

    def __init__(self) -> None:
        self._dying: dict[int, int] = {}
        self._untold: set[int] = set()
        # The others are for the files of the leaves, without which none is thawed, and for who cuts their networks.
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def close(self) -> None:
        """Let go of all of them."""
        while self._dying:
            os.close(self._dying.popitem()[1])

    def others(self, pids: Iterable[int]) -> list[int]:
        """Those of them that it was not sent to. A number whose process is gone is another's."""
        return [pid for pid in pids if pid not in self._dying and pid not in self._untold]

    def send(self, pid: int) -> None:
        """SIGKILL, to whoever is there."""
        with contextlib.suppress(ProcessLookupError):
            if len(self._dying) >= self._most:
                os.kill(pid, signal.SIGKILL)
                self._untold.add(pid)
                return
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            except OSError:  # no descriptor is left
                os.kill(pid, signal.SIGKILL)
                self._untold.add(pid)
                return
            self._dying[pid] = fd
            signal.pidfd_send_signal(fd, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Until all of them are gone, and no longer than this; one after the other, which wakes us least."""
        until = time.monotonic() + seconds
        for pid, fd in list(self._dying.items()):
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return
            os.close(self._dying.pop(pid))
        if self._untold:
            time.sleep(_FIRST_LOOK_SECONDS)


def _hasten(leaf: Leaf) -> None:
    """Whoever dies needs the processor for it, and a limit or a small share would make that long."""
    for file, value in _WITHOUT_LIMIT[leaf.hierarchies.version]:
        _write(leaf.paths, "cpu", file, value)


def _kill(leaf: Leaf, pids: Iterable[int], killed: _Killed) -> None:
    if leaf.hierarchies.version == 2:
        _write(leaf.paths, "memory", "cgroup.kill", "1")
    for pid in pids:
        killed.send(pid)


def _ask(leaf: Leaf, *, frozen: bool) -> None:
    """By the leaf's own files: one that is gone has nothing left to stop."""
    if leaf.hierarchies.version == 2:
        _write(leaf.paths, "memory", "cgroup.freeze", str(int(frozen)))
    else:
        _write(leaf.paths, "freezer", "freezer.state", "FROZEN" if frozen else "THAWED")


def _write(paths: Mapping[str, Path], name: str, file: str, value: str) -> None:
    with contextlib.suppress(OSError, KeyError), open(f"{paths[name]}/{file}", "w", encoding="ascii") as opened:
        opened.write(value)
