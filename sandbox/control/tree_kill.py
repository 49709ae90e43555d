"""Stop and kill runs with every run below them: for `kill --tree`, a revocation and a newer serial.

    (1) ``catch``, behind the gate of the runs: stop the agents, mark the runs, stop their gates
    (2) ``end``: write the row that names the runs, kill all of them together, cut their networks

The caller decides which runs end and what the mark says. It holds ``sweep_lock`` around both steps.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from policy import errors
from sandbox.kernel.cgroup import cgroup, kill
from sandbox.kernel.proc import priority
from sandbox.network import disconnect
from sandbox.network.gate import cgroup as gate_cgroup
from sandbox.rundir import directory, marks, registry
from sandbox.storage import atomic_file

STARTING_SECONDS = 15.0
GATE_SECONDS = 2.0
# The lock of a sweep, in the directory of all runs; the longest wait of a shim for it, and the interval of looks.
_ENDING = ".ending"
SWEEP_SECONDS, _SWEEP_LOOK_SECONDS = 10.0, 0.05
# Around a sweep: the agents that are to end may keep every processor from this process.
urgent = priority.ahead


def wait_for_sweep(path: Path) -> None:
    """Wait until the sweep that ends this marked run is over. A run without a mark does not wait.

    The shim calls it before it cleans up: shims of a tree that clean up at once take the processors from the deaths of
    the others. The sweep holds a lock (``sweep_lock``), which the kernel releases where its process dies. The wait is
    bounded.
    """
    with contextlib.suppress(OSError):
        if marks.verdict(path) is None:
            return
        until = time.monotonic() + SWEEP_SECONDS
        while atomic_file.held(path.parent / _ENDING) and time.monotonic() < until:
            time.sleep(_SWEEP_LOOK_SECONDS)


class Caught(Struct, frozen=True):
    """Runs that stand and are marked. ``leaves`` is by run id: the agent's own, then that of its gates.

    ``starting`` are the runs whose agent was not seen in its cgroup: their shims may be about to start it.
    """

    entries: tuple[registry.Entry, ...] = ()
    leaves: Mapping[str, list[cgroup.Leaf]] = msgspec.field(default_factory=dict)
    starting: tuple[registry.Entry, ...] = ()

    def every_leaf(self) -> list[cgroup.Leaf]:
        """Return the leaves of all runs."""
        return [leaf for both in self.leaves.values() for leaf in both]


def catch(entries: Sequence[registry.Entry], mark: Callable[[], object], failed: list[str]) -> Caught:
    """Stop the agents of these runs, call ``mark``, and stop their gates. Add to ``failed`` each step that failed.

    The agents stop before the mark is written. Where this process is killed between the two, `resume` thaws them; it
    knows nothing of gates, so that those stop after the mark. A leaf that was made meanwhile is stopped as well.
    """
    leaves: dict[str, list[cgroup.Leaf]] = {one.run_id: [] for one in entries}

    def look(some: Sequence[registry.Entry]) -> None:
        leaves.update(_all_leaves(cgroup.Hierarchies.read(), some, failed))

    def halt(some: Iterable[cgroup.Leaf]) -> None:
        attempt(failed, "processes", lambda: kill.stop(some))

    attempt(failed, "the cgroups", lambda: look(entries))
    halt(leaf for both in leaves.values() for leaf in both[:1])
    # INVARIANT: nothing is done between the stop and the mark.
    mark()
    halt(leaf for both in leaves.values() for leaf in both[1:])
    starting = [one for one in entries if not _is_up(leaves[one.run_id])]
    attempt(failed, "the cgroups", lambda: look(starting))
    halt(leaf for one in starting for leaf in leaves[one.run_id])
    return Caught(tuple(entries), leaves, tuple(starting))


def end(caught: Caught, write: Callable[[], object], failed: list[str]) -> errors.CovenantError | None:
    """Call ``write``, which makes the row durable, then end the runs. A row that fails keeps no run alive.

    Returns:
        The error of ``write``, or None.
    """
    unwritten: errors.CovenantError | None = None
    try:
        write()
    except errors.CovenantError as e:
        unwritten = e
    end_together(caught.entries, caught.every_leaf(), failed)
    return unwritten


def mark_stopped(entries: Sequence[registry.Entry], by: str, reason: str) -> None:
    """Mark each run with the requester and the reason of its end. A run that cannot be marked is ended all the same.

    Its shim ends a marked run, also where this process is killed.
    """
    failed: list[str] = []
    marked: Path | None = None
    for one in entries:
        if attempt(failed, "a mark", functools.partial(marks.mark_stopped, one.path, by, reason, like=marked)):
            marked = one.path


def end_together(entries: Sequence[registry.Entry], leaves: Sequence[cgroup.Leaf], failed: list[str]) -> None:
    """Kill the processes of marked runs together and cut their networks. Add to ``failed`` each step that failed.

    Their shims wait meanwhile (``wait_for_sweep``): else the first ones clean up while the last agents still run. What
    fails here the shims do.
    """
    cut = disconnect.Aside(_links(entries, failed))
    attempt(failed, "processes", lambda: kill.kill(leaves))
    attempt(failed, "networks", lambda: failed.extend(cut.result()))


@contextlib.contextmanager
def allow_thaw(path: Path) -> Iterator[None]:
    """Hold the gate of the runs around the thaw of one: a sweep marks and stops it after the block.

    Raises:
        errors.RunRevokedError, errors.KilledError: it is marked, and stands until it is killed.
        errors.KeeperError: the gate is not free, and its holder may be about to mark the run.
    """
    failed: list[str] = []
    with runs_gate(path.parent, failed):
        if (revoked := marks.verdict(path)) is not None:
            raise revoked
        if failed:
            raise errors.KeeperError("the gate of the runs is not free", hint="ask again")
        yield


@contextlib.contextmanager
def runs_gate(runs: Path, failed: list[str]) -> Iterator[None]:
    """The gate of the runs; without it when it cannot be had in time: what hangs behind it may be what must end."""
    fd = os.open(runs / ".gate", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with atomic_file.unstopped():
        try:
            if not atomic_file.take(fd, GATE_SECONDS, poll_seconds=0.001):
                failed.append("the gate of the runs is not free: one that was just starting may have been missed")
            yield
        finally:
            os.close(fd)


def _leaves(hierarchies: cgroup.Hierarchies, path: Path) -> list[cgroup.Leaf]:
    """The agent's own, and that of its gates where there is one: each is stopped, and stays so while it is empty."""
    leaf = cgroup.Leaf(hierarchies, path.name)
    leaf.adopt(directory.cgroups_of(path))
    gates = gate_cgroup.adopted_of(leaf)
    return [gate_cgroup.without(leaf), *([] if gates is None else [gates])]


