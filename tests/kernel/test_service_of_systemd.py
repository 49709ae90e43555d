"""The supervisor's own units under a real systemd.

The socket starts the supervisor; it is ready when it says so, and is restarted after a kill.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.serve.api import client
from tests.kernel import booted_systemd
from tests.kernel.booted_systemd import START_SECONDS, BootedSystemd
from tests.kernel.serving import status
from tests.kernel.world import ROOT

UNITS = ROOT / "packaging" / "systemd"
SERVICE = "covenant-supervisor"


class BootedSupervisor(BootedSystemd):
    """Boots with the supervisor's socket listening, in namespaces and a state of its own."""

    def __init__(self, scratch: Path) -> None:
        self.name = SERVICE
        self._stage = scratch / "systemd"
        self._cgroup = booted_systemd._cgroups() / f"covenant-test-{uuid.uuid4()}"
        self._process = None
        (self._stage / "units").mkdir(parents=True)
        (self._stage / "packages").mkdir()
        program = self._stage / "program"
        code = "import sys; from sandbox.serve import main; sys.exit(main.main(sys.argv[1:]))"
        program.write_text(f"#!/bin/sh\ncd {ROOT} && exec {sys.executable} -c '{code}' \"$@\"\n")
        program.chmod(0o755)
        service = (UNITS / f"{SERVICE}.service").read_text()
        (self._stage / "units" / f"{SERVICE}.service").write_text(
            service.replace("/opt/covenant/bin/covenant-supervisor", str(program))
        )
        shutil.copy(UNITS / f"{SERVICE}.socket", self._stage / "units")
        for stub in (*booted_systemd._STUBS, "network.target", "nftables.service"):
            (self._stage / "units" / stub).write_text("[Unit]\nDefaultDependencies=no\n")
        target = f"[Unit]\nDefaultDependencies=no\nRequires={SERVICE}.socket\n"
        (self._stage / "units" / "test.target").write_text(target)
        (self._stage / "passwd").write_text("root:x:0:0::/:/bin/false\n")
        (self._stage / "group").write_text("root:x:0:\n")

    def _wait(self) -> None:
        self._eventually(lambda: self._first() and self.socket.exists())

    @property
    def socket(self) -> Path:
        return self.inside("run/covenant/supervisor.sock")

    def asked(self) -> dict[str, Any]:
        """Return the answer to `ps`, for which systemd starts the supervisor."""
        with client.connected(str(self.socket)) as sock:
            assert sock is not None, self.log()
            sock.settimeout(START_SECONDS)
            return client.ask(sock, "ps")

    def main(self) -> int:
        """The supervisor's main process, 0 while there is none."""
        first = self._first()
        for child in Path(f"/proc/{first}/task/{first}/children").read_text().split():
            if b"sandbox.serve" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        return 0

    def _eventually(self, look: Callable[[], Any]) -> None:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                if look():
                    return
            except (OSError, StopIteration):
                pass
            assert time.monotonic() < until, self.log()
            time.sleep(0.05)


def test_systemd_starts_it_for_whoever_asks_and_again_when_it_was_killed(tmp_path: Path) -> None:
    with BootedSupervisor(tmp_path) as booted:
        assert booted.main() == 0
        assert booted.asked()["kind"] == "runs"
        first = booted.main()
        assert first
        assert status(first)["Seccomp"] == "2"
        assert booted.inside("var/lib/covenant").stat().st_mode & 0o777 == 0o700
        # A client that waits in the queue during the restart is answered by the next supervisor.
        os.kill(first, signal.SIGKILL)
        assert booted.asked()["kind"] == "runs"
        assert booted.main() not in (0, first)
