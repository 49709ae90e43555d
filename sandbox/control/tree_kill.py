"""Stop and kill a run with every run below it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from policy import errors
from sandbox.kernel.cgroup import cgroup, kill
from sandbox.kernel.proc import priority
from sandbox.network import disconnect
from sandbox.network.gate import cgroup as gate_cgroup
from sandbox.rundir import directory, marks, registry
from sandbox.storage import atomic_file

_STARTING_SECONDS = 15.0
_GATE_SECONDS = 2.0
# In the directory of all runs: held by whoever ends some of them; and how long a keeper lets that one go first.
_ENDING = ".ending"
_GIVE_WAY_SECONDS, _GIVE_WAY_LOOK_SECONDS = 10.0, 0.05
# For whoever installs a root that revokes: around the installation and ``enforce``.
urgent = priority.ahead


def give_way(path: Path) -> None:
    """By the keeper of a run whose sandbox has ended or is to: where it is revoked, or ended with its tree, wait until
    all that ends with it is gone. A tree's keepers who clean up at once take the processors from those who still die.

    Whoever ends them holds a lock, which the kernel takes from the dead; a keeper waits for a bounded time.
    """
    with contextlib.suppress(OSError):
        if marks.verdict(path) is None:
            return
        until = time.monotonic() + _GIVE_WAY_SECONDS
        while atomic_file.held(path.parent / _ENDING) and time.monotonic() < until:
            time.sleep(_GIVE_WAY_LOOK_SECONDS)


def stop(entries: Sequence[registry.Entry]) -> dict[str, list[cgroup.Leaf]]:
    """Stop the agents of these runs, all of them before any is marked; their leaves, by run id. Nothing is
    written down: what somebody stopped who was killed over it is what `resume` lets go on.
    """
    leaves: dict[str, list[cgroup.Leaf]] = {}
    with contextlib.suppress(errors.CovenantError):
        leaves = all_leaves(cgroup.Hierarchies.read(), entries, [])
        kill.stop(leaf for both in leaves.values() for leaf in both[:1])
    return leaves


def mark_stopped(entries: Sequence[registry.Entry], by: str, reason: str) -> None:
    """Say in the directory of each who ends it with its tree, and why: its keeper ends it from now on, also where
    whoever does this is killed over it. One that cannot be marked is ended all the same."""
    failed: list[str] = []
    marked: Path | None = None
    for one in entries:
        if attempt(failed, "a mark", functools.partial(marks.mark_stopped, one.path, by, reason, like=marked)):
            marked = one.path


def end_together(entries: Sequence[registry.Entry], leaves: Sequence[cgroup.Leaf], failed: list[str]) -> None:
    """Kill what is in the leaves of runs, all at once, each of which is marked and waits (``give_way``), and cut their
    networks: one after the other, the first ones' keepers would clean up while the last ones die. What is not done here
    they do; ``failed`` is told of it.
    """
    cut = disconnect.Aside(_links(entries, failed))
    attempt(failed, "processes", lambda: kill.kill(leaves))
    attempt(failed, "networks", lambda: failed.extend(cut.result()))


@contextlib.contextmanager
def going_on(path: Path) -> Iterator[None]:
    """Around the thaw of a run: nobody marks it while the block lasts, so that whoever revokes it stops it after.

    Raises:
        errors.RunRevokedError, errors.KilledError: it is marked, and stands until it is killed.
        errors.KeeperError: the gate is not free, and whoever holds it may be about to mark it.
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
            if not atomic_file.take(fd, _GATE_SECONDS, poll_seconds=0.001):
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


def all_leaves(
    hierarchies: cgroup.Hierarchies, entries: Iterable[registry.Entry], failed: list[str]
) -> dict[str, list[cgroup.Leaf]]:
    """By run id. Of one that cannot be seen there are none, and its keeper is waited for as if it had not begun."""
    found: dict[str, list[cgroup.Leaf]] = {}
    for one in entries:

        def see(one: registry.Entry = one) -> None:
            found[one.run_id] = _leaves(hierarchies, one.path)

        if not attempt(failed, f"the cgroups of run {one.run_id}", see):
            found[one.run_id] = []
    return found


def is_up(leaves: Sequence[cgroup.Leaf]) -> bool:
    """Whether somebody is seen in the agent's own leaf. Of one that cannot be seen nobody knows what is on its way."""
    try:
        return bool(leaves and kill.listed(leaves[0]))
    except errors.KernelError:
        return False


@contextlib.contextmanager
def first(runs: Path) -> Iterator[None]:
    """The processors are for deaths while the block lasts: keepers wait with what they do afterwards (``give_way``).

    Of two who end runs at once the second does without, and nothing is a condition here.
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


def outwait(entries: Collection[registry.Entry], hierarchies: cgroup.Hierarchies) -> None:
    """Kill each process that joins the cgroups of runs that are about to start, until their keepers are done with them.

    Raises:
        errors.KernelError: a keeper has not ended its run in ``_STARTING_SECONDS``.
    """
    until = time.monotonic() + _STARTING_SECONDS
    while left := [one for one in entries if registry.under_way(one.path)]:
        leaves = [leaf for one in left for leaf in _leaves(hierarchies, one.path)]
        kill.stop(leaves)
        kill.kill(leaves)
        if time.monotonic() > until:
            names = ", ".join(one.run_id for one in left)
            raise errors.KernelError(f"the keepers of {names} have not ended them after {_STARTING_SECONDS:g} s")
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
