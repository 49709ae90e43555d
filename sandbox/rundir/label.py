"""The label of a run's directory: who runs there and what for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from sandbox.kernel import libc, small_files
from sandbox.rundir.lock import gate

# In the label of a run that is a self-test: no agent ran in it.
SELF_TEST = "self_test"
# In the label of a run that waits for its intent (sandbox.standby): it holds its place, and no agent id.
STANDBY = "standby"
# Whose start no row of the log has, and whose keepers look after them alone.
LIKE_NO_RUN = frozenset((SELF_TEST, STANDBY))
LABEL = "label.json"
# As much of it as is read at once: most are smaller.
_LABEL_BYTES = 16 * 1024
# What the file of a next label has of room before it is written: most are smaller, and what is left is blank.
_ROOM_BYTES = 4096


def expect_relabel(path: Path) -> None:
    """Make the file that ``relabel`` fills, before a client waits.

    A new file may wait for the journal. ext4 allocates its blocks when it is renamed over another file (auto_da_alloc,
    ext4(5)).
    """
    small_files.put(f"{path}/.{LABEL}", b" " * _ROOM_BYTES)
    fd = os.open(f"{path}/.{LABEL}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _ROOM_BYTES)
    finally:
        os.close(fd)


def relabel(path: Path, label: Mapping[str, str], claim: Callable[[], None]) -> None:
    """Show a live run under another label.

    ``claim`` is called behind the gate with the old label. It raises when the rules refuse the new label beside the
    other runs; the run keeps the old one then.

    The two change places, where the file system can: to free the old one takes 0.3 ms, and happens with the directory.
    """
    new = f"{path}/.{LABEL}"
    small_files.put(new, json.dumps(dict(label)).encode().ljust(_ROOM_BYTES))
    with gate(path.parent):
        claim()
        try:
            libc.exchange(new, f"{path}/{LABEL}")
        except OSError:  # EINVAL: the file system cannot exchange names; another cause shows here too
            os.rename(new, f"{path}/{LABEL}")


def label_of(path: Path) -> dict[str, str] | None:
    """One run's label; None when its process died before it was written."""
    # Of every run that lives, whenever one begins: a stream of Python's costs more than the file.
    try:
        fd = os.open(f"{path}/{LABEL}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        raw = b"".join(iter(lambda: os.read(fd, _LABEL_BYTES), b""))
        label: dict[str, str] = json.loads(raw)
    except ValueError:
        return None
    finally:
        os.close(fd)
    return label
