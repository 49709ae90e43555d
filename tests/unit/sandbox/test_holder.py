"""Check the holder by itself: threads in place of instances, in a process that the test forks."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from policy import errors
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import signals, spawn
from sandbox.serve import standby_worker
from sandbox.serve.standby_worker import ASK, ENDED, FULL, TOLD
from sandbox.shim import process as shim_process
from sandbox.standby.instance import READY, TAKEN
from sandbox.standby.wanted import Wanted
from sandbox.supervisor import Supervisor

WANTED = Wanted("a", 1, "digest", b"envelope", "/p")
PATIENCE = 60
RUN_ID = b"0" * 36


@dataclass
class Own:
    """A double of the supervisor; each instance runs ``work``."""

    work: Callable[[Callable[[bytes], None], int], None]

    def stand_by(self, one: Wanted, *, alive: int, told: int, tell: Callable[[bytes], None]) -> None:
        self.work(tell, told)


@dataclass
class Held:
    """A forked holder and our end of its socket."""

    process: shim_process.Shim
    sock: socket.socket

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            self.sock.send(ASK.pack(number))

    def hear(self) -> tuple[int, bytes]:
        raw = self.sock.recv(4096)
        assert raw, "it ended"
        return TOLD.unpack_from(raw)[0], raw[TOLD.size :]

    def heard(self, count: int) -> list[tuple[int, bytes]]:
        return sorted(self.hear() for _ in range(count))

    def ends(self) -> int | None:
        assert shim_process.wait(self.process.pidfd, PATIENCE)
        return self.process.reap()


@contextlib.contextmanager
def held(work: Callable[[Callable[[bytes], None], int], None]) -> Iterator[Held]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.settimeout(PATIENCE)
        fd = theirs.fileno()
        with theirs:
            own = cast("Supervisor", Own(work))
            forked = shim_process.fork(lambda: standby_worker.keep(own, WANTED, theirs.detach(), -1, -1), keep=(2, fd))
        one = Held(forked, ours)
        try:
            yield one
        finally:
            forked.signal(signal.SIGKILL)
            forked.reap()
            forked.close()


def until_told(tell: Callable[[bytes], None], told: int) -> None:
    tell(READY + RUN_ID)
    poll = select.poll()
    poll.register(told, select.POLLIN)
    poll.poll()


def test_what_goes_wrong_with_one_reaches_no_other() -> None:
    turns = iter(range(3))

    def work(tell: Callable[[bytes], None], told: int) -> None:
        if next(turns) == 1:
            raise MemoryError
        until_told(tell, told)

    with held(work) as one:
        one.ask(7)
        assert one.hear() == (7, READY + RUN_ID)
        one.ask(8)
        assert one.hear() == (8, ENDED + b"\1")
        one.ask(9)
        assert one.hear() == (9, READY + RUN_ID)
        one.process.signal(signal.SIGTERM)
        assert one.heard(2) == [(7, ENDED + b"\0"), (9, ENDED + b"\0")]
        assert one.ends() == 0


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
@pytest.mark.parametrize("what", ["__init__", "start"])
def test_where_there_is_no_thread_for_one_more_others_go_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception, what: str
) -> None:
    real: Callable[..., Any] = getattr(threading.Thread, what)

    def fails(thread: threading.Thread, *args: Any, **fields: Any) -> object:
        if "instance 8" in (fields.get("name"), getattr(thread, "_name", None)):
            raise error
        return real(thread, *args, **fields)

    monkeypatch.setattr(threading.Thread, what, fails)
    with held(until_told) as one:
        one.ask(7)
        assert one.hear() == (7, READY + RUN_ID)
        one.ask(8)
        assert one.hear() == (8, ENDED + b"\1")
        one.ask(9)
        assert one.hear() == (9, READY + RUN_ID)
        one.process.signal(signal.SIGTERM)
        assert one.heard(2) == [(7, ENDED + b"\0"), (9, ENDED + b"\0")]
        assert one.ends() == 0


def test_when_no_more_is_wanted_it_ends_after_its_last(tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def work(tell: Callable[[bytes], None], told: int) -> None:
        tell(READY + RUN_ID)
        gate.read_text()
        tell(TAKEN)

    with held(work) as one:
        one.ask(1)
        assert one.hear() == (1, READY + RUN_ID)
        one.sock.shutdown(socket.SHUT_WR)
        assert not shim_process.wait(one.process.pidfd, 0.05)
        gate.write_text("x")
        assert [one.hear(), one.hear()] == [(1, TAKEN), (1, ENDED + b"\0")]
        assert one.ends() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_all_of_them_and_raises_in_none(number: signal.Signals) -> None:
    with held(until_told) as one:
        one.ask(1, 2, 3)
        assert one.heard(3) == [(n, READY + RUN_ID) for n in (1, 2, 3)]
        one.process.signal(number)
        assert one.heard(3) == [(n, ENDED + b"\0") for n in (1, 2, 3)]
        assert one.ends() == 0


def test_who_made_it_may_be_gone_and_it_ends_in_order() -> None:
    with held(lambda tell, told: tell(TAKEN)) as one:
        one.sock.close()
        assert one.ends() == 0


def test_each_starts_programs_while_others_do_and_none_waits_for_another_s() -> None:
    """If a child kept another's pipe beyond its execve, the other would wait for the pipe's end."""

    def start() -> None:
        launch = proc_launch.Launch(program="/bin/cat", arguments=["cat"], environment={}, prepare=signals.reset)
        with spawn.spawn(launch) as child:
            os.write(child.stdin, b"x")
            assert os.read(child.stdout, 1) == b"x"
            os.close(child.stdin)
            child.stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            assert child.reap() == 0

    def work(tell: Callable[[bytes], None], told: int) -> None:
        for _ in range(5):
            start()

    with held(work) as one:
        one.ask(*range(8))
        assert one.heard(8) == [(n, ENDED + b"\0") for n in range(8)]
        one.sock.shutdown(socket.SHUT_WR)
        assert one.ends() == 0


def test_nothing_is_forked_in_it_that_would_go_on_with_locks_of_others() -> None:
    """Check that the holder forks no child that continues as Python.

    In such a child, a lock that another thread holds at the fork is never released; Python warns of it since 3.12. A
    child that executes at once is still forked.
    """

    def work(tell: Callable[[bytes], None], told: int) -> None:
        launch = proc_launch.Launch(program="/bin/true", arguments=["true"], environment={}, prepare=signals.reset)
        with spawn.spawn(launch) as child:
            tell(TAKEN + str(child.reap()).encode())
        try:
            shim_process.fork(lambda: None)
        except errors.InternalError as e:
            tell(TAKEN + e.message.encode())

    with held(work) as one:
        one.ask(1)
        refused = b"a process with threads was to fork one that goes on as it"
        assert [one.hear()[1] for _ in range(3)] == [TAKEN + b"0", TAKEN + refused, ENDED + b"\0"]


def test_descriptors_of_instance_go_with_it() -> None:
    def work(tell: Callable[[bytes], None], told: int) -> None:
        tell(TAKEN + str(len(os.listdir("/proc/self/fd"))).encode())

    with held(work) as one:
        counts = set()
        for number in range(3):
            one.ask(number)
            counts.add(one.hear()[1])
            assert one.hear() == (number, ENDED + b"\0")
        assert len(counts) == 1


def test_one_that_has_grown_says_that_it_makes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_worker, "GROWN_BYTES", -(1 << 40))
    with held(until_told) as one:
        one.ask(1)
        assert [one.hear(), one.hear()] == [(1, READY + RUN_ID), (1, FULL)]


def test_what_waits_for_long_is_collected_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_worker, "COLLECT_SECONDS", 0.01)

    class Circle:
        def __init__(self, tell: Callable[[bytes], None]) -> None:
            self.itself, self.tell = self, tell

        def __del__(self) -> None:
            self.tell(TAKEN)

    def work(tell: Callable[[bytes], None], told: int) -> None:
        gc.disable()

        def ready(word: bytes) -> None:
            tell(word)
            Circle(tell)

        until_told(ready, told)

    with held(work) as one:
        one.ask(1)
        assert [one.hear(), one.hear()] == [(1, READY + RUN_ID), (1, TAKEN)]
