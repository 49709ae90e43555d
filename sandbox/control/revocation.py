"""Enforce a revocation in the kernel: suspend, disconnect and kill every live run that rests on it, with its subtree.

The process that installs a revoking trust root calls ``enforce``. It asks no shim: it acts on cgroups and links itself.
The shims of the runs find a mark in their directories and write the last rows. "Behind the gate" means: with the lock
of the runs directory held. The order decides each race:

    runs are stopped before the root   the new root is verified and not installed yet: running agents would take the CPU
                                       from the process that writes to the disk, which took seconds
    a label is shown behind the gate   by a shim that saw there which root is installed, and no mark above (``refuse``)
    marks are set behind the gate      on every visible label, and again once the root is installed: a later run finds
                                       the root or the mark
    a cgroup is made before the mark   it is found: a process that joins it later is frozen there, and killed
    a cgroup is made after the mark    by a shim that checks for the mark next, and starts nothing
    a stopped run is thawed            behind the gate, by a shim that saw no mark there (``allow_thaw``)

Each shim also checks its mark and the root's version (``Watch``). So a command that was killed between two of its steps
leaves no run that it marked, and no run that an installed root revokes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from policy import errors
from policy.signing import authority, strict_json
from policy.signing.root import TrustRoot
from sandbox.control import tree_kill
from sandbox.rundir import label as rundir_label
from sandbox.rundir import marks, registry
from sandbox.storage.trust_state import State

# The field of a label with the authority that the run rests on (policy.signing.authority).
AUTHORITY = "authority"


class Ended(Struct, frozen=True):
    """Name one run that was ended. ``because`` is the run whose manifest was revoked: itself or one above it."""

    run_id: str
    agent_id: str
    because: str
    reason: str

    def row(self) -> dict[str, str]:
        """Return the fields for the log."""
        return {"run_id": self.run_id, "agent_id": self.agent_id, "because": self.because, "reason": self.reason}


# Writes the one durable row of an enforcement before anything is done, given its fields but for the operator.
Write = Callable[[Mapping[str, Any]], None]


class Enforced(Struct, frozen=True):
    """Report an enforcement: the runs that it ended, and in words the steps that failed.

    ``refused`` is the reason that the root could not be installed. The runs that rest on what it revokes were ended
    anyway.
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
    """End every live run below ``runs`` that rests on what ``root`` revokes, each with its subtree.

    (1) behind the gate: find the runs that rest on it, and those below them
    (2) stop all of them: a frozen agent sends nothing, and leaves the CPU to the disk's writer
    (3) mark the directory of each, so that its shim starts nothing more and reports the reason; then stop their gates,
        and any run that came between (2) and the mark. If this process dies before the mark, `resume` thaws the
        agents, and it does not know of gates
    (4) call ``install``, where the root is not installed yet, then repeat (1) to (3) for the runs that came before it
    (5) write one durable row that names them
    (6) disconnect all their networks, while
    (7) all of them are killed and waited for; until here their shims wait (``wait_for_sweep``)
    (8) wait for the shims that were about to start a run, until each has found its mark

    ``own`` is the run of the calling shim, which cannot wait for itself in (8). A caller that passes ``install`` has
    verified that ``root`` may follow the installed one.

    A root that cannot be installed, a failed row or mark, a link that stays, or a gate that is still held keeps no run
    alive. These failures are in ``failed``.

    Raises:
        errors.CovenantError: Raised when ``install`` failed and nothing rests on what the root revokes.
    """
    refused = None
    with contextlib.ExitStack() as stack:
        sweep = _Sweep(runs, root, stack)
        if install is not None:
            sweep.try_to_catch()  # no failure here may keep the root from being installed
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
    """Carry out one enforcement. Closing ``stack`` releases the locks that shims wait for."""

    def __init__(self, runs: Path, root: TrustRoot, stack: contextlib.ExitStack) -> None:
        self._runs, self._root, self._stack = runs, root, stack
        self._hit: dict[str, Ended] = {}
        self._parts: list[tree_kill.Caught] = []
        self._failed: list[str] = []
        # Parents first.
        self.caught: list[registry.Entry] = []

    def try_to_catch(self, write: Write | None = None) -> None:
        """``catch``; that it failed is said."""
        tree_kill.attempt(self._failed, "the live runs", lambda: self.catch(write))

    def catch(self, write: Write | None = None) -> None:
        """(1) to (3) of ``enforce``, for those that were not caught before; and (5) with ``write``."""
        if not self._runs.is_dir():
            return
        with tree_kill.runs_gate(self._runs, self._failed):
            entries = registry.seen(self._runs)
            hit = _hit(entries, self._root)
            known = {one.run_id for one in self.caught}
            found = [one for one in entries if one.run_id in hit and one.run_id not in known]
            if found:
                self._stop({run_id: one for run_id, one in hit.items() if run_id not in known}, found)
            if write is not None and self.caught:
                self._tell(write)

    def _stop(self, hit: Mapping[str, Ended], found: list[registry.Entry]) -> None:
        """(2) and (3)."""
        if not self._parts:
            self._stack.enter_context(tree_kill.sweep_lock(self._runs))
        self._hit.update(hit)
        unmarked = [one for one in found if marks.revoked_of(one.path) is None]
        mark = functools.partial(_mark, unmarked, hit, self._failed)
        self._parts.append(tree_kill.catch(found, mark, self._failed))
        self.caught = sorted((*self.caught, *found), key=lambda one: one.depth)

    def _tell(self, write: Write) -> None:
        """Another may be at it, or was killed over it: each is named once, and ended as often as it is asked for."""
        untold = [one for one in self.caught if not marks.is_told(one.path)]
        if not untold:
            return
        fields = {"version": self._root.version, "runs": [self._hit[one.run_id].row() for one in untold]}
        if tree_kill.attempt(self._failed, "the log", lambda: write(fields)):
            for one in untold:
                with contextlib.suppress(OSError):  # it has no mark, or has ended meanwhile
                    marks.told(one.path)

    def end(self) -> None:
        """(6) and (7)."""
        every = [leaf for part in self._parts for leaf in part.every_leaf()]
        tree_kill.end_together(self.caught, every, self._failed)

    def outwait(self, own: Path | None) -> None:
        """(8)."""
        starting = [one for part in self._parts for one in part.starting if one.path != own]
        tree_kill.attempt(self._failed, "runs about to start", lambda: tree_kill.outwait(starting))

    def enforced(self, refused: errors.CovenantError | None) -> Enforced:
        """Return the report; a failure that occurred twice is listed once."""
        return Enforced(
            tuple(self._hit[one.run_id] for one in self.caught), tuple(dict.fromkeys(self._failed)), refused
        )


