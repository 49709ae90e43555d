"""Check the exchange with real pipes and real children: every wait has a limit, and each ending its own error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from msgspec import structs

from policy import errors
from sandbox.kernel.proc.pipes import BoundedTail
from sandbox.run_io import ContainerIO, Limits, Outcome, PeriodicCheck
from sandbox.shim import agent_loop
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.stdio import StdioSession
from tests.doubles.run_parts import FullLog, Handle, Observer

READ = "import sys, time, os, signal\nline = sys.stdin.readline()\n"


@contextlib.contextmanager
def child(
    code: str, *, starts: bool = True, stays: bool = False, pass_fds: tuple[int, ...] = ()
) -> Iterator[ContainerIO]:
    """A child that runs this code, as the exchange sees it. One that ``stays`` does not hear SIGTERM, from its very
    beginning: when its own code gets to it is the machine's business."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if stays else None  # what is ignored stays so across exec
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
        )
    finally:
        if stays:
            signal.signal(signal.SIGTERM, before)
    started_r, started_w = os.pipe()
    if starts:
        os.write(started_w, b"1")
    pidfd = os.pidfd_open(process.pid)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield ContainerIO(
            stdin=process.stdin.fileno(),
            stdout=process.stdout.fileno(),
            stderr=process.stderr.fileno(),
            pidfd=pidfd,
            started=started_r,
            has_started=lambda: bool(os.read(started_r, 1)),
            handle=Handle(lambda: process.send_signal(signal.SIGTERM), process.kill),
            observer=Observer(),
        )
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        for fd in (pidfd, started_r, started_w):
            os.close(fd)


def _run(
    code: str,
    *,
    intent: bytes = b"hi\n",
    starts: bool = True,
    stays: bool = False,
    task_clock: str = "clock",
    **limits: float,
) -> AgentLoop:
    bounds = {"start_seconds": 60.0, "task_seconds": 60.0, "grace_seconds": 0.5, **limits}
    with child(code, starts=starts, stays=stays) as channel:
        exchange = AgentLoop(channel, StdioSession(), intent, Limits(task_clock=task_clock, **bounds))  # type: ignore[arg-type]
        exchange.run()
    return exchange


def test_one_line_in_and_out_and_then_end_of_file() -> None:
    done = _run(READ + "rest = sys.stdin.read()\nprint(repr((line, rest)))")
    assert done.error is None
    assert bytes(done.stdout) == b"('hi\\n', '')\n"
    assert done.started_at is not None


def test_intent_larger_than_pipe_arrives_whole() -> None:
    done = _run(READ + "print(len(line))", intent=b"x" * 500_000 + b"\n")
    assert bytes(done.stdout) == b"500001\n"


def test_agent_that_never_reads_does_not_hold_us() -> None:
    done = _run("import time; time.sleep(300)", intent=b"x" * 500_000 + b"\n", task_seconds=0.3)
    assert isinstance(done.error, errors.DeadlineError)
    assert done.ended_at < 200


def test_ttl_goes_on_while_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = iter((0.0,))
    monkeypatch.setattr(agent_loop, "boot_seconds", lambda: next(hours, 3600.0))
    done = _run(READ + "time.sleep(300)", ttl_seconds=600.0)
    assert isinstance(done.error, errors.DeadlineError)
    assert done.error.details["clock"] == "ttl_seconds"


def test_package_ends_where_clock_was_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    until = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: until)
    done = _run(READ + "time.sleep(300)", expires_at=until)
    assert isinstance(done.error, errors.DeadlineError)
    assert done.error.details["clock"] == "expires_at"
    monkeypatch.setattr(time, "time", lambda: until - 1)
    assert _run(READ + "print('done')", expires_at=until).error is None


