"""Check the notes of a run's network: a process that is killed during the second note leaves the first one whole."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from sandbox.rundir import directory

FIRST = {"agent": 7, "gateway": 8, "device": "cv-12345678"}
SECOND = {**FIRST, "ipv4": "192.0.2.2", "ipv6": "2001:db8::2"}


def noted(run: directory.RunDirectory, *, killed: bool) -> int:
    """Write the second note in a process and return its status; with ``killed`` it dies as it is about to write."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if killed:
            # The first byte that it writes to any file kills it, as kill -9 would there.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            run.note_network(SECOND)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_whoever_is_killed_over_second_note_has_left_first(tmp_path: Path) -> None:
    """Without the note the next start removes the directory, but leaves the host's table and forwarding."""
    with directory.RunDirectory(tmp_path / "run", {}) as run:
        run.note_network(FIRST)
        assert noted(run, killed=True) == -signal.SIGXFSZ
        assert (directory.network_of(run.path) or {}).items() >= FIRST.items()
        assert noted(run, killed=False) == 0
        assert (directory.network_of(run.path) or {}).items() >= SECOND.items()
