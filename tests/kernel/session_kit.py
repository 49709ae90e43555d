"""A home with layers for sessions, and ``covenant exec`` in it: with pipes, in a terminal, in a network of a test's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandbox.layers import sources
from sandbox.layers.store import LayerStore
from tests.kernel.world import ROOT, World

SECONDS = 120.0
Done = subprocess.CompletedProcess[bytes]


class Home:
    """A home whose store has the built-in layers of ``names``. ``before`` is a command that each one is run by."""

    def __init__(self, base: Path, *names: str) -> None:
        self.world = World(base)
        self.base = base
        self.before: list[str] = []
        for name in names:
            sources.build(LayerStore(self.world.state), name, [])

    def environment(self) -> dict[str, str]:
        """Return the environment of a command with this home."""
        return {"PATH": os.environ["PATH"], "COVENANT_HOME": str(self.world.home), "PYTHONPATH": str(ROOT)}

    def covenant(self, *words: str | Path, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Done:
        """Run one command, with pipes."""
        return subprocess.run(
            [*self.before, sys.executable, "-m", "covenant", *map(str, words)],
            env={**self.environment(), **(env or {})},
            cwd=self.base,
            input=stdin,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )

    def exec(self, *words: str | Path, stdin: bytes = b"") -> Done:
        """Run ``covenant exec``, with pipes."""
        return self.covenant("exec", *words, stdin=stdin)

    def refused(self, *words: str | Path) -> tuple[str, str]:
        """Run ``covenant exec``, which is refused before anything starts. Returns the message and the fix."""
        before = self.starts()
        done = self.exec(*words)
        assert (done.returncode, done.stdout) == (125, b""), (done.returncode, done.stdout, done.stderr)
        assert self.starts() == before, "nothing was started"
        found = re.search(r"^covenant: (.*) \[\w+\]\n  fix: (.*)$", done.stderr.decode(), re.MULTILINE)
        assert found, done.stderr
        return found[1], found[2]

    def starts(self) -> int:
        """Return the number of runs that were started."""
        return sum(row["kind"]["type"] == "run_started" for row in self.world.rows())

    @contextlib.contextmanager
    def terminal(self, *words: str | Path) -> Iterator[Terminal]:
        """Run ``covenant exec`` in a terminal, which has its settings again at the end."""
        command = [sys.executable, "-m", "covenant", "exec", *map(str, words)]
        made = Terminal(command, self.environment(), cwd=self.base)
        try:
            yield made
            assert made.restored()
        finally:
            made.close()


class Terminal:
    """A terminal of a test's own, of 30 rows and 90 columns, with one command in it. ``uid`` owns the terminal."""

    def __init__(self, command: list[str], environment: Mapping[str, str], *, uid: int = 0, **more: Any) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(30, 90)
        self._before = termios.tcgetattr(self.slave)
        os.fchown(self.slave, uid, -1)
        self.process = subprocess.Popen(
            command,
            env={**environment, "TERM": "xterm-256color"},
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - the test has one thread
            **more,
        )
        self.shown = b""

    def resize(self, rows: int, columns: int) -> None:
        """Set the size."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        """Type these keys."""
        os.write(self.master, keys)

    def until(self, mark: bytes) -> None:
        """Read until this is shown."""
        end = time.monotonic() + SECONDS
        while mark not in self.shown:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, self.shown
            self.shown += os.read(self.master, 65536)

    def ended(self) -> int:
        """Return the exit status of the command, with the rest of its output read."""
        status = self.process.wait(SECONDS)
        while select.select([self.master], [], [], 0)[0]:
            self.shown += os.read(self.master, 65536)
        return status

    def restored(self) -> bool:
        """Whether the terminal has the settings that it had before."""
        return termios.tcgetattr(self.slave) == self._before

    def close(self) -> None:
        """End the command, and close the terminal."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)
