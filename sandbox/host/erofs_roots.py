"""Find out whether this host can give a root as one EROFS file: by mkfs.erofs, and by a start of runsc from one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from policy import errors
from policy.host import HostFacts, RunscFacts
from sandbox.config import Config, trusted_binary
from sandbox.host import runsc_probe
from sandbox.storage import json_cache

PACKAGE: Final = "erofs-utils"
# The file below ``closures`` of the state that remembers the result.
RECORD: Final = "erofs-roots.json"
_FAULT_SECONDS: Final = 3600.0
# Debian's place, and those of other distributions.
_PLACES: Final = (Path("/usr/bin/mkfs.erofs"), Path("/usr/sbin/mkfs.erofs"), Path("/sbin/mkfs.erofs"))


def program() -> Path | None:
    """Return mkfs.erofs, if only root can have put it there."""
    for place in _PLACES:
        if place.exists():
            try:
                return trusted_binary(place)
            except errors.HostError:
                continue
    return None


def packer(config: Config, facts: HostFacts) -> Path | None:
    """Return the program that packs roots for this runsc, None where roots stay directories.

    The first call for a runsc binary, a kernel and a program starts a sandbox. Its result is remembered.

    Raises:
        errors.MachineError: Raised when the attempt cannot be made.
    """
    found = program()
    if found is None or facts.runsc is None:
        return None
    deadline = config.start_deadline_seconds
    return None if fault(config, facts.runsc, facts.kernel, found, deadline_seconds=deadline) else found


def fault(config: Config, runsc: RunscFacts, kernel: str, found: Path, *, deadline_seconds: float) -> str:
    """Return the reason why this runsc starts from no EROFS file; empty if it does.

    A fault is remembered for an hour: a machine that is too busy may be the cause. ``deadline_seconds`` limits each of
    three starts.

    Raises:
        errors.MachineError: Raised when the attempt cannot be made.
    """
    info, now = found.stat(), time.time()
    key = [runsc.sha256, kernel, str(found), info.st_ino, info.st_size, info.st_mtime_ns]
    place = config.state / "closures" / RECORD
    held = json_cache.read(place)
    if held is not None and held.get("key") == key and isinstance(said := held.get("fault"), str):
        at = held.get("at")
        if not said or (isinstance(at, float) and 0 <= now - at < _FAULT_SECONDS):
            return said
    try:
        said = runsc_probe.reads_erofs(config, Path(runsc.path), found, deadline_seconds=deadline_seconds)
    except errors.LayerToolError as e:
        said = e.message
    json_cache.write(place, {"key": key, "fault": said, "at": now})
    return said
