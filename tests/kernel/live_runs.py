"""A live run that a test examines from outside, as `covenant attest` does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.attest import live_runs, processes, reference, verifier
from sandbox.attest.processes import Family
from sandbox.rundir import directory as rundir_directory
from sandbox.storage import artefact_reader
from sandbox.supervisor import RunResult
from tests.kernel.world import SLOWNESS, World

WAIT_SECONDS = 60.0 * SLOWNESS
SLEEPS = "import time\ntime.sleep(300)\n"


def until(true: Callable[[], Any], *, seconds: float = WAIT_SECONDS) -> Any:
    """Return the first true value of ``true``; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.05)
    return value


@dataclass
class Live:
    """One run under way. ``answer`` is there once ``end`` or ``wait`` has been called."""

    world: World
    made: reference.ReferenceValues
    directory: Path
    thread: threading.Thread
    answers: list[RunResult] = field(default_factory=list)

    def family(self) -> Family:
        """Its processes."""
        found: Family = until(lambda: processes.family(self.made.runner))
        return found

    def report(self) -> verifier.Examination:
        """Return the report of an examination by another process."""
        policy = artefact_reader.read(self.directory / rundir_directory.POLICY)
        return verifier.examine(self.made, policy, verifier.VerifierCache(), state=self.world.state)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """This run's rows of a kind."""
        kinds = (row["kind"] for row in self.world.rows())
        return [row for row in kinds if row["type"] == kind and row["run_id"] == self.made.run_id]

    def drift(self) -> list[tuple[str, str]]:
        """Layer and finding of each row of drift."""
        return [(row["layer"], row["found"]) for row in self.rows("drift")]

    def drift_after(self, count: int) -> list[tuple[str, str]]:
        """The rows of drift but for so many, once there are more."""
        found: list[tuple[str, str]] = until(lambda: self.drift()[count:])
        return found

    def wait(self) -> RunResult:
        """Wait until the run has ended by itself, and return its answer."""
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive()
        return self.answers[0]

    def end(self) -> RunResult:
        """End it from outside."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.made.runner.pid, signal.SIGKILL)
        return self.wait()


@contextlib.contextmanager
def live(
    world: World,
    code: str = SLEEPS,
    *,
    files: Mapping[str, str] | None = None,
    request: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Iterator[Live]:
    """Start a signed package with this code and hand it out when its first process runs."""
    package = world.sign(world.package({"main.py": code, **(files or {})}, **{"cpu_ms": 250_000, **fields}))
    answers: list[RunResult] = []
    before = set(_directories(world))
    thread = threading.Thread(target=lambda: answers.append(world.run(package, **(request or {}))))
    thread.start()

    def begun() -> Path | None:
        for path in set(_directories(world)) - before:
            if path.name in live_runs.live(path.parent):
                return path
        assert thread.is_alive() or answers, "the run failed"
        assert not answers, (answers[0].error, answers[0].stderr)
        return None

    directory = until(begun)
    made = reference.ReferenceValues.read(directory)
    assert made is not None
    one = Live(world, made, directory, thread, answers)
    try:
        # Gofer and sandbox confine themselves last: each has a filter more than it was started under. On a busy machine
        # the gofer may still be mounting when the sandbox has its own.
        until(lambda: (found := processes.family(made.runner)) and _are_confined(found))
        yield one
    finally:
        one.end()


def gate(module: bytes) -> int:
    """Return the one gate of this module among the processes that this one started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[1] == str(os.getpid()) and module in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    (one,) = found
    return one


def _are_confined(found: Family) -> bool:
    return min(found.gofer.filters, found.sandbox.filters) > found.runner.filters


def _directories(world: World) -> list[Path]:
    runs = world.state / "runs"
    return [path for path in runs.iterdir() if path.is_dir()] if runs.exists() else []
