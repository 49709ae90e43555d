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

_LOOK_SECONDS = 0.002


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
    left = [leaf for leaf in leaves if leaf.pids()]
    while left:
        for leaf in left:
            _kill(leaf)
        # Version 1 delivers SIGKILL only after the thaw (sandbox-facts): no instruction of its own comes in between.
        for leaf in left:
            _ask(leaf, frozen=False)
        wait = time.monotonic() + 10 * _LOOK_SECONDS
        while time.monotonic() < wait and (left := [leaf for leaf in left if leaf.pids()]):
            time.sleep(_LOOK_SECONDS)
        if left and time.monotonic() > until:
            names = ", ".join(leaf.name for leaf in left)
            raise errors.KernelError(f"something survives SIGKILL in the cgroups {names}")
        # Whoever is left was forked meanwhile, or is on its way out; asked once more, it changes nothing.
        stop(left)


def _kill(leaf: Leaf) -> None:
    if leaf.hierarchies.version == 2:
        with contextlib.suppress(OSError):
            (leaf.paths["memory"] / "cgroup.kill").write_text("1")
            return
    for pid in leaf.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ask(leaf: Leaf, *, frozen: bool) -> None:
    """By the leaf's own files: one that is gone has nothing left to stop."""
    with contextlib.suppress(OSError, KeyError):
        if leaf.hierarchies.version == 2:
            (leaf.paths["memory"] / "cgroup.freeze").write_text(str(int(frozen)))
        else:
            (leaf.paths["freezer"] / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
