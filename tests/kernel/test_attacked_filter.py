"""Attacks between the kernel and a reader of filters.

An unread filter never passes, and an examined process is as before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from policy import data
from policy.lifecycle import State
from policy.prove.live import Standing
from sandbox.kernel import libc, procfs
from sandbox.kernel.net import netns
from sandbox.kernel.runsc import command as runsc_command
from sandbox.kernel.seccomp import dump
from sandbox.rundir import registry
from tests.kernel import live_runs
from tests.kernel.world import World

ARCH = os.uname().machine
OWN = runsc_command.own_filter(ARCH)
DIGESTS = (f"{len(OWN) // 8}:{hashlib.sha256(OWN).hexdigest()}",)
# linux/ptrace.h: who is traced with it is under no filter until it is let go.
SUSPEND_SECCOMP: Final = 1 << 21
# It loads the filter, and answers each line with the error of membarrier(2) (0 for none), and each SIGUSR1 by name.
ANSWERS = f"""
import ctypes, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from sandbox.kernel import libc
libc.set_seccomp_filter(bytes.fromhex(sys.argv[1]))
call = ctypes.CDLL(None, use_errno=True).syscall
signal.signal(signal.SIGUSR1, lambda *_: print("SIGUSR1", flush=True))
print("ready", flush=True)
for line in sys.stdin:
    ctypes.set_errno(0)
    call(ctypes.c_long({data.syscalls(ARCH).numbers["membarrier"]}), 0, 0, 0)
    print(ctypes.get_errno(), flush=True)
"""


class Filtered:
    """A process under the filter that runsc is started under."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen, self.pid = popen, popen.pid

    def says(self, seconds: float = live_runs.WAIT_SECONDS) -> bytes:
        """Its next line."""
        out = self._popen.stdout
        assert out is not None
        assert select.select([out], [], [], seconds)[0], f"it says nothing; it is {self.state}"
        return out.readline().strip()

    def asked(self) -> int:
        """With which error membarrier(2) fails there; 0 where it is not refused."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(b"\n")
        self._popen.stdin.flush()
        return int(self.says())

    @property
    def state(self) -> str:
        """One letter of proc_pid_stat(5)."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def becomes(self, states: str) -> None:
        """Wait until it is in one of them."""
        live_runs.until(lambda: self.state in states)


@pytest.fixture
def one() -> Iterator[Filtered]:
    command = [sys.executable, "-c", ANSWERS, OWN.hex()]
    # Unbuffered, so that what select sees is all that there is.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as popen:
        found = Filtered(popen)
        assert found.says() == b"ready"
        assert dump.digests(found.pid) == DIGESTS
        assert found.asked() == errno.ENOSYS
        yield found
        assert found.asked() == errno.ENOSYS, "it goes on, under its filter"
        assert popen.stdin is not None
        popen.stdin.close()
        assert popen.wait(live_runs.WAIT_SECONDS) == 0


@contextlib.contextmanager
def traced(pid: int, options: int = 0) -> Iterator[threading.Event]:
    """Trace the process from another thread; setting the event ends that."""
    begun, over = threading.Event(), threading.Event()

    def trace() -> None:
        dump._ptrace(dump.PTRACE_SEIZE, pid, 0, options)
        begun.set()
        over.wait(live_runs.WAIT_SECONDS)

    wait = netns.aside(trace)
    try:
        assert begun.wait(live_runs.WAIT_SECONDS)
        yield over
    finally:
        over.set()
        wait()
        live_runs.until(lambda: procfs.tracer(pid) == 0)


def _after(monkeypatch: pytest.MonkeyPatch, request: int, act: Callable[[], object]) -> None:
    """Call `act` after a ptrace request of the reader and before its next one."""
    real = dump._ptrace

    def ptrace(asked: int, pid: int, address: int = 0, data: int = 0) -> int:
        result = real(asked, pid, address, data)
        if asked == request:
            act()
        return result

    monkeypatch.setattr(dump, "_ptrace", ptrace)


