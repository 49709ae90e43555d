"""The live runs, read from their directories behind the gate of the runs.

The directories are the only list, so that a killed process loses nothing. A run counts from the moment its label can be
seen until its directory is gone or its lock is free. The kernel frees the lock when the keeper dies.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from sandbox.rundir import directory, lock
from sandbox.rundir import label as rundir_label
from sandbox.storage import atomic_file

# The field of a label with the serial of the run's signed statement; empty where no operator's key signed it.
SERIAL = "serial"
# The field of a label with what the run writes (policy.rules.writers).
WRITES = "writes"
# One word, written by the keeper of the run (policy.lifecycle); absent before the first.
STATE = "state"


class Entry(Struct, frozen=True):
    """One live run. ``parent`` is empty without one; ``ancestors`` are run ids from the root down, the parent last.

    ``signers`` are key ids. ``memory_mb``, ``pids_max`` and ``cpu_millis`` are its ceilings, and ``host_memory_mb``
    what it may take of this machine, its sandbox included. ``max_depth`` and ``max_descendants`` are what it may
    start, 0 for nothing. ``self_test`` is true of a run in which no agent is.
    """

    run_id: str
    path: Path
    agent_id: str
    package: str
    payload_digest: str
    operator: str
    issuer: Mapping[str, str]
    parent: str
    depth: int
    ancestors: tuple[str, ...]
    signers: tuple[str, ...]
    started_ms: int
    memory_mb: int
    pids_max: int
    cpu_millis: int
    host_memory_mb: int
    max_depth: int
    max_descendants: int
    on_parent_exit: str
    self_test: bool
    label: Mapping[str, str]

    @property
    def cgroups(self) -> dict[str, Path]:
        """Where its cgroups lie, by controller; empty before they were planned."""
        return directory.cgroups_of(self.path)

    @property
    def serial(self) -> int | None:
        """The serial of its signed statement; None for a run that no operator's key signed."""
        return int(text) if (text := self.label.get(SERIAL, "")).isdigit() else None

    @property
    def keeper(self) -> int:
        """The process that holds the run, 0 when there is none to name."""
        return lock.owner_of(self.path)

    @property
    def state(self) -> str:
        """The state that its keeper wrote last; empty before the first."""
        try:
            return (self.path / STATE).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""


def live(runs: Path) -> list[Entry]:
    """Every live run below ``runs``, by the time of its start, then by id; self-tests are among them."""
    if not runs.is_dir():
        return []
    with lock.gate(runs):
        return seen(runs)


def seen(runs: Path, *, but: str = "") -> list[Entry]:
    """As ``live``, for a caller that holds the gate: the answer holds until the gate is left. ``but`` is left out."""
    with os.scandir(runs) as names:
        there = [one.name for one in names if one.name != but and one.is_dir()]
    found = (_entry(runs / name) for name in there if atomic_file.held(f"{runs}/{name}/lock"))
    return sorted((one for one in found if one is not None), key=lambda one: (one.started_ms, one.run_id))


def left(runs: Path) -> list[Entry]:
    """Return the runs whose process is gone and that are not cleared away yet, for a caller that holds the gate."""
    with os.scandir(runs) as names:
        there = [one.name for one in names if one.is_dir()]
    found = (_entry(runs / name) for name in there if not atomic_file.held(f"{runs}/{name}/lock"))
    return [one for one in found if one is not None]


def subtree(entries: Iterable[Entry], run_id: str) -> list[Entry]:
    """The run itself, when it is there, and every run below it, parents before children."""
    below = [one for one in entries if one.run_id == run_id or run_id in one.ancestors]
    return sorted(below, key=lambda one: (one.depth, one.started_ms, one.run_id))


def held_under(entries: Collection[Entry], run_id: str) -> list[Entry]:
    """Return the runs that count in the sums of this one: its children, and descendants whose parents are gone."""
    live = {one.run_id for one in entries}
    return [one for one in entries if next((up for up in reversed(one.ancestors) if up in live), "") == run_id]


def agents(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Those in which an agent is: no self-tests."""
    return (one for one in entries if not one.self_test)


def _entry(path: Path) -> Entry | None:
    label = rundir_label.label_of(path)
    if label is None:
        return None
    return Entry(
        run_id=path.name,
        path=path,
        agent_id=label.get("agent_id", ""),
        package=label.get("package", ""),
        payload_digest=label.get("payload_digest", ""),
        operator=label.get("operator", ""),
        issuer={name: label.get(name, "") for name in ("display", "pubkey")},
        parent=label.get("parent", ""),
        depth=_number(label, "depth"),
        ancestors=tuple(label.get("ancestors", "").split()),
        signers=tuple(label.get("signers", "").split()),
        started_ms=_number(label, "started_ms"),
        memory_mb=_number(label, "memory_mb"),
        pids_max=_number(label, "pids_max"),
        cpu_millis=_number(label, "cpu_millis"),
        host_memory_mb=_number(label, "host_memory_mb"),
        max_depth=_number(label, "max_depth"),
        max_descendants=_number(label, "max_descendants"),
        on_parent_exit=label.get("on_parent_exit", "") or "terminate",
        self_test=rundir_label.SELF_TEST in label,
        label=label,
    )


def _number(label: Mapping[str, str], name: str) -> int:
    """A field of a label as a number; what is absent is 0."""
    text = label.get(name, "")
    return int(text) if text.isdigit() else 0


def held(path: Path) -> bool:
    """Whether a process holds the run's lock."""
    return atomic_file.held(path / "lock")


def under_way(path: Path) -> bool:
    """Whether there is a run still. Its directory may stay a moment longer (directory.RunDirectory.vacate).

    A keeper removes the network of the run only after the client has read its answer.
    """
    return held(path) and rundir_label.label_of(path) is not None
