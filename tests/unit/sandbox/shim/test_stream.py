"""Check a stream session with real pipes and real children: bytes, backpressure, half-closes and ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from policy import errors
from sandbox.run_io import CallerStreams, Limits
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.stream import StreamSession
from tests.unit.sandbox.shim.test_stdio import child

LIMITS = Limits(60.0, 120.0, "clock", 0.5)
CAT = "import os\nwhile data := os.read(0, 65536):\n    while data: data = data[os.write(1, data):]\n"
MIB = 1 << 20


class Caller:
    """The other ends of a session's pipes, as a terminal or an editor holds them."""

    def __init__(self) -> None:
        (in_r, self.stdin), (self.stdout, out_w), (self.stderr, err_w) = os.pipe(), os.pipe(), os.pipe()
        self.streams = CallerStreams(in_r, out_w, err_w)
        self.read: dict[int, bytes] = {}
        self._threads: list[threading.Thread] = []

    def close(self, fd: int) -> None:
        """Close one of the caller's ends, once."""
        with contextlib.suppress(OSError):
            os.close(fd)

    def writes(self, data: bytes, *, ends: bool = True) -> None:
        """Write in a thread, and then close stdin."""

        def work() -> None:
            view = memoryview(data)
            with contextlib.suppress(BrokenPipeError):
                while view:
                    view = view[os.write(self.stdin, view[:MIB]) :]
            if ends:
                self.close(self.stdin)

        self.starts(work)

    def reads(self, fd: int, *, pause: float = 0.0) -> None:
        """Read to the end in a thread, slowly if so asked."""

        def work() -> None:
            got = []
            while data := os.read(fd, 65536):
                got.append(data)
                time.sleep(pause)
            self.read[fd] = b"".join(got)

        self.starts(work)

    def starts(self, work: Callable[[], None]) -> None:
        """Do this in a thread."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def joined(self) -> None:
        """Close the session's ends, as its owner does, and wait for the readers."""
        for fd in (self.streams.stdin, self.streams.stdout, self.streams.stderr):
            self.close(fd)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller()
    yield made
    made.joined()
    for fd in (made.stdin, made.stdout, made.stderr):
        made.close(fd)


def run(code: str, caller: Caller, *, limits: Limits = LIMITS, starts: bool = True, stays: bool = False) -> AgentLoop:
    with child(code, starts=starts, stays=stays) as channel:
        loop = AgentLoop(channel, StreamSession(caller.streams), b"", limits)
        loop.run()
    return loop


@pytest.mark.parametrize("size", [0, 1, 65_536, 5_000_001])
def test_stream_goes_both_ways_whole(caller: Caller, size: int) -> None:
    data = os.urandom(size)
    caller.writes(data)
    caller.reads(caller.stdout)
    done = run(CAT, caller)
    caller.joined()
    assert done.error is None
    assert caller.read[caller.stdout] == data
    totals = done.session.totals
    assert totals is not None
    digest = hashlib.sha256(data).hexdigest()
    assert (totals.in_bytes, totals.in_sha256) == (size, digest)
    assert (totals.out_bytes, totals.out_sha256) == (size, digest)
    assert done.stdout == b""