def refuse(state: State, root_version: int | None, ancestors: Collection[Path], line: str = "") -> None:
    """Refuse a run that may not start any more. Called behind the gate, before its label can be seen.

    ``root_version`` is the root that it was verified under, None for an unsigned package. ``ancestors`` are the
    directories of the runs above it. ``line`` is the authority that it rests on together with them (``line_below``).

    Raises:
        errors.TrustError: Raised when another root is installed now.
        errors.RevokedError: Raised when a run above it is being ended, or rested on what is revoked and is gone.
    """
    if root_version is not None and (version := state.root_version()) != root_version:
        raise errors.TrustError(
            f"the package was verified under trust root version {root_version}, {version} holds now",
            hint="run it again",
            where=str(state.path),
        )
    for path in ancestors:
        if (ended := marks.verdict(path)) is not None:
            raise errors.RevokedError(f"run {path.name}, above this one, is being ended: {ended.message}")
    if ancestors and line:
        root = state.present_root()
        for one in authority.decode(line):
            if (reason := one.revoked(root)) is not None:
                raise errors.RevokedError(f"run {one.run_id}, which this one rests on: {reason}")


def line_below(runs: Path, parent: str, own: authority.Authority | None) -> str:
    """Return the authority that a run rests on, for its label: its parent's and its own statement. Empty if unsigned.

    Raises:
        errors.RevokedError: Raised when the parent is gone.
    """
    above: tuple[authority.Authority, ...] = ()
    if parent:
        label = rundir_label.label_of(runs / parent)
        if label is None:
            raise errors.RevokedError(f"run {parent}, which was to be above this one, is gone")
        above = line_of(label)
    line = (*above, *([own] if own is not None else []))
    return authority.encode(line) if line else ""


def _hit(entries: Sequence[registry.Entry], root: TrustRoot) -> dict[str, Ended]:
    """Return the runs that must end, by run id. Self-tests hold no agent."""
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
        mark = functools.partial(marks.mark_revoked, one.path, reason, like=marked.get(reason))
        if tree_kill.attempt(failed, "a mark", mark):
            marked.setdefault(reason, one.path)


def _because(entry: registry.Entry, root: TrustRoot) -> tuple[str, str] | None:
    """Return the first of the runs that it rests on whose statement is revoked, and the reason."""
    try:
        line = line_of(entry.label)
    except strict_json.MalformedJsonError as e:
        # Nothing but root writes there. What cannot be judged does not go on.
        return entry.run_id, f"what the run rests on cannot be read: {e}"
    for one in line:
        reason = one.revoked(root)
        if reason is not None:
            return one.run_id, reason
    return None


def line_of(label: Mapping[str, str]) -> tuple[authority.Authority, ...]:
    text = label.get(AUTHORITY, "")
    return authority.decode(text) if text else ()
