"""What was noted of a run's network: whoever is killed over the second note has left the first, whole."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from sandbox.rundir import directory

FIRST = {"agent": 7, "gateway": 8, "device": "cv-12345678"}
SECOND = {**FIRST, "ipv4": "192.0.2.2", "ipv6": "2001:db8::2"}


def noted(run: directory.RunDirectory, *, killed: bool) -> int:
    """The status of a process that notes the second; ``killed`` as it is about to write."""
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if killed:
            # The first byte that goes to any file ends it, as kill -9 would there.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            run.note_network(SECOND)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_whoever_is_killed_over_the_second_note_has_left_the_first(tmp_path: Path) -> None:
    """Without it the next start takes the directory away, and leaves the table and the forwarding of the host."""
    with directory.RunDirectory(tmp_path / "run", {}) as run:
        run.note_network(FIRST)
        assert noted(run, killed=True) == -signal.SIGXFSZ
        assert (directory.network_of(run.path) or {}).items() >= FIRST.items()
        assert noted(run, killed=False) == 0
        assert (directory.network_of(run.path) or {}).items() >= SECOND.items()
