"""The directory of a run that is over, for the next one of its policy (``sandbox.rundir.reuse``) and its few small
files.

    what stays       lock, label.json, cgroups.json, root/, trace/ with runsc's own two files
    what goes        everything else, whoever wrote it: a mark that the run was revoked, its sockets, its records; its
                     meter last of all, by whoever takes the place

Both changes are one rename behind the gate of the runs, with the lock held. Whoever looks into ``runs`` sees a run
whole or not at all; no name leads from one run to another, since no run's id is given twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import Final

from sandbox.kernel import small_files
from sandbox.kernel.runsc import debug_log, start_trace
from sandbox.rundir.reuse import Spares

LABEL, CGROUPS, _LOCK, _ROOT, _TRACE = "label.json", "cgroups.json", "lock", "root", "trace"
# What its cgroups had counted when it was given its intent (limits.Meter.noted).
METER: Final = "meter"
_PART: Final = "place"
_FILES: Final = {_LOCK: stat.S_ISREG, LABEL: stat.S_ISREG, CGROUPS: stat.S_ISREG}
_DIRECTORIES: Final = frozenset((_ROOT, _TRACE))
_TRACED: Final = {start_trace.CONFIG: stat.S_ISREG, debug_log.NAME: stat.S_ISFIFO}


def take(spares: Spares, path: Path, label: bytes) -> int | None:
    """Have one as ``path``: labelled, and locked by the descriptor that is returned; None where there is none.

    The caller is behind the gate.
    """
    for place in spares.there(_PART):
        lock = None
        with contextlib.suppress(OSError):
            if _is_left(place) and (lock := _locked(place)) is not None:
                Path(place, METER).unlink(missing_ok=True)
                small_files.put(f"{place}/{LABEL}", label)
                os.rename(place, path)
                return lock
        if lock is not None:
            os.close(lock)
    return None


def leave(spares: Spares, path: Path) -> bool:
    """Whether ``path``, whose lock the caller holds behind the gate, is kept for the next, or was removed for that."""
    with contextlib.suppress(OSError):
        # INVARIANT: not the meter. The end of the run is not written yet, and of one that is killed here nobody shall
        # say that it used nothing.
        for entry in list(os.scandir(path)):
            if entry.name not in _FILES and entry.name not in _DIRECTORIES and entry.name != METER:
                _remove(entry)
        for entry in list(os.scandir(path / _TRACE)):
            if entry.name not in _TRACED:
                _remove(entry)
        small_files.put(path / CGROUPS, b"{}")
        if _is_left(str(path)):
            spares.give(_PART, path)
    return not path.exists()


def remove(path: Path) -> None:
    """Remove the directory of a run, its meter last (``leave``)."""
    for entry in list(os.scandir(path)):
        if entry.name != METER:
            _remove(entry)
    shutil.rmtree(path)


def _is_left(place: str) -> bool:
    """Whether there is what stays, as what it should be, and nothing else."""
    there = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in os.scandir(place)}
    there.pop(METER, None)
    if there.keys() != _FILES.keys() | _DIRECTORIES or not all(stat.S_ISDIR(there[name]) for name in _DIRECTORIES):
        return False
    traced = {one.name: one.stat(follow_symlinks=False).st_mode for one in os.scandir(f"{place}/{_TRACE}")}
    return (
        all(is_kind(there[name]) for name, is_kind in _FILES.items())
        and all(name in _TRACED and _TRACED[name](mode) for name, mode in traced.items())
        and not os.listdir(f"{place}/{_ROOT}")
    )


def _locked(place: str) -> int | None:
    """The lock of it, with our number in it; None where whoever had it before still lets go."""
    lock = os.open(f"{place}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(lock, os.pwrite(lock, str(os.getpid()).encode(), 0))
    except OSError:
        os.close(lock)
        return None
    return lock


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path)
    else:
        os.unlink(entry.path)
