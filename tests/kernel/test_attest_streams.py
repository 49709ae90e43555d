"""Attestation holds an agent's descriptors 0 to 2 to its contract: each contract as it is made, and changed by hand."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from policy import errors
from policy.prove.live import Layer
from sandbox.attest import live_runs, processes, reference, streams, verifier
from sandbox.run_io import CallerStreams
from sandbox.run_result import RunResult
from sandbox.rundir import directory as rundir_directory
from sandbox.storage import artefact_reader
from tests.kernel import injected
from tests.kernel.live_runs import SLEEPS, until
from tests.kernel.test_contract_sessions import STDIO
from tests.kernel.test_contract_terminal import TERMINAL, Screen
from tests.kernel.world import World
from tests.unit.sandbox.shim.test_stream import Caller

TEXT = '[process]\ncontract = "text"\n'
# gvisor runsc/boot/loader.go, startingStdioFD: where the sandbox keeps the agent's 0 to 2.
FIRST = 256
CONTRACTS = {"line": "", "text": TEXT, "stdio": STDIO, "terminal": TERMINAL}
# It closes all three, and opens so many files that their numbers are used again.
CLOSES = (
    "import os, time\nfor fd in range(3): os.close(fd)\n"
    "every = [os.path.join(top, one) for top, _, files in os.walk('/usr/lib/python3.11') for one in files]\n"
    "kept = [os.open(one, os.O_RDONLY) for one in every[:500]]\ntime.sleep(300)\n"
)

# It sends the master of a terminal that it opened in mounts of its own, and ends when it is told to.
OPENER = (
    "import fcntl, os, socket, sys\nline = socket.socket(fileno=int(sys.argv[1]))\n"
    "master = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)\n"
    "fcntl.ioctl(master, 0x40045431, bytes(4))\n"  # asm-generic/ioctls.h, TIOCSPTLCK: unlock its other side
    "socket.send_fds(line, [b'x'], [master])\nline.recv(1)\n"
)


def test_terminal_whose_opener_has_ended_has_no_name() -> None:
    """A sandbox that ends early takes its mounts with it, and the run has its own answer."""
    ours, theirs = socket.socketpair()
    command = ["unshare", "--mount", sys.executable, "-c", OPENER, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as opener:
        _, (master,), _, _ = socket.recv_fds(ours, 1, 1)
        before = streams.terminal(master)
        ours.send(b"x")
        assert (opener.wait(), str(before).partition(":")[0]) == (0, "terminal 136")
    until(lambda: streams.terminal(master) is None)
    os.close(master)


class Session:
    """A live run of some contract, and its streams as its sandbox has them."""

    def __init__(self, world: World, contract: str, code: str, caller: Caller | None, **fields: Any) -> None:
        package = world.sign(world.package({"main.py": code}, more=CONTRACTS[contract], cpu_ms=250_000, **fields))
        self.world, self.answers = world, list[RunResult]()
        streams: CallerStreams | None = None if caller is None else caller.streams
        text = "" if caller else "hi"
        self.thread = threading.Thread(target=lambda: self.answers.append(world.run(package, text, caller=streams)))
        self.thread.start()
        runs = world.state / "runs"
        self.directory = until(lambda: self._begun(runs))
        until(self._running)
        made = reference.ReferenceValues.read(self.directory)
        assert made is not None
        self.made = made
        family = processes.family(made.runner)
        assert family is not None
        self.sandbox = family.sandbox.name.pid

    def _begun(self, runs: Any) -> Any:
        assert not self.answers, (self.answers[0].error, self.answers[0].stderr)
        return next((runs / one for one in live_runs.live(runs)), None)

    def _running(self) -> bool:
        return any(row["kind"].get("state") == "Running" for row in self.world.rows())

    def drift(self) -> list[Layer]:
        """Return the layers that do not hold, examined by another process."""
        policy = artefact_reader.read(self.directory / rundir_directory.POLICY)
        report = verifier.examine(self.made, policy, verifier.VerifierCache(), state=self.world.state)
        assert not report.gone
        return [layer for layer in report.layers if not layer.holds]

    def link(self, number: int) -> str | None:
        """Return what the sandbox has under this number."""
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(f"/proc/{self.sandbox}/fd/{number}")
        return None

    def wait(self) -> RunResult:
        """Return how it ended."""
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.answers[0]


@contextlib.contextmanager
def session(world: World, contract: str, code: str = SLEEPS, **fields: Any) -> Iterator[Session]:
    """A run of this contract, ended with its caller."""
    caller: Caller | None = {"stdio": Caller, "terminal": Screen}.get(contract, lambda: None)()
    if isinstance(caller, Screen):
        caller.acts()
    one = Session(world, contract, code, caller, **fields)
    try:
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.made.runner.pid, 9)
        one.wait()
        if caller is not None:
            caller.joined()


@contextlib.contextmanager
def swapped(one: Session, number: int, other: int) -> Iterator[None]:
    """Another file of the sandbox's in the place of one of the agent's, by root's hand."""
    kept = injected.call(one.sandbox, injected.DUP, FIRST + number)
    injected.call(one.sandbox, injected.DUP3, other, FIRST + number, os.O_CLOEXEC)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            injected.call(one.sandbox, injected.DUP3, kept, FIRST + number, os.O_CLOEXEC)
            injected.call(one.sandbox, injected.CLOSE, kept)


def _any(one: Session, kind: str) -> int:
    """Return the number of some other file of this kind."""
    return next(n for n in range(3, FIRST) if (one.link(n) or "").startswith(kind))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_changed_stream_is_drift(tmp_path: Any, warm: Any, contract: str) -> None:
    world = World(tmp_path, warm=warm)
    world.configure(attest_seconds=3600, on_drift="alarm")
    with session(world, contract) as one:
        assert one.drift() == [], "control: before"
        found = [one.link(FIRST + number) for number in range(3)]
        assert all(str(link).startswith("/dev/pts/" if contract == "terminal" else "pipe:[") for link in found), found
        if contract != "terminal":
            assert tuple(found) == one.made.streams
        for number in range(3):
            with swapped(one, number, _any(one, "pipe:")):
                (layer,) = one.drift()
            assert (layer.name, f"descriptor {number} of the agent" in layer.expected) == ("streams", True)
            assert "it is pipe:[" in layer.found
        assert one.drift() == [], "control: after"


def test_changed_stream_ends_run(world: World) -> None:
    world.configure(attest_seconds=1)
    with session(world, "terminal") as one:
        assert one.made.streams != ()
        with contextlib.suppress(AssertionError, OSError), swapped(one, 1, _any(one, "pipe:")):
            answer = one.wait()
        answer = one.wait()
        assert isinstance(answer.error, errors.DriftError)
        assert answer.error.details["layer"] == "streams"


# gVisor keeps a terminal open as the controlling one.
@pytest.mark.parametrize("contract", ["text", "stdio"])
def test_closed_stream_is_no_drift(world: World, contract: str) -> None:
    """The agent closes its streams; gVisor then uses the numbers for files that the agent opens."""
    with session(world, contract, CLOSES) as one:
        until(lambda: str(one.link(FIRST)).startswith("/root/"))
        assert one.drift() == []