def test_signal_that_comes_while_it_is_looked_at_is_not_lost(one: Filtered, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops whom it comes to before we do, and the kernel forgets it when they are let go without it."""

    def comes() -> None:
        os.kill(one.pid, signal.SIGUSR1)
        one.becomes("t")

    # It waits for a line: a handler of Python's does not run before the read that a signal comes just before.
    one.becomes("S")
    os.kill(one.pid, signal.SIGUSR1)
    assert one.says() == b"SIGUSR1", "the control"
    one.becomes("S")
    _after(monkeypatch, dump.PTRACE_SEIZE, comes)
    assert dump.digests(one.pid) == DIGESTS
    assert one.says() == b"SIGUSR1"


def test_who_stands_by_signal_is_read_and_goes_on_standing(one: Filtered) -> None:
    os.kill(one.pid, signal.SIGSTOP)
    one.becomes("T")
    assert dump.digests(one.pid) == DIGESTS
    one.becomes("T")
    os.kill(one.pid, signal.SIGCONT)


def test_stop_that_comes_while_it_is_looked_at_is_one(one: Filtered, monkeypatch: pytest.MonkeyPatch) -> None:
    def comes() -> None:
        os.kill(one.pid, signal.SIGSTOP)
        one.becomes("t")

    _after(monkeypatch, dump.PTRACE_SEIZE, comes)
    assert dump.digests(one.pid) == DIGESTS
    one.becomes("T")
    os.kill(one.pid, signal.SIGCONT)


def test_filters_that_tracer_may_have_put_out_of_force_are_not_taken_for_read(
    one: Filtered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc shows the filters as before; the tracer is the only visible sign."""
    monkeypatch.setattr(dump, "_TRACED_SECONDS", 0.2)
    with traced(one.pid, SUSPEND_SECCOMP):
        assert one.asked() == 0, "the control: the filter is out of force"
        found = procfs.process(one.pid)
        assert found is not None
        assert (found.seccomp, found.filters) == (2, 1)
        with pytest.raises(OSError, match=f"process {one.pid} is traced by [1-9]"):
            dump.digests(one.pid)
    assert dump.digests(one.pid) == DIGESTS


def test_one_more_who_only_looks_is_waited_for(one: Filtered, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `covenant attest` beside a supervisor: neither calls the other's look drift."""
    monkeypatch.setattr(dump, "_TRACED_SECONDS", live_runs.WAIT_SECONDS)
    asked = procfs.tracer
    with traced(one.pid) as over:

        def lets_go(pid: int) -> int:
            tracer = asked(pid)
            over.set()
            return tracer

        monkeypatch.setattr(procfs, "tracer", lets_go)
        assert dump.digests(one.pid) == DIGESTS
        assert over.is_set(), "the control: it was in the way"


def test_who_dies_under_look_is_gone_and_was_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for request in (dump.PTRACE_SEIZE, dump.PTRACE_INTERRUPT):
        with subprocess.Popen(["/usr/bin/cat"], stdin=subprocess.PIPE) as popen, monkeypatch.context() as patch:
            _after(patch, request, popen.kill)
            with contextlib.suppress(ProcessLookupError):
                assert dump.digests(popen.pid) is None


def test_who_is_under_filter_reads_none_and_leaves_nobody_standing(one: Filtered) -> None:
    """The kernel's word (seccomp_get_filter: EACCES), and so of every supervisor that has given up its rights."""
    reader = os.fork()
    if not reader:
        status = 1
        with contextlib.suppress(BaseException):
            libc.set_seccomp_filter(OWN)
            status = 0 if dump.digests(one.pid) is None else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0
    assert procfs.tracer(one.pid) == 0


def test_run_that_another_traces_does_not_hold_and_each_of_its_threads_is_under_gvisors_filter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attestation counts those of each process's first thread: gVisor loads them for all of them at once (TSYNC)."""
    monkeypatch.setattr(dump, "_TRACED_SECONDS", 0.2)
    with live_runs.live(world) as run:
        # The supervisor's own first look is over once its agent has an intent, and who is traced in it ends.
        live_runs.until(lambda: _state(run.directory) == State.RUNNING)
        family = run.family()
        for member in (family.gofer, family.sandbox, *family.others):
            assert {_line(member.name.pid, task, "TracerPid") for task in procfs.threads(member.name.pid)} == {0}
            counts = {_line(member.name.pid, task, "Seccomp_filters") for task in procfs.threads(member.name.pid)}
            assert min(counts) > family.runner.filters, member
        assert run.report().holds, "the control"
        for member in (family.gofer, family.sandbox):
            with traced(member.name.pid, SUSPEND_SECCOMP):
                report = run.report()
                assert not report.holds
                assert [(one.name, one.standing) for one in report.layers] == [("read-out", Standing.UNREADABLE)]
                assert f"process {member.name.pid} is traced by" in report.layers[0].found
        assert run.report().holds, "let go, it is as it was"
        assert run.drift() == []


def _state(directory: Path) -> str:
    """Where a run is; nothing before it has said so."""
    path = directory / registry.STATE
    return path.read_text().strip() if path.exists() else ""


def _line(pid: int, task: int, name: str) -> int:
    """A number of proc_pid_status(5); of a thread that has ended meanwhile that of its process."""
    for path in (f"/proc/{pid}/task/{task}/status", f"/proc/{pid}/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(path).read_text().splitlines()
            return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
    raise AssertionError("it is gone")
