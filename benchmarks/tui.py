#!/usr/bin/env python3
"""The screens of `covenant tui` in a terminal of 80 x 24: the time to the first paint, and the cost of 1,000 runs.

    first paint   from the end of the imports to the heads of the first table, beside a bare Textual app with one text
    1,000 runs    processor time of the screens while a service answers `top` with 1,000 runs that change, as a part of
                  one core; beside `top` of procps with the same interval, of this machine's own processes

As root (the client takes answers from root alone). It leaves nothing.

.venv/bin/python benchmarks/tui.py [rounds] [seconds]
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox import unix_wire

RUNS, INTERVAL = 1000, "1.5"
# Written to the pipe when the imports are done; what follows is the time that is measured.
_MARK = "import os, time; os.write({fd}, str(time.monotonic()).encode());"
_OURS = (
    "from covenant.tui.app import TerminalApp; from covenant.cli.daemon import tui; "
    "import covenant.wire.client, covenant.cli.run.supervisor_client, sandbox.serve.api.client; {mark} "
    "TerminalApp(tui.sources()).run(mouse=False)"
)
_BARE = (
    "from textual.app import App; from textual.widgets import Static\n"
    "class Bare(App):\n    def compose(self):\n        yield Static('AGENT / RUN')\n"
    "{mark} Bare(ansi_color=True).run(mouse=False)"
)


class Terminal:
    """A program in a terminal of 80 x 24, whose output is read and thrown away."""

    def __init__(self, command: list[str], environment: dict[str, str], keep: int = -1) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            if keep >= 0:
                os.set_inheritable(keep, True)
            os.chdir(ROOT)
            os.execve(command[0], command, {**os.environ, **environment, "TERM": "xterm-256color"})
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.shown = b""

    def read(self, seconds: float, until: bytes = b"") -> bool:
        """Read for so long; whether ``until`` was among it."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.fd], [], [], left)[0]:
                try:
                    self.shown += os.read(self.fd, 65536)
                except OSError:
                    return False
            if until and until in self.shown:
                return True
        return not until

    def cpu_seconds(self) -> float:
        """Return the processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


def first_paint_ms(code: str, environment: dict[str, str]) -> float:
    """Return the time from the end of the imports to the head of the table."""
    read, write = os.pipe()
    one = Terminal([sys.executable, "-c", code.format(mark=_MARK.format(fd=write))], environment, write)
    try:
        assert one.read(60, b"AGENT / RUN"), one.shown
        painted = time.monotonic()
        return (painted - float(os.read(read, 64))) * 1000
    finally:
        one.end()
        os.close(read)
        os.close(write)


@contextlib.contextmanager
def supervisor(path: Path) -> Iterator[list[int]]:
    """Answer `top` at ``path`` with runs of which one in ten has changed; yields how often that was asked."""
    asked: list[int] = []

    def run(number: int) -> dict[str, Any]:
        changed = len(asked) * 100 if number % 10 == len(asked) % 10 else 0
        return {
            "run_id": f"{number:08x}-1111-4111-8111-{number:012x}", "agent_id": f"agent-{number // 50:02}",
            "intent_id": None, "state": "Running", "parent": None, "depth": 0, "started_ms": 1_790_000_000_000,
            "cpu_ms": 1000 + changed, "memory_bytes": 20 << 20, "memory_mb": 64, "processes": 20,
            "received_bytes": 0, "sent_bytes": 0, "denied": 0,
        }  # fmt: skip

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError, unix_wire.FrameError):
                    raw = unix_wire.receive(connection, max_bytes=unix_wire.REQUEST_BYTES, until=time.monotonic() + 10)
                    if raw is None or json.loads(raw)["kind"] != "top":
                        continue
                    asked.append(1)
                    answer = unix_wire.encode({"kind": "top", "runs": [run(number) for number in range(RUNS)]})
                    unix_wire.send(connection, answer, until=time.monotonic() + 10)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def part_of_core(one: Terminal, seconds: float) -> tuple[float, int]:
    """Return the processor time of a program as a part of one core, and the bytes that it wrote meanwhile."""
    before, written, then = one.cpu_seconds(), len(one.shown), time.monotonic()
    one.read(seconds)
    return (one.cpu_seconds() - before) / (time.monotonic() - then), len(one.shown) - written


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "home"
        home.mkdir(mode=0o700)
        path = Path(place) / "s.sock"
        environment = {"COVENANT_HOME": str(home), "COVENANT_SOCKET": str(path)}
        with supervisor(path) as asked:
            took: dict[str, list[float]] = {"covenant tui": [], "a bare Textual app": []}
            for _ in range(rounds):
                took["covenant tui"].append(first_paint_ms(_OURS, environment))
                took["a bare Textual app"].append(first_paint_ms(_BARE, environment))
            for name, times in took.items():
                print(f"first paint, {name}: median {statistics.median(times):.0f} ms, least {min(times):.0f} ms")
            one = Terminal([sys.executable, "-m", "covenant", "tui"], environment)
            try:
                assert one.read(60, b"agent-00"), one.shown
                one.read(5)
                looks = len(asked)
                part, written = part_of_core(one, seconds)
                print(f"{RUNS} runs, covenant tui: {100 * part:.1f} % of a core, {len(asked) - looks} answers, "
                      f"{written} bytes in {seconds:.0f} s")  # fmt: skip
            finally:
                one.end()
        two = Terminal(["/usr/bin/top", "-d", INTERVAL], {})
        try:
            two.read(3)
            part, written = part_of_core(two, seconds)
            print(f"this machine's processes, top -d {INTERVAL}: {100 * part:.1f} % of a core, {written} bytes")
        finally:
            two.end()


if __name__ == "__main__":
    main()