def test_agent_that_closes_stdin_is_heard_to_end() -> None:
    # It has begun to read: what it prints is not before its intent.
    code = "import os, time\nos.read(0, 1)\nos.close(0)\ntime.sleep(0.3)\nprint('still')"
    done = _run(code, intent=b"x" * 500_000 + b"\n")
    assert done.error is None
    assert bytes(done.stdout) == b"still\n"


def test_output_before_intent_is_error() -> None:
    done = _run("import time\nprint('early', flush=True)\ntime.sleep(5)", starts=False)
    assert isinstance(done.error, errors.EarlyOutputError)


def test_start_that_does_not_come_has_its_own_deadline() -> None:
    done = _run("import time; time.sleep(30)", starts=False, start_seconds=0.3)
    assert isinstance(done.error, errors.StartTimeoutError)
    assert done.started_at is None


def test_term_then_grace_then_kill() -> None:
    polite = READ + "signal.signal(15, lambda *a: sys.exit(3))\nprint('x', file=sys.stderr, flush=True)\n"
    # Short sleeps: Python runs the handler of a signal that comes just before a sleep only after it.
    done = _run(polite + "while True: time.sleep(0.01)", task_seconds=0.7, grace_seconds=60.0)
    assert isinstance(done.error, errors.DeadlineError)
    assert not done.forced
    done = _run(READ + "time.sleep(300)", stays=True, task_seconds=0.7)
    assert isinstance(done.error, errors.DeadlineError)
    assert done.forced
    assert 1.1 < done.ended_at < 200


def test_deadline_names_the_key_that_gives_more_time() -> None:
    done = _run(READ + "time.sleep(300)", task_seconds=0.7, task_clock="cpu_ms_per_task")
    assert done.error is not None
    assert done.error.hint == "raise cpu_ms_per_task in [resources] of agent.toml, and sign again"
    # Control: a clock that no key sets has no such fix.
    done = _run(READ + "time.sleep(300)", task_seconds=0.7, task_clock="parent")
    assert isinstance(done.error, errors.DeadlineError)
    assert not done.error.hint


def test_asking_that_takes_its_time_is_part_of_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking takes the whole grace of an hour on a fake clock; a second grace after it would exceed the test's time."""
    took = [0.0]
    fake = {**vars(time), "monotonic": lambda: time.monotonic() + took[0]}
    monkeypatch.setattr(agent_loop, "time", SimpleNamespace(**fake))
    with child(READ + "time.sleep(300)", stays=True) as channel:
        handle = Handle(lambda: took.__setitem__(0, 3600.0), channel.handle.kill)
        slow = structs.replace(channel, handle=handle)
        exchange = AgentLoop(slow, StdioSession(), b"hi\n", Limits(60.0, 0.5, "clock", grace_seconds=3600.0))
        exchange.run()
    assert isinstance(exchange.error, errors.DeadlineError)
    assert exchange.forced
    assert 3600.4 < exchange.ended_at < 3800


def test_no_grace_that_another_asks_for_goes_beyond_deadline() -> None:
    def asked() -> errors.RunError:
        return errors.KilledError("ended by somebody", gently=True, grace_seconds=600.0)

    with child(READ + "time.sleep(300)", stays=True) as channel:
        told = structs.replace(channel, rounds=[PeriodicCheck(0.1, asked)])
        exchange = AgentLoop(told, StdioSession(), b"hi\n", Limits(60.0, 2.0, "clock", grace_seconds=0.5))
        exchange.run()
    assert isinstance(exchange.error, errors.KilledError)
    assert exchange.forced
    assert exchange.started_at is not None
    assert 2.4 < exchange.ended_at - exchange.started_at < 200


def test_flood_of_stdout_is_cut_at_its_bound() -> None:
    done = _run(READ + "while True: os.write(1, b'x' * 65536)", stdout_bytes=1_000_000)
    assert isinstance(done.error, errors.OutputTooLargeError)
    assert 1_000_000 < len(done.stdout) < 1_200_000


