"""Kill many leaves at once: freeze all before the first kill, and kill all before the first wait.

One after the other, the last of a tree would run on while the first dies, and each death would be waited for alone. The
waiting process leaves the CPU to the dying ones: it sleeps until one is gone, and seldom reads the cgroups' lists.
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

# The first and the longest interval between reads of the lists while killed processes are dying. The first is short:
# without a freezer a process may have forked between the list and the signal.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.004, 0.032
_WITHOUT_LIMIT = {
    1: (("cpu.cfs_quota_us", "-1"), ("cpu.shares", "262144")),
    2: (("cpu.max", "max"), ("cpu.weight", "10000")),
}


def stop(leaves: Iterable[Leaf]) -> None:
    """Request the freeze of every leaf, without a wait for it.

    Without a freezer the processes run until they are killed. A process that joins a frozen leaf is frozen as well.
    """
    for leaf in leaves:
        _ask(leaf, frozen=True)


def listed(leaf: Leaf) -> list[int]:
    """Return the processes in a leaf. The other hierarchies are read only if the first lists none.

    Reading all of them takes longer than many deaths.

    Raises:
        errors.KernelError: Raised when a list exists and cannot be read.
    """
    first = next(iter(leaf.paths.values()), None)
    return (first is not None and cgroup.members(first)) or leaf.pids()


def kill(leaves: Sequence[Leaf], *, deadline_seconds: float = 10.0) -> None:
    """Kill every process in the leaves with SIGKILL until all leaves are empty.

    A leaf that is empty from the beginning stays frozen, so that a process that joins it cannot run.

    Raises:
        errors.KernelError: Raised when a process is alive at the deadline, or a list cannot be read. Every listed
            process got its signal.
    """
    until, look = time.monotonic() + deadline_seconds, _FIRST_LOOK_SECONDS
    left = _occupied(leaves)
    with contextlib.closing(_Killed()) as killed:
        while left:
            # Processes that got SIGKILL are left alone: frozen again, they would not die.
            fresh = [(leaf, new) for leaf, pids, _ in left if (new := killed.others(pids))]
            stop(leaf for leaf, _ in fresh)
            for leaf, _ in fresh:
                _hasten(leaf)
            for leaf, pids in fresh:
                _kill(leaf, pids, killed)
            # Version 1 delivers SIGKILL only after the thaw (sandbox-facts); the process executes no instruction
            # before.
            # Thaw in each round: a shim that was just asked to suspend its run may have frozen it once more.
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
    """Return the leaves with processes, with these, and the leaves whose lists cannot be read, with the error."""
    found: list[tuple[Leaf, list[int], str]] = []
    for leaf in leaves:
        try:
            if pids := listed(leaf):
                found.append((leaf, pids, ""))
        except errors.KernelError as e:
            found.append((leaf, [], e.message))
    return found


class _Killed:
    """Processes that got SIGKILL and may still be dying, each with a pidfd that reports its end."""

    def __init__(self) -> None:
        self._dying: dict[int, int] = {}
        self._untold: set[int] = set()
        # The other descriptors are for the leaves' files, which the thaw needs, and for cutting the networks.
        self._most = _free_descriptors() // 2

    def close(self) -> None:
        """Close all descriptors."""
        while self._dying:
            os.close(self._dying.popitem()[1])

    def others(self, pids: Iterable[int]) -> list[int]:
        """Return the processes that did not get SIGKILL yet. The pid of a process that is gone may be reused."""
        return [pid for pid in pids if pid not in self._dying and pid not in self._untold]

    def send(self, pid: int) -> None:
        """Send SIGKILL to a process, if it exists."""
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
        """Wait until all of them are gone, at most this long. One by one, which causes the fewest wake-ups."""
        until = time.monotonic() + seconds
        for pid, fd in list(self._dying.items()):
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return
            os.close(self._dying.pop(pid))
        if self._untold:
            time.sleep(_FIRST_LOOK_SECONDS)


def _free_descriptors() -> int:
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0  # not even one
    return max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - used)


def _hasten(leaf: Leaf) -> None:
    """Remove the CPU limits of a leaf: a dying process needs CPU, and a quota or a small share would delay it."""
    for file, value in _WITHOUT_LIMIT[leaf.hierarchies.version]:
        _write(leaf.paths, "cpu", file, value)


def _kill(leaf: Leaf, pids: Iterable[int], killed: _Killed) -> None:
    if leaf.hierarchies.version == 2:
        _write(leaf.paths, "memory", "cgroup.kill", "1")
    for pid in pids:
        killed.send(pid)


def _ask(leaf: Leaf, *, frozen: bool) -> None:
    """Request freeze or thaw by the leaf's own files. A leaf that is gone is ignored."""
    if leaf.hierarchies.version == 2:
        _write(leaf.paths, "memory", "cgroup.freeze", str(int(frozen)))
    else:
        _write(leaf.paths, "freezer", "freezer.state", "FROZEN" if frozen else "THAWED")


def _write(paths: Mapping[str, Path], name: str, file: str, value: str) -> None:
    with contextlib.suppress(OSError, KeyError), open(f"{paths[name]}/{file}", "w", encoding="ascii") as opened:
        opened.write(value)
