"""A real ssh-agent for a test: its socket in a temporary folder, keys made there, ended by its process id."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


class SshAgent:
    """A running agent; ``add`` makes a key and hands it over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "agent")
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "SSH_AUTH_SOCK": self.socket}

    def add(self, comment: str, *, kind: str = "ed25519", options: tuple[str, ...] = ()) -> Path:
        """A new key with this comment in the agent; its file, which only the test sees, is returned."""
        path = self.folder / f"key-{len(list(self.folder.iterdir()))}"
        self._run("ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", str(path))
        self._run("ssh-add", "-q", *options, str(path))
        return path

    def run(self, *command: str) -> str:
        """A command of OpenSSH's with this agent."""
        return self._run(*command)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def running(folder: Path) -> Iterator[SshAgent]:
    """Start an agent in ``folder`` and end it."""
    agent = SshAgent(folder)
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", agent.socket], env=agent.environment, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 20
        while not Path(agent.socket).exists():
            assert process.poll() is None and time.monotonic() < deadline, "ssh-agent did not start"  # noqa: PT018
            time.sleep(0.01)
        yield agent
    finally:
        process.terminate()
        process.wait(timeout=20)