def test_flood_of_stderr_keeps_its_head_and_tail_and_does_not_end_run() -> None:
    done = _run(READ + "os.write(2, b'head')\nfor _ in range(200): os.write(2, b'y' * 65536)\nos.write(2, b'tail')")
    assert done.error is None
    assert done.stderr.startswith(b"head")
    assert done.stderr.endswith(b"tail")
    assert len(done.stderr) < 70_000
    assert done.stderr_total == 200 * 65536 + 8


def test_grandchild_that_keeps_pipes_does_not_keep_us() -> None:
    code = READ + "print('done', flush=True)\nif os.fork() == 0:\n    time.sleep(60)\nos._exit(0)"
    begin = time.monotonic()
    done = _run(code)
    assert bytes(done.stdout) == b"done\n"
    assert time.monotonic() - begin < 50


@pytest.mark.parametrize("sizes", [[1], [50, 50], [99, 1], [100, 1], [1000], [30] * 100])
def test_bounded_tail_keeps_both_ends(sizes: list[int]) -> None:
    tail, whole = BoundedTail(100), b""
    for index, size in enumerate(sizes):
        data = bytes([65 + index % 26]) * size
        whole += data
        tail.feed(data)
    value = tail.value()
    assert tail.total == len(whole)
    if len(whole) <= 100:
        assert value == whole
    else:
        assert value.startswith(whole[:50])
        assert value.endswith(whole[-50:])
        assert f"[{len(whole) - 100} bytes dropped]".encode() in value


def test_child_that_hangs_after_kill_for_memory_is_ended_and_named() -> None:
    """The kernel may kill a process for which the others wait for ever; only the cgroup's counter shows it."""
    looks: list[float] = []

    def out_of_memory() -> bool:
        looks.append(time.monotonic())
        return looks[-1] - looks[0] > 0.5

    with child("import time; time.sleep(300)") as channel:
        handle = Handle(kill=channel.handle.kill, out_of_memory=out_of_memory)
        hanging = structs.replace(channel, handle=handle)
        exchange = AgentLoop(hanging, StdioSession(), b"hi\n", Limits(250.0, 250.0, "clock", 5.0))
        exchange.run()
    assert isinstance(exchange.error, errors.OutOfMemoryError)
    assert 0.5 < exchange.ended_at < 200


def test_what_serves_run_is_heard_and_looked_at_while_it_lasts() -> None:
    heard: list[bytes] = []
    looks: list[float] = []
    read, write = os.pipe()

    def hear() -> None:
        heard.append(os.read(read, 16))

    def look() -> None:
        looks.append(time.monotonic())
        os.write(write, b"x")

    with child(READ + "time.sleep(0.6)\nprint('done')") as channel:
        served = structs.replace(channel, watches={read: hear}, rounds=(PeriodicCheck(0.1, look),))
        exchange = AgentLoop(served, StdioSession(), b"hi\n", Limits(60.0, 60.0, "clock", 0.5))
        exchange.run()
    os.close(read)
    os.close(write)
    assert exchange.error is None
    assert bytes(exchange.stdout) == b"done\n"
    assert len(heard) > 1
    assert len(looks) > 1


def test_what_is_said_just_before_end_is_heard_after_it() -> None:
    heard: list[bool] = []
    read, write = os.pipe()
    os.write(write, b"x")

    def hear() -> None:
        # The descriptor is always readable, also after the child has gone.
        heard.append(exchange._exited)

    with child(READ + "print('done')") as channel:
        exchange = AgentLoop(
            structs.replace(channel, watches={read: hear}), StdioSession(), b"hi\n", Limits(60.0, 60.0, "clock", 0.5)
        )
        exchange.run()
    os.close(read)
    os.close(write)
    assert exchange.error is None
    assert heard[-1]
    assert heard.count(True) == 1


