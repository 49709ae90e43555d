"""Many leaves ended at once: all of them stopped before the first is killed, and all killed before one is waited for.

One after the other, the last of a tree would run on while the first dies; and each would be waited for alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence

from policy import errors
from sandbox.kernel.cgroupfs import Leaf

_LOOK_SECONDS = 0.004
_WITHOUT_LIMIT = {
    1: (("cpu.cfs_quota_us", "-1"), ("cpu.shares", "262144")),
    2: (("cpu.max", "max"), ("cpu.weight", "10000")),
}


def stop(leaves: Iterable[Leaf]) -> None:
    """Ask the kernel to stop every thread in each of them, and wait for none. Where there is no freezer, they run on
    until they are killed. Whoever joins a leaf that is stopped stands as well."""
    for leaf in leaves:
        _ask(leaf, frozen=True)


def kill(leaves: Sequence[Leaf], *, deadline_seconds: float = 10.0) -> None:
    """SIGKILL everything in each of them until all are empty. One that was empty stays stopped: what was about to begin
    in it does not.

    Raises:
        errors.KernelError: something is still alive at the deadline; everything was sent its signal.
    """
    until = time.monotonic() + deadline_seconds
    for leaf in leaves:
        _hasten(leaf)
    killed: dict[int, set[int]] = {}
    left = [(leaf, pids) for leaf in leaves if (pids := leaf.pids())]
    while left:
        # Whoever is on its way out is left alone: frozen again, it would not get there.
        fresh = [(leaf, pids) for leaf, pids in left if not killed.setdefault(id(leaf), set()).issuperset(pids)]
        stop(leaf for leaf, _ in fresh)
        for leaf, pids in fresh:
            _kill(leaf, pids)
            killed[id(leaf)].update(pids)
        # Version 1 delivers SIGKILL only after the thaw (sandbox-facts): no instruction of its own comes in between.
        for leaf, _ in fresh:
            _ask(leaf, frozen=False)
        if time.monotonic() > until:
            names = ", ".join(leaf.name for leaf, _ in left)
            raise errors.KernelError(f"something survives SIGKILL in the cgroups {names}")
        time.sleep(_LOOK_SECONDS)
        left = [(leaf, pids) for leaf, _ in left if (pids := _some(leaf))]


def _hasten(leaf: Leaf) -> None:
    """Whoever dies needs the processor for it, and a limit or a small share would make that long."""
    for file, value in _WITHOUT_LIMIT[leaf.hierarchies.version]:
        with contextlib.suppress(OSError, KeyError):
            (leaf.paths["cpu"] / file).write_text(value)


def _some(leaf: Leaf) -> list[int]:
    """Who is left, by one hierarchy as long as it lists anybody: asking all of them takes longer than the deaths do."""
    with contextlib.suppress(OSError):
        for path in leaf.paths.values():
            if listed := (path / "cgroup.procs").read_text().split():
                return [int(pid) for pid in listed]
            break
    return leaf.pids()


def _kill(leaf: Leaf, pids: Iterable[int]) -> None:
    if leaf.hierarchies.version == 2:
        with contextlib.suppress(OSError):
            (leaf.paths["memory"] / "cgroup.kill").write_text("1")
    # On version 2 for what else was noted with the leaf: the gates have one of their own.
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ask(leaf: Leaf, *, frozen: bool) -> None:
    """By the leaf's own files: one that is gone has nothing left to stop."""
    with contextlib.suppress(OSError, KeyError):
        if leaf.hierarchies.version == 2:
            (leaf.paths["memory"] / "cgroup.freeze").write_text(str(int(frozen)))
        else:
            (leaf.paths["freezer"] / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
