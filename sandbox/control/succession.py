"""A newer serial of an agent id: accept it, and end the runs of the older package (ADR 0062).

    (1) behind the gate of the runs: the rules about live runs once more, the serial durable, the older runs stopped
        and marked, each with everything below it
    (2) one durable row that names them (`runs_stopped`)
    (3) all of them killed at once, their networks cut

A run of the older package is seen behind the gate and marked, or finds the newer serial there before its own label is
seen (``sandbox.lifecycle.context``). A process that is killed between (1) and (3) leaves the serial: the shims of the
older runs find it (``SerialWatch``), and so does the next recovery (``enforce``). The setting `on_newer_serial` =
"finish" ends none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy import errors
from policy.rules import succession
from policy.rules.succession import OnNewer
from policy.signing import trust
from sandbox.control import tree_kill
from sandbox.run_io import Outcome, PeriodicCheck
from sandbox.rundir import admission, directory, lock, marks, registry
from sandbox.rundir import label as rundir_label
from sandbox.rundir.registry import Entry
from sandbox.storage.trust_state import State

# How often a shim looks at the highest serial that was accepted.
LOOK_SECONDS = 2.0
# Writes a durable row `runs_stopped`, given its fields but for the operator.
Write = Callable[[Mapping[str, Any]], None]


@dataclass
class _Caught:
    """Runs that are stopped and marked. ``reasons`` is by run id; ``untold`` are those that had no mark before."""

    sweep: tree_kill.Caught = field(default_factory=tree_kill.Caught)
    reasons: dict[str, str] = field(default_factory=dict)
    untold: list[Entry] = field(default_factory=list)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The fields of the rows that name them, one for each reason."""
        for reason in dict.fromkeys(self.reasons[one.run_id] for one in self.untold):
            named = [one for one in self.untold if self.reasons[one.run_id] == reason]
            yield {"reason": reason, "runs": [{"run_id": one.run_id, "agent_id": one.agent_id} for one in named]}


def accept(
    trusted: trust.TrustedPackage,
    claim: admission.AdmissionRequest,
    state: State,
    runs: Path,
    *,
    setting: OnNewer,
    write: Write,
    now_ms: int,
) -> None:
    """Record durably that a package was accepted; where its serial is a new highest, end the older runs as well.

    A start under a serial that was accepted before takes no gate here and writes nothing. The first serial of an agent
    id takes the gate: a run of an older package may be admitted meanwhile.

    Raises:
        errors.RuleViolation, errors.ParentEndedError, errors.BusyError: a rule about live runs refuses the package:
            nothing is recorded, and nothing ends.
        errors.SignatureError, errors.TrustError, errors.StateError: as ``State.accept``.
        errors.LedgerError: the row could not be written; the older runs are ended all the same.
    """
    last = state.accepted(trusted.statement.agent_id)
    if claim.claimant is None or (last is not None and trusted.statement.serial <= last.serial):
        state.accept(trusted, now_ms=now_ms)
        return
    # INVARIANT: one turn of the gate. A run whose label is there is judged by rule 8 and marked; a run that comes later
    # finds the serial. So a refused package records none, and a recorded serial ends every older run.
    with lock.gate(runs):
        entries = registry.seen(runs)
        claim.check(entries)
        state.accept(trusted, now_ms=now_ms)
        caught = _catch(entries, state, setting)
    _end(caught, runs, write)


def enforce(runs: Path, state: State, *, setting: OnNewer, write: Write) -> list[str]:
    """End the runs of older packages that an earlier process left; return their ids.

    Raises:
        errors.LedgerError: the row could not be written; they are ended all the same.
    """
    if setting == "finish" or not runs.is_dir():
        return []
    with lock.gate(runs):
        caught = _catch(registry.seen(runs), state, setting)
    _end(caught, runs, write)
    return [one.run_id for one in caught.sweep.entries]


class SerialWatch:
    """A shim's own look at the highest serial that was accepted for its agent id.

    The first look that finds a newer one leaves the end to the process that accepted it. The second one ends the run:
    that process was killed. ``setting`` returns what the operator wants now, which may have changed since the start.
    """

    def __init__(
        self, path: Path, label: Mapping[str, str], state: State, setting: Callable[[], OnNewer], write: Write
    ) -> None:
        self._path, self._state, self._setting, self._write = path, state, setting, write
        text = label[registry.SERIAL]
        self._agent_id, self._serial = label["agent_id"], int(text) if text else None
        self._found = False

    def round(self) -> PeriodicCheck:
        """For the exchange."""
        return PeriodicCheck(LOOK_SECONDS, self.look)

    def look(self) -> Outcome:
        """The error that the run ends with, None when it goes on."""
        if self._serial is None or (setting := self._ends()) is None:
            self._found = False
            return None
        if not self._found:
            self._found = True
            return None
        with contextlib.suppress(errors.CovenantError):  # the run ends also where this fails
            enforce(self._path.parent, self._state, setting=setting, write=self._write)
        return marks.verdict(self._path) or errors.SupersededError("a newer serial of its agent id was accepted")

    def _ends(self) -> OnNewer | None:
        """Return the setting that ends the run, None when it goes on. Only an older run reads the configuration."""
        held = succession.LiveSerial(self._serial, _accepted(self._state, self._agent_id))
        if not succession.ends(held, "end"):
            return None
        setting = self._setting()
        return setting if succession.ends(held, setting) else None


def _accepted(state: State, agent_id: str) -> int | None:
    # A damaged record ends nothing: the agent id starts no more until it is restored.
    with contextlib.suppress(errors.StateError):
        last = state.accepted(agent_id)
        return None if last is None else last.serial
    return None


def _catch(entries: Sequence[Entry], state: State, setting: OnNewer) -> _Caught:
    """Behind the gate: stop and mark the older runs and everything below them."""
    agents, accepted, caught = list(registry.agents(entries)), dict[str, int | None](), _Caught()
    for one in agents if setting == "end" else ():
        if one.serial is None:
            continue
        if one.agent_id not in accepted:
            accepted[one.agent_id] = _accepted(state, one.agent_id)
        newest = accepted[one.agent_id]
        if succession.ends(succession.LiveSerial(one.serial, newest, rundir_label.STANDBY in one.label), setting):
            why = f"serial {newest} of agent `{one.agent_id}` was accepted, which is newer than {one.serial}"
            for below in registry.subtree(agents, one.run_id):
                caught.reasons.setdefault(below.run_id, why)
    runs = [one for one in agents if one.run_id in caught.reasons]
    caught.untold = [one for one in runs if marks.verdict(one.path) is None]

    def mark() -> None:
        for one in caught.untold:
            with contextlib.suppress(OSError):  # one that cannot be marked ends all the same
                directory.mark_superseded(one.path, caught.reasons[one.run_id])

    if runs:
        caught.sweep = tree_kill.catch(runs, mark, [])
    return caught


def _end(caught: _Caught, runs: Path, write: Write) -> None:
    if not caught.sweep.entries:
        return

    def rows() -> None:
        for fields in caught.rows():
            write(fields)

    with tree_kill.urgent(), tree_kill.sweep_lock(runs):
        unwritten = tree_kill.end(caught.sweep, rows, [])
    if unwritten is not None:
        raise unwritten