@pytest.mark.parametrize("by", ["watch", "round"])
def test_what_serves_run_can_end_it(by: str) -> None:
    read, write = os.pipe()
    os.write(write, b"x")
    error = errors.SandboxCrashedError("the gateway is gone")
    with child(READ + "time.sleep(300)") as channel:
        if by == "watch":
            served = structs.replace(channel, watches={read: lambda: error})
        else:
            served = structs.replace(channel, rounds=(PeriodicCheck(0.1, lambda: error),))
        exchange = AgentLoop(served, StdioSession(), b"hi\n", Limits(60.0, 250.0, "clock", 0.5))
        exchange.run()
    os.close(read)
    os.close(write)
    assert exchange.error is error
    assert exchange.ended_at < 200


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_looked_at_at_start_is_so_before_agent_is_told_anything(fails: bool) -> None:
    looks: list[errors.RunError | None] = []
    error = errors.DriftError("a limit was raised") if fails else None

    def look() -> errors.RunError | None:
        looks.append(error)
        return error

    with child(READ + "print('told ' + line.strip())") as channel:
        served = structs.replace(channel, rounds=(PeriodicCheck(3600, look, at_start=True),))
        exchange = AgentLoop(served, StdioSession(), b"hi\n", Limits(60.0, 250.0, "clock", 0.5))
        exchange.run()
    assert looks == [error], "once, and not by its clock"
    assert exchange.error is error
    assert bytes(exchange.stdout) == (b"" if fails else b"told hi\n")


@pytest.mark.parametrize("sizes", [[], [10], [50, 50], [30, 30, 41], [1] * 99, [1] * 300, [1000], [99, 1, 500]])
def test_what_bounded_tail_keeps_can_be_read_on_from_anywhere(sizes: list[int]) -> None:
    tail, whole = BoundedTail(100), b""
    for number, size in enumerate(sizes):
        data = bytes([number % 251]) * size
        tail.feed(data)
        whole += data
    at, read = 0, b""
    while at < tail.total:
        begins, got = tail.since(at)
        assert got, "no progress"
        assert begins >= at
        assert whole[begins : begins + len(got)] == got
        at, read = begins + len(got), read + got
    assert len(read) == min(len(whole), 100)
    assert tail.since(tail.total)[1] == b""


def test_of_looks_at_start_first_that_ends_run_is_last() -> None:
    """A look may take long, and after the first ending there is no run for the next one."""
    looks: list[str] = []

    def look(name: str, outcome: Outcome) -> PeriodicCheck:
        def at() -> Outcome:
            looks.append(name)
            return outcome

        return PeriodicCheck(3600.0, at, at_start=True)

    with child(READ + "time.sleep(30)") as channel:
        rounds = look("first", None), look("second", errors.KilledError("no")), look("third", None)
        observer = Observer()
        told = structs.replace(channel, rounds=rounds, observer=observer)
        exchange = AgentLoop(told, StdioSession(), b"hi\n", Limits(5.0, 5.0, "clock", 0.1))
        exchange.run()
    assert looks == ["first", "second"]
    assert observer.events == [exchange.error]
    assert isinstance(exchange.error, errors.KilledError)
    assert exchange.started_at is None


def test_what_must_be_written_down_first_is_so_or_does_not_happen() -> None:
    """A row before the intent is given and one before the run is ended: a log that refuses either ends the exchange."""
    observer = Observer()
    with child(READ + "time.sleep(30)") as channel:
        told = structs.replace(channel, observer=observer)
        exchange = AgentLoop(told, StdioSession(), b"hi\n", Limits(5.0, 0.1, "clock", 0.1))
        exchange.run()
    assert observer.events == ["starting", exchange.error]
    assert exchange.over

    with child("import sys; print(len(sys.stdin.readline()))") as channel:
        full = structs.replace(channel, observer=FullLog())
        exchange = AgentLoop(full, StdioSession(), b"hi\n", Limits(5.0, 5.0, "clock", 0.1))
        with pytest.raises(errors.LedgerError):
            exchange.run()
        assert exchange.started_at is None
