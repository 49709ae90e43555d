"""Which runs the log shows as started whose process is gone: each gets its end, once.

A run is marked before its start is written and unmarked after its end is: a locked file below COVENANT_STATE, which
says that somebody lives who will write the end. A mark whose lock is free says nothing by itself; what the log holds
decides, so that a kill between a row and its mark leaves neither a start without an end nor a second end.
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

# Up to where every run of the log has its end: what need not be read again. Moved on now and then alone.
_SETTLED = ".settled"
# What a run had used that was killed, until its end is written.
_USED = ".used-"
_COUNTED = frozenset(field.name for field in dataclasses.fields(contract.Usage))
_STEP_BYTES = 64 * 1024
# Whoever has the turn may read a long log, and write the ends of all that a machine had running.
_TURN_SECONDS = 60.0
_DYING_SECONDS = 5.0
_STARTED, _ENDED = b'"kind":{"type":"run_started"', b'"kind":{"type":"run_ended"'
_STATE = b'"kind":{"type":"run_state"'


class Mark:
    """This process will write the run's end. Made before the start is written.

    Raises:
        errors.KeeperError: ends of others are being written for too long.
    """

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        self._path = _place(ledger) / run_id
        with _gate(self._path.parent):
            self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, str(os.getpid()).encode())

    def clear(self) -> None:
        """The end is written, or no start was."""
        self._path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Nobody here writes it any more, as if this process had ended: whoever comes next does."""
        if self._fd >= 0:
            atomic_file.let_go(self._fd)
            self._fd = -1


@contextlib.contextmanager
def settling(ledger: Ledger) -> Iterator[list[dict[str, Any]]]:
    """The events of runs that were started, have no end, and whose process is gone: whoever asks writes their ends.
    ``state`` in an event's kind is the state that the run's own rows have last; absent when it began none since.

    One at a time, and no run starts meanwhile: what is seen here is seen by nobody else.

    Raises:
        errors.LedgerError: the log cannot be read.
        errors.KeeperError: another is at it for too long.
    """
    place = _place(ledger)
    with _gate(place):
        # INVARIANT: the marks first. A run that ends after this look still counts as live; one that had no mark then
        # has written its end, which the log shows now, or never will.
        until = time.monotonic() + _DYING_SECONDS  # of all of them together: no run starts meanwhile
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
                # INVARIANT: not that of one whose mark is held: its keeper may just be killed, and its end is to come.
                (place / f"{_USED}{run_id}").unlink(missing_ok=True)
        end = min([end, *(offset for run_id, (offset, _) in started.items() if marks.get(run_id))])
        if end >= begin + _STEP_BYTES:
            json_cache.write(place / _SETTLED, {"events_bytes": end})


def note_used(state: Path, run_id: str, usage: contract.Usage) -> None:
    """What a run had used whose process is gone, for whoever writes its end: what counted it is about to be removed.
    What was noted first stands: who comes after somebody that was killed over it finds nothing that counts."""
    is_owed = (state / "unended" / run_id).exists()
    if is_owed and used(state, run_id) is None:
        json_cache.write(state / "unended" / f"{_USED}{run_id}", dataclasses.asdict(usage))


def used(state: Path, run_id: str) -> contract.Usage | None:
    """What was noted so; None where nothing was, or what a version wrote that counted something else."""
    found = json_cache.read(state / "unended" / f"{_USED}{run_id}")
    if found is None or found.keys() != _COUNTED or not all(_is_count(value) for value in found.values()):
        return None
    return contract.Usage(**found)


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


def settled(state: Path) -> int:
    """The byte of the log of COVENANT_STATE before which every run that was started has its end."""
    found = (json_cache.read(state / "unended" / _SETTLED) or {}).get("events_bytes")
    return found if type(found) is int and found >= 0 else 0


def named(state: Path, begin: str) -> str | None:
    """The one run whose id begins so and whose end is still to be written; None when it is none, or several."""
    with contextlib.suppress(FileNotFoundError):
        found = [name for name in os.listdir(state / "unended") if begin and name.startswith(begin)]
        return found[0] if len(found) == 1 and not begin.startswith(".") else None
    return None


def start_of(state: Path, run_id: str) -> dict[str, Any] | None:
    """The row of the start of a run whose end is still to be written."""
    name = json.dumps(run_id).encode()
    with contextlib.suppress(OSError), (state / "audit" / "events.jsonl").open("rb") as stream:
        stream.seek(settled(state))
        for line in stream:
            if _STARTED in line and name in line and line.endswith(b"\n"):
                event: dict[str, Any] = json.loads(line)
                if event["kind"]["run_id"] == run_id:
                    return event
    return None


def owed(state: Path, run_id: str) -> bool:
    """Whether somebody lives who will write the run's end."""
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
    """Between a mark's making and its lock, nobody may take it for a dead process's."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        atomic_file.turn(fd, where=str(place), seconds=_TURN_SECONDS)
        yield
    finally:
        atomic_file.let_go(fd)
