"""A FUSE file system for tests, mounted in a directory of theirs, that stops answering on command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_SERVER = Path(__file__).with_name("hanging_server.py")


class Hanging:
    """The server of ``place``, in a process of its own. What it said comes back from ``said``."""

    def __init__(self, process: subprocess.Popen[str], place: Path) -> None:
        self._process = process
        self.place = place
        self.hung: list[str] = []

    def hang(self, *operations: str) -> None:
        """Read requests of these operations and answer none of them, as a server that stands."""
        self._tell("hang", *operations)

    def deaf(self) -> None:
        """Read nothing any more."""
        self._tell("deaf")

    def answer(self) -> None:
        """Answer what hangs, and all that comes."""
        self._tell("answer")

    def await_hung(self) -> str:
        """Wait until a request hangs; its operation."""
        while not self.hung:
            self._line()
        return self.hung[-1]

    def _tell(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        while self._line() != "ok":
            pass

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the file system's server has ended"
        if line.startswith("hung "):
            self.hung.append(line.split()[1])
        return line.strip()


@contextlib.contextmanager
def mounted(source: Path, place: Path, *, uid: int = 0) -> Iterator[Hanging]:
    """``source`` as it is now, served at ``place``; when the block ends its connection ends, and all that hangs."""
    place.mkdir(exist_ok=True)
    process = subprocess.Popen(
        ["/usr/bin/python3", str(_SERVER), str(source), str(place), str(uid)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip
    made = Hanging(process, place)
    try:
        assert made._line() == "ready"
        yield made
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the status says
            process.stdin.write("end\n")
            process.stdin.close()
        assert process.wait(30) == 0
        if process.stdout is not None:
            process.stdout.close()
        until = time.monotonic() + 60
        while f" {place} " in Path("/proc/self/mountinfo").read_text():
            assert time.monotonic() < until
            time.sleep(0.02)


def as_user(uid: int, work: Callable[[], object]) -> object:
    """Run ``work`` in a process of this user, and return its result, passed as JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    return json.loads(said)