def _all_leaves(
    hierarchies: cgroup.Hierarchies, entries: Iterable[registry.Entry], failed: list[str]
) -> dict[str, list[cgroup.Leaf]]:
    """Return the leaves by run id. A run whose leaves cannot be read has none, and counts as one that is starting."""
    found: dict[str, list[cgroup.Leaf]] = {}
    for one in entries:

        def see(one: registry.Entry = one) -> None:
            found[one.run_id] = _leaves(hierarchies, one.path)

        if not attempt(failed, f"the cgroups of run {one.run_id}", see):
            found[one.run_id] = []
    return found


def _is_up(leaves: Sequence[cgroup.Leaf]) -> bool:
    """Return whether a process is in the agent's own leaf. False also where it cannot be read."""
    try:
        return bool(leaves and kill.listed(leaves[0]))
    except errors.KernelError:
        return False


@contextlib.contextmanager
def sweep_lock(runs: Path) -> Iterator[None]:
    """Hold the lock for which shims wait before they clean up (``wait_for_sweep``). It is no condition of the block.

    Of two sweeps at once the second one does without.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(runs / _ENDING, flags, 0o600)
            stack.callback(os.close, fd)
            atomic_file.take(fd, 0.0)
        yield


def _links(entries: Iterable[registry.Entry], failed: list[str]) -> list[disconnect.Link]:
    found: list[disconnect.Link] = []
    for one in entries:

        def see(one: registry.Entry = one) -> None:
            if (noted := directory.network_of(one.path)) is not None:
                found.append(disconnect.Link(one.run_id, one.keeper, noted))

        attempt(failed, f"the network of run {one.run_id}", see)
    return found


def outwait(entries: Collection[registry.Entry]) -> None:
    """Kill each process that joins the cgroups of runs that are about to start, until their shims are done with them.

    Raises:
        errors.KernelError: a shim has not ended its run in ``STARTING_SECONDS``.
    """
    hierarchies, until = cgroup.Hierarchies.read(), time.monotonic() + STARTING_SECONDS
    while left := [one for one in entries if registry.under_way(one.path)]:
        leaves = [leaf for one in left for leaf in _leaves(hierarchies, one.path)]
        kill.stop(leaves)
        kill.kill(leaves)
        if time.monotonic() > until:
            names = ", ".join(one.run_id for one in left)
            raise errors.KernelError(f"the keepers of {names} have not ended them after {STARTING_SECONDS:g} s")
        time.sleep(0.005)


def attempt(failed: list[str], what: str, act: Callable[[], object]) -> bool:
    """Whether it was done; if not, ``failed`` says why."""
    try:
        act()
    except errors.CovenantError as e:
        failed.append(f"{what}: {e.message}")
    except OSError as e:
        failed.append(f"{what}: {e.strerror or e}")
    else:
        return True
    return False
