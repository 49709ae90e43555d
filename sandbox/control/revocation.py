"""Revocation that reaches the kernel: what is revoked while it runs is stopped, cut off and ended, and all below it.

Whoever installs a trust root that revokes has ``enforce`` do it. It asks no keeper: it acts on cgroups and links
itself, and the keepers of the runs find a mark in their directories and write the last rows.

    what is stopped first              rests on a root that is verified and not installed yet: agents that run keep the
                                       processors from whoever writes to the disk, which took seconds
    a label is shown behind the gate   by a keeper that saw there which root holds, and no mark above (``refuse``)
    marks are set behind the gate      on every label that can be seen, and again once the root is there: whoever comes
                                       later finds the root or the mark
    a cgroup is made before the mark   is looked for: whoever joins it later stands, and is killed
    a cgroup is made after the mark    by a keeper that looks for the mark next, and starts nothing
    what stands is let go on           behind the gate, by a keeper that saw no mark there (``going_on``)

Each keeper looks at its mark and at the root's version as well (``Watch``), so that a command that was killed between
two of its steps leaves nothing running that it marked, or that a root which is installed revokes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy import errors
from policy.signing import authority, strict_json
from policy.signing.root import TrustRoot
from sandbox.kernel.cgroup import cgroup, kill
from sandbox.kernel.proc import priority
from sandbox.network import disconnect
from sandbox.network.gate import cgroup as gate_cgroup
from sandbox.run_io import Outcome, Round
from sandbox.rundir import directory, registry
from sandbox.storage import atomic_file
from sandbox.storage.trust_state import State

# The field of a label that says what the run rests on (policy.signing.authority).
AUTHORITY = "authority"
# How often a keeper looks for its mark, and at every which look at the root's version: for what nobody announced.
_LOOK_SECONDS, _VERSION_EVERY = 0.25, 8
_STARTING_SECONDS = 15.0
_GATE_SECONDS = 2.0
# In the directory of all runs: held by whoever ends some of them; and how long a keeper lets that one go first.
_ENDING = ".ending"
_GIVE_WAY_SECONDS, _GIVE_WAY_LOOK_SECONDS = 10.0, 0.05


@dataclass(frozen=True, slots=True)
class Ended:
    """One run that was ended: ``because`` is the run whose manifest was revoked, itself or one above it."""

    run_id: str
    agent_id: str
    because: str
    reason: str

    def row(self) -> dict[str, str]:
        """As it stands in the log."""
        return {"run_id": self.run_id, "agent_id": self.agent_id, "because": self.because, "reason": self.reason}


# For whoever installs a root that revokes: around the installation and ``enforce``.
urgent = priority.ahead

# Writes the one durable row of an enforcement before anything is done, given its fields but for the operator.
Write = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Enforced:
    """What an enforcement came to: the runs that it ended, and in words what of it could not be done.

    ``refused`` is why the root could not be installed; those that rest on what it revokes were ended all the same.
    """

    ended: tuple[Ended, ...] = ()
    failed: tuple[str, ...] = ()
    refused: errors.CovenantError | None = None


NOTHING = Enforced()


def enforce(
    runs: Path,
    root: TrustRoot,
    *,
    write: Write,
    own: Path | None = None,
    install: Callable[[], object] | None = None,
) -> Enforced:
    """End every live run below ``runs`` that rests on what ``root`` revokes, each with everything below it.

    (1) behind the gate: which runs rest on it, and which are below those
    (2) all of them stopped: what stands sends nothing, and leaves the processors to the disk
    (3) a mark in the directory of each, so that its keeper starts nothing more and says why it ended; then their gates
        stopped, and what came between (2) and the mark: what somebody stopped who was killed before the mark is what
        `resume` lets go on, which knows nothing of gates
    (4) ``install``, where the root does not hold yet, and (1) to (3) once more, for what was shown before it did
    (5) one durable row that names them
    (6) all their networks cut, while
    (7) all of them are killed, and waited for; until here their keepers wait for us (``give_way``)
    (8) those whose keepers were about to start them: until each keeper has found its mark

    ``own`` is the run of the keeper that does it, which cannot wait for itself in (8). Whoever gives ``install`` has
    verified that ``root`` may follow the one that holds.

    A root that cannot be installed, a row or a mark that cannot be written, a link that cannot be cut, a gate that
    somebody does not let go of keep nobody alive: they are in ``failed``.

    Raises:
        errors.CovenantError: what ``install`` raised, when nothing rests on what the root revokes.
    """
    refused = None
    with contextlib.ExitStack() as stack:
        sweep = _Sweep(runs, root, stack)
        if install is not None:
            sweep.try_to_catch()  # whatever fails of it keeps no root from being installed
            try:
                install()
            except errors.CovenantError as e:
                if not sweep.caught:
                    raise
                refused = e
        if sweep.caught:
            sweep.try_to_catch(write)
        else:
            sweep.catch(write)
        if not sweep.caught:
            return NOTHING
        sweep.end()
    sweep.outwait(own)
    return sweep.enforced(refused)


class _Sweep:
    """One enforcement on its way. What it holds so that keepers wait is let go of with ``stack``."""

    def __init__(self, runs: Path, root: TrustRoot, stack: contextlib.ExitStack) -> None:
        self._runs, self._root, self._stack = runs, root, stack
        self._hierarchies: cgroup.Hierarchies | None = None
        self._hit: dict[str, Ended] = {}
        self._leaves: dict[str, list[cgroup.Leaf]] = {}
        self._late: list[registry.Entry] = []
        self._failed: list[str] = []
        # Parents first.
        self.caught: list[registry.Entry] = []

    def try_to_catch(self, write: Write | None = None) -> None:
        """``catch``; that it failed is said."""
        _try(self._failed, "the live runs", lambda: self.catch(write))

    def catch(self, write: Write | None = None) -> None:
        """(1) to (3) of ``enforce``, for those that were not caught before; and (5) with ``write``."""
        if not self._runs.is_dir():
            return
        with _gate(self._runs, self._failed):
            entries = registry.seen(self._runs)
            hit = _hit(entries, self._root)
            known = {one.run_id for one in self.caught}
            found = [one for one in entries if one.run_id in hit and one.run_id not in known]
            if found:
                self._stop({run_id: one for run_id, one in hit.items() if run_id not in known}, found)
            if write is not None and self.caught:
                self._tell(write)

    def _stop(self, hit: Mapping[str, Ended], found: list[registry.Entry]) -> None:
        if self._hierarchies is None:
            self._hierarchies = cgroup.Hierarchies.read()
            self._stack.enter_context(first(self._runs))
        self._hit.update(hit)
        leaves = _all_leaves(self._hierarchies, found, self._failed)
        unmarked = [one for one in found if directory.revoked_of(one.path) is None]
        kill.stop(leaf for both in leaves.values() for leaf in both[:1])  # (2)
        # INVARIANT: nothing is done between the stop and the mark.
        _mark(unmarked, hit, self._failed)  # (3)
        kill.stop(leaf for both in leaves.values() for leaf in both[1:])
        late = [one for one in found if not _is_up(leaves[one.run_id])]
        leaves.update(_all_leaves(self._hierarchies, late, self._failed))
        kill.stop(leaf for one in late for leaf in leaves[one.run_id])
        self._leaves.update(leaves)
        self._late += late
        self.caught = sorted((*self.caught, *found), key=lambda one: one.depth)

    def _tell(self, write: Write) -> None:
        """Another may be at it, or was killed over it: each is named once, and ended as often as it is asked for."""
        untold = [one for one in self.caught if not directory.is_told(one.path)]
        if not untold:
            return
        fields = {"version": self._root.version, "runs": [self._hit[one.run_id].row() for one in untold]}
        if _try(self._failed, "the log", lambda: write(fields)):
            for one in untold:
                with contextlib.suppress(OSError):  # it has no mark, or has ended meanwhile
                    directory.told(one.path)

    def end(self) -> None:
        """(6) and (7)."""
        every = [leaf for one in self.caught for leaf in self._leaves[one.run_id]]
        end_together(self.caught, every, self._failed)

    def outwait(self, own: Path | None) -> None:
        """(8)."""
        assert self._hierarchies is not None
        starting, hierarchies = [one for one in self._late if one.path != own], self._hierarchies
        _try(self._failed, "runs about to start", lambda: _outwait(starting, hierarchies))

    def enforced(self, refused: errors.CovenantError | None) -> Enforced:
        """What it came to; what failed twice is said once."""
        return Enforced(
            tuple(self._hit[one.run_id] for one in self.caught), tuple(dict.fromkeys(self._failed)), refused
        )


def refuse(state: State, root_version: int | None, ancestors: Collection[Path], line: str = "") -> None:
    """Behind the gate, before a label can be seen: whether the run may still start.

    ``root_version`` is that under which it was verified, None for a package that nobody signed; ``ancestors`` are the
    directories of the runs above it, and ``line`` is what it rests on with them (``line_below``).

    Raises:
        errors.TrustError: another root holds now.
        errors.RevokedError: a run above it is being ended, or rests on what is revoked and is gone already.
    """
    if root_version is not None and (version := state.root_version()) != root_version:
        raise errors.TrustError(
            f"the package was verified under trust root version {root_version}, {version} holds now",
            hint="run it again",
            where=str(state.path),
        )
    for path in ancestors:
        if (ended := directory.verdict(path)) is not None:
            raise errors.RevokedError(f"run {path.name}, above this one, is being ended: {ended.message}")
    if ancestors and line:
        root = state.present_root()
        for one in authority.decode(line):
            if (reason := one.revoked(root)) is not None:
                raise errors.RevokedError(f"run {one.run_id}, which this one rests on: {reason}")


def line_below(runs: Path, parent: str, own: authority.Authority | None) -> str:
    """What a run rests on, for its label: what its parent does, and its own statement. Empty where nobody signed.

    Raises:
        errors.RevokedError: the parent is gone.
    """
    above: tuple[authority.Authority, ...] = ()
    if parent:
        label = directory.label_of(runs / parent)
        if label is None:
            raise errors.RevokedError(f"run {parent}, which was to be above this one, is gone")
        above = _line(label)
    line = (*above, *([own] if own is not None else []))
    return authority.encode(line) if line else ""


class Watch:
    """A keeper's own look: at the mark in its run's directory, and at whether a new root revokes what it rests on.

    ``state`` is None for a run that no trust root of an operator decides about (covenant dev). ``version`` is that of
    the root that it was verified under, None for what nobody signed: one that came since may revoke what it rests on,
    also where whoever installed it was killed over it.
    """

    def __init__(
        self, path: Path, label: Mapping[str, str], state: State | None, write: Write, *, version: int | None = None
    ) -> None:
        self._path, self._state, self._write = path, state, write
        self._line = _line(label)
        if version is None:
            version = state.root_version() if state is not None else 0
        self._version = self._seen = version
        self._looks = 0

    def round(self) -> Round:
        """For the exchange: also just before the agent is given its intent."""
        return Round(_LOOK_SECONDS, self.look, at_start=True)

    def look(self) -> Outcome:
        """The error that the run ends with, None when it goes on."""
        self._looks += 1
        outcome = self._look_at_the_root() if self._looks % _VERSION_EVERY == 0 else None
        return directory.verdict(self._path) or outcome

    def _look_at_the_root(self) -> Outcome:
        if self._state is None or (version := self._state.root_version()) == self._version:
            return None
        if version != self._seen:  # whoever installs it enforces it next: only at the second look is that left to us
            self._seen = version
            return None
        root = self._state.present_root()
        reason = next((why for one in self._line if (why := one.revoked(root)) is not None), None)
        if reason is None:
            self._version = version
            return None
        enforce(self._path.parent, root, write=self._write, own=self._path)
        # Also where no mark could be written: on a full disk it would go on for good.
        return errors.RunRevokedError(reason)


def give_way(path: Path) -> None:
    """By the keeper of a run whose sandbox has ended or is to: where it is revoked, or ended with its tree, wait until
    all that ends with it is gone. A tree's keepers who clean up at once take the processors from those who still die.

    Whoever ends them holds a lock, which the kernel takes from the dead; a keeper waits for a bounded time.
    """
    with contextlib.suppress(OSError):
        if directory.verdict(path) is None:
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
        leaves = _all_leaves(cgroup.Hierarchies.read(), entries, [])
        kill.stop(leaf for both in leaves.values() for leaf in both[:1])
    return leaves


def mark_stopped(entries: Sequence[registry.Entry], by: str, reason: str) -> None:
    """Say in the directory of each who ends it with its tree, and why: its keeper ends it from now on, also where
    whoever does this is killed over it. One that cannot be marked is ended all the same."""
    failed: list[str] = []
    marked: Path | None = None
    for one in entries:
        if _try(failed, "a mark", functools.partial(directory.mark_stopped, one.path, by, reason, like=marked)):
            marked = one.path


def end_together(entries: Sequence[registry.Entry], leaves: Sequence[cgroup.Leaf], failed: list[str]) -> None:
    """Kill what is in the leaves of runs, all at once, each of which is marked and waits (``give_way``), and cut their
    networks: one after the other, the first ones' keepers would clean up while the last ones die. What is not done here
    they do; ``failed`` is told of it.
    """
    cut = disconnect.Aside(_links(entries, failed))
    _try(failed, "processes", lambda: kill.kill(leaves))
    _try(failed, "networks", lambda: failed.extend(cut.result()))


@contextlib.contextmanager
def going_on(path: Path) -> Iterator[None]:
    """Around the thaw of a run: nobody marks it while the block lasts, so that whoever revokes it stops it after.

    Raises:
        errors.RunRevokedError, errors.KilledError: it is marked, and stands until it is killed.
        errors.KeeperError: the gate is not free, and whoever holds it may be about to mark it.
    """
    failed: list[str] = []
    with _gate(path.parent, failed):
        if (revoked := directory.verdict(path)) is not None:
            raise revoked
        if failed:
            raise errors.KeeperError("the gate of the runs is not free", hint="ask again")
        yield


def _hit(entries: Sequence[registry.Entry], root: TrustRoot) -> dict[str, Ended]:
    """By run id, those that must end. Self-tests hold no agent."""
    agents = list(registry.agents(entries))
    found: dict[str, Ended] = {}
    for one in agents:
        because = _because(one, root)
        if because is not None:
            for below in registry.subtree(agents, one.run_id):
                found.setdefault(below.run_id, Ended(below.run_id, below.agent_id, *because))
    return found


def _mark(entries: Iterable[registry.Entry], hit: Mapping[str, Ended], failed: list[str]) -> None:
    marked: dict[str, Path] = {}
    for one in entries:
        reason = hit[one.run_id].reason
        mark = functools.partial(directory.mark_revoked, one.path, reason, like=marked.get(reason))
        if _try(failed, "a mark", mark):
            marked.setdefault(reason, one.path)


def _because(entry: registry.Entry, root: TrustRoot) -> tuple[str, str] | None:
    """The first of the runs that it rests on whose statement is revoked, and why."""
    try:
        line = _line(entry.label)
    except strict_json.MalformedError as e:
        # Nothing but root writes there. What cannot be judged does not go on.
        return entry.run_id, f"what the run rests on cannot be read: {e}"
    for one in line:
        reason = one.revoked(root)
        if reason is not None:
            return one.run_id, reason
    return None


def _line(label: Mapping[str, str]) -> tuple[authority.Authority, ...]:
    text = label.get(AUTHORITY, "")
    return authority.decode(text) if text else ()


@contextlib.contextmanager
def _gate(runs: Path, failed: list[str]) -> Iterator[None]:
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


def _all_leaves(
    hierarchies: cgroup.Hierarchies, entries: Iterable[registry.Entry], failed: list[str]
) -> dict[str, list[cgroup.Leaf]]:
    """By run id. Of one that cannot be seen there are none, and its keeper is waited for as if it had not begun."""
    found: dict[str, list[cgroup.Leaf]] = {}
    for one in entries:

        def see(one: registry.Entry = one) -> None:
            found[one.run_id] = _leaves(hierarchies, one.path)

        if not _try(failed, f"the cgroups of run {one.run_id}", see):
            found[one.run_id] = []
    return found


def _is_up(leaves: Sequence[cgroup.Leaf]) -> bool:
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

        _try(failed, f"the network of run {one.run_id}", see)
    return found


def _outwait(entries: Collection[registry.Entry], hierarchies: cgroup.Hierarchies) -> None:
    """Runs in which nothing ran yet: what joins their cgroups is killed, until their keepers are done with them."""
    until = time.monotonic() + _STARTING_SECONDS
    while left := [one for one in entries if registry.under_way(one.path)]:
        leaves = [leaf for one in left for leaf in _leaves(hierarchies, one.path)]
        kill.stop(leaves)
        kill.kill(leaves)
        if time.monotonic() > until:
            names = ", ".join(one.run_id for one in left)
            raise errors.KernelError(f"the keepers of {names} have not ended them after {_STARTING_SECONDS:g} s")
        time.sleep(0.005)


def _try(failed: list[str], what: str, act: Callable[[], object]) -> bool:
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
