"""Find runs that the log shows as started and whose process is gone, so that each gets its end row once.

A mark is a locked file below COVENANT_STATE. It is made before the start row and removed after the end row. A held lock
means that a live process will write the end. A free lock proves nothing: the log decides. A kill between a row and its
mark therefore leaves neither a start without an end nor a second end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policy import contract
from sandbox.audit.log import Ledger
from sandbox.rundir import lock
from sandbox.storage import atomic_file, json_cache

# The offset before which every run of the log has its end, so it need not be read again. Updated only now and then.
_SETTLED = ".settled"
# The usage of a killed run, until its end is written.
_USED = ".used-"
_COUNTED = frozenset(field.name for field in dataclasses.fields(contract.Usage))
_STEP_BYTES = 64 * 1024
# The process that holds the lock may read a long log, and write the ends of all runs of the machine.
TURN_SECONDS = 60.0
_DYING_SECONDS = 5.0
_STARTED, _ENDED = b'"kind":{"type":"run_started"', b'"kind":{"type":"run_ended"'
_STATE = b'"kind":{"type":"run_state"'


class OpenRunMarker:
    """Mark that this process will write the run's end. Made before the start is written.

    Raises:
        errors.KeeperError: Raised when another process writes the ends of runs for too long.
    """

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self._path = _place(ledger) / run_id
        with _gate(self._path.parent):
            self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, str(os.getpid()).encode())

    def clear(self) -> None:
        """Remove the mark: the end is written, or no start was."""
        self._path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Release the lock without the end, as if this process had ended. The next ``settling`` finds the run."""
        if self._fd >= 0:
            atomic_file.let_go(self._fd)
            self._fd = -1


@contextlib.contextmanager
def settling(ledger: Ledger) -> Iterator[list[dict[str, Any]]]:
    """Yield the start events of runs that have no end and whose process is gone. The caller writes their ends.

    ``state`` in an event's kind is the last state in the run's rows, absent if there is none. A lock lets one process
    in at a time, and no run starts meanwhile.

    Raises:
        errors.LedgerError: Raised when the log cannot be read.
        errors.KeeperError: Raised when another process holds the lock for too long.
    """
    place = _place(ledger)
    with _gate(place):
        # INVARIANT: read the marks before the log. A run that ends after this read still counts as live. A run without
        # a mark has written its end, which the log shows by now, or never will.
        until = time.monotonic() + _DYING_SECONDS  # for all of them together: no run starts meanwhile
        marks = {name: _held(place / name, until) for name in os.listdir(place) if not name.startswith(".")}
        begin = settled(ledger.place.parent)
        started: dict[str, tuple[int, dict[str, Any]]] = {}
        end = begin
        for offset, line in ledger.lines(begin):
            end = offset + len(line) + 1
            if _STARTED in line or _ENDED in line:
                event = json.loads(line)
                if event["kind"]["type"] == "run_started":
                    started[event["kind"]["run_id"]] = (offset, event)
                else:
                    started.pop(event["kind"]["run_id"], None)
            elif _STATE in line:
                kind = json.loads(line)["kind"]
                if kind["run_id"] in started:
                    started[kind["run_id"]][1]["kind"]["state"] = kind["state"]
        yield [event for run_id, (_, event) in started.items() if not marks.get(run_id)]
        for run_id, held in marks.items():
            if not held:
                (place / run_id).unlink(missing_ok=True)
                # INVARIANT: keep the usage while the mark is held. Its shim may be dying, and its end is still owed.
                (place / f"{_USED}{run_id}").unlink(missing_ok=True)
        end = min([end, *(offset for run_id, (offset, _) in started.items() if marks.get(run_id))])
        if end >= begin + _STEP_BYTES:
            json_cache.write(place / _SETTLED, {"events_bytes": end})


def note_used(state: Path, run_id: str, usage: contract.Usage) -> None:
    """Store the usage of a run whose process is gone, for its end row. Its cgroup is about to be removed.

    The first note is kept: a later process, after a kill in between, finds no counters any more.
    """
    is_owed = (state / "unended" / run_id).exists()
    if is_owed and used(state, run_id) is None:
        json_cache.write(state / "unended" / f"{_USED}{run_id}", dataclasses.asdict(usage))


def used(state: Path, run_id: str) -> contract.Usage | None:
    """Return the stored usage. Returns None if there is none, or if a version with other counters wrote it."""
    found = json_cache.read(state / "unended" / f"{_USED}{run_id}")
    if found is None or found.keys() != _COUNTED or not all(_is_count(value) for value in found.values()):
        return None
    return contract.Usage(**found)


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


def settled(state: Path) -> int:
    """Return the offset in the log of COVENANT_STATE before which every started run has its end."""
    found = (json_cache.read(state / "unended" / _SETTLED) or {}).get("events_bytes")
    return found if type(found) is int and found >= 0 else 0


def forget_settled(state: Path) -> None:
    """Forget the offset after the log was cut: offsets in the old file mean nothing in the new one."""
    with contextlib.suppress(FileNotFoundError):
        (state / "unended" / _SETTLED).unlink()


def named(state: Path, begin: str) -> str | None:
    """Return the one run without an end whose id has this prefix. Returns None if there is none or several."""
    with contextlib.suppress(FileNotFoundError):
        found = [name for name in os.listdir(state / "unended") if begin and name.startswith(begin)]
        return found[0] if len(found) == 1 and not begin.startswith(".") else None
    return None


def start_of(state: Path, run_id: str) -> dict[str, Any] | None:
    """Return the start row of a run whose end is still to be written."""
    name = json.dumps(run_id).encode()
    with contextlib.suppress(OSError), (state / "audit" / "events.jsonl").open("rb") as stream:
        stream.seek(settled(state))
        for line in stream:
            if _STARTED in line and name in line and line.endswith(b"\n"):
                event: dict[str, Any] = json.loads(line)
                if event["kind"]["run_id"] == run_id:
                    return event
    return None


def is_open(state: Path, run_id: str) -> bool:
    """Whether a live process will write the run's end."""
    return atomic_file.held(state / "unended" / run_id)


def _place(ledger: Ledger) -> Path:
    place = ledger.place.parent / "unended"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def _held(path: Path, until: float) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False  # its run has just ended
    try:
        return not lock.free(fd, until - time.monotonic())
    finally:
        atomic_file.let_go(fd)


@contextlib.contextmanager
def _gate(place: Path) -> Iterator[None]:
    """Lock the directory of marks, so that no process sees a mark between its creation and its lock."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        atomic_file.turn(fd, where=str(place), seconds=TURN_SECONDS)
        yield
    finally:
        atomic_file.let_go(fd)