def test_stream_of_gibibyte_takes_constant_memory(caller: Caller) -> None:
    """The peak is the process's own, so that it counts every buffer that ever was."""
    run_bytes = 1 << 30
    seen = [0]

    def count() -> None:
        while data := os.read(caller.stdout, MIB):
            seen[0] += len(data)

    caller.starts(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = run(f"import os\nfor _ in range({run_bytes >> 16}): os.write(1, b'x' * 65536)", caller)
    caller.joined()
    assert done.error is None
    assert seen == [run_bytes]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024, "KiB"


def test_stream_stderr_is_relayed_and_its_ends_kept(caller: Caller) -> None:
    caller.reads(caller.stderr)
    done = run(
        "import os\nos.write(2, b'head')\nfor _ in range(40): os.write(2, b'y' * 65536)\nos.write(2, b'tail')", caller
    )
    caller.joined()
    assert caller.read[caller.stderr] == b"head" + b"y" * 40 * 65536 + b"tail"
    assert done.stderr.startswith(b"head")
    assert done.stderr.endswith(b"tail")
    assert len(done.stderr) < 70_000


def test_stream_slow_reader_loses_nothing(caller: Caller) -> None:
    caller.reads(caller.stdout, pause=0.01)
    done = run("import os\nfor _ in range(60): os.write(1, b'x' * 65536)", caller)
    caller.joined()
    assert done.error is None
    assert len(caller.read[caller.stdout]) == 60 * 65536


def test_stream_reader_that_waits_for_end_gets_rest(caller: Caller) -> None:
    """The caller reads only after the session: what pipes hold is not lost with the agent."""
    done = run("import os\nfor _ in range(6): os.write(1, b'x' * 65536)", caller)
    assert done.error is None
    assert done.ended_at < 60
    caller.reads(caller.stdout)
    caller.joined()
    assert len(caller.read[caller.stdout]) == 6 * 65536


def test_stream_agent_that_never_reads_holds_nobody(caller: Caller) -> None:
    caller.writes(b"x" * 4 * MIB)
    done = run("import time; time.sleep(300)", caller, limits=Limits(60.0, 0.5, "clock", 0.2))
    assert isinstance(done.error, errors.DeadlineError)
    assert done.ended_at < 100


def test_stream_flood_to_stopped_reader_ends_by_deadline(caller: Caller) -> None:
    done = run(
        "import os\nwhile True: os.write(1, b'x' * 65536)", caller, stays=True, limits=Limits(60.0, 0.5, "clock", 0.2)
    )
    assert isinstance(done.error, errors.DeadlineError)
    assert done.ended_at < 100


def test_stream_end_of_caller_is_end_of_agent_stdin(caller: Caller) -> None:
    caller.close(caller.stdin)
    caller.reads(caller.stdout)
    done = run("import sys, time\nassert sys.stdin.read() == ''\ntime.sleep(0.2)\nprint('still here')", caller)
    caller.joined()
    assert done.error is None
    assert caller.read[caller.stdout] == b"still here\n"


def test_stream_agent_without_stdin_breaks_caller_pipe(caller: Caller) -> None:
    caller.writes(b"x" * 4 * MIB, ends=False)
    caller.reads(caller.stdout)
    done = run("import os, time\nos.close(0)\ntime.sleep(0.3)\nos.write(1, b'alive')", caller)
    caller.joined()
    assert done.error is None
    assert caller.read[caller.stdout] == b"alive"


def test_stream_agent_without_stdout_ends_it_for_caller(caller: Caller) -> None:
    saw: list[bool] = []

    def wait_for_end() -> None:
        while os.read(caller.stdout, 65536):
            pass
        saw.append(True)
        caller.close(caller.stdin)

    caller.starts(wait_for_end)
    done = run("import os, sys\nos.close(1)\nsys.stdin.read()\n", caller)
    assert saw, "the agent exits only when the caller saw the end"
    assert done.error is None


def test_stream_caller_without_reader_breaks_agent_pipe(caller: Caller) -> None:
    caller.close(caller.stdout)
    caller.reads(caller.stderr)
    code = (
        "import os, sys\ntry:\n    while True: os.write(1, b'x' * 65536)\n"
        "except BrokenPipeError:\n    os.write(2, b'nobody reads')\n"
    )
    done = run(code, caller)
    caller.joined()
    assert done.error is None
    assert caller.read[caller.stderr] == b"nobody reads"


def test_stream_before_start_is_not_read(caller: Caller) -> None:
    caller.writes(b"early", ends=False)
    done = run("import time; time.sleep(60)", caller, starts=False, limits=Limits(0.3, 1.0, "clock", 0.1))
    assert isinstance(done.error, errors.StartTimeoutError)
    assert os.read(caller.streams.stdin, 16) == b"early"
