"""Reuse the directory of an ended run, with its few small files, for the next run of its policy.

    kept             lock, label.json, cgroups.json, root/, trace/ with runsc's own two files
    removed          everything else, of any writer: a revocation mark, its sockets, its records; its meter last of all,
                     by the run that takes the directory

Leaving and taking are one rename each, under the lock of all runs (``gate``) and with the run's lock held. A reader of
``runs`` sees a run whole or not at all. No name leads from one run to another, since no run's id is used twice.
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
# The counters of its cgroups when it got its intent (limits.Meter.noted).
METER: Final = "meter"
_PART: Final = "place"
_FILES: Final = {_LOCK: stat.S_ISREG, LABEL: stat.S_ISREG, CGROUPS: stat.S_ISREG}
_DIRECTORIES: Final = frozenset((_ROOT, _TRACE))
_TRACED: Final = {start_trace.CONFIG: stat.S_ISREG, debug_log.NAME: stat.S_ISFIFO}


def take(spares: Spares, path: Path, label: bytes) -> int | None:
    """Move a kept directory to ``path``, labelled and locked. Returns the lock's descriptor, None if there is none.

    The caller holds the gate.
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
    """Keep ``path`` for the next run.

    Returns whether it was moved or removed. The caller holds its lock and the gate.
    """
    with contextlib.suppress(OSError):
        # INVARIANT: keep the meter. The run's end row is not written yet, and after a kill here it must not show a
        # usage of zero.
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
    """Whether the directory has exactly the kept files, each of the right type."""
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
    """Lock it and write our pid into the lock file. Returns None while its earlier owner still holds the lock."""
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
