"""A keeper that has served: it serves the same uid again if it can show that nothing is left, and nobody else ever."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from sandbox.kernel import libc
from sandbox.kernel.proc import secret_memory
from sandbox.serve import connection, preload, worker_pool
from sandbox.serve.connection import Opening
from sandbox.serve.worker_pool import Ahead
from sandbox.shim import process
from tests.unit.sandbox.ahead_loop import PATIENCE, Loop, opened, ready

_left: list[object] = []
_PR_SET_KEEPCAPS = 8  # linux/prctl.h


@pytest.fixture
def loop() -> Iterator[Loop]:
    with Loop().running() as made:
        yield made


@pytest.fixture
def waiting(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ahead]:
    """Its keepers say their pid for an answer, and have served well."""
    serves(monkeypatch)
    monkeypatch.setattr(preload, "again", lambda supervisor: None)
    monkeypatch.setattr(secret_memory, "_guarded", False)  # another test of this process may have been
    monkeypatch.setattr(secret_memory, "_held", False)
    monkeypatch.setattr(worker_pool, "IDLE_SECONDS", 86_400.0)  # however slow this machine is
    read, write = os.pipe2(os.O_CLOEXEC)
    one = Ahead(cast("Any", "the supervisor"), loop, read, -1)
    yield one
    one.drop()
    assert loop.heard == {}
    os.close(read)
    os.close(write)


def serves(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object] = lambda: None, *, well: bool = True) -> None:
    def serve(opening: Opening, supervisor: Any) -> bool:
        with opening.sock:
            opening.sock.setblocking(True)
            act()
            opening.sock.sendall(str(os.getpid()).encode())
        return well

    monkeypatch.setattr(connection, "serve", serve)


def asked(waiting: Ahead, told: list[int], uid: int = 8) -> int:
    """One request; who served it."""
    with opened(waiting.alive, uid) as (client, opening):
        if not any(one.uid == uid for one in waiting._idle):
            waiting.soon()
            waiting.tick(time.monotonic())
            ready(waiting)
        assert waiting.take(opening, told.append)
        assert opening.sock.fileno() == -1
        return int(client.recv(64))


def test_the_same_uid_is_served_again_by_the_same_process_and_another_uid_never(waiting: Ahead, loop: Loop) -> None:
    told: list[int] = []
    first = asked(waiting, told)
    assert told == []  # before it has shown that nothing is left, the request has not ended
    loop.hears()
    assert told == [0]
    other = asked(waiting, told, uid=9)
    loop.hears()
    assert other != first
    for _ in range(3):
        for uid, who in ((8, first), (9, other)):
            assert asked(waiting, told, uid) == who
            loop.hears()
    assert told == [0] * 8
    assert len(loop.made) == 2
    waiting.drop()
    assert [loop.ends(0), loop.ends(1)] == [0, 0]
    assert told == [0] * 8  # an end that is nobody's is told to nobody


def test_one_that_is_given_another_s_connection_ends_and_does_not_serve_it(waiting: Ahead, loop: Loop) -> None:
    told: list[int] = []
    asked(waiting, told)
    loop.hears()
    waiting._idle[0].uid = 9  # as no main loop does
    with opened(waiting.alive, 9) as (client, opening):
        assert waiting.take(opening, told.append)
        assert client.recv(64) == b""
    assert loop.ends(0) == 1
    assert told == [0, 1]


def test_who_has_not_served_well_ends(waiting: Ahead, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    serves(monkeypatch, well=False)
    told: list[int] = []
    asked(waiting, told)
    loop.hears()
    assert told == []
    assert loop.ends(0) == 0
    assert told == [0]
    assert waiting._idle == []


def test_one_that_fails_ends_and_that_is_told(waiting: Ahead, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    serves(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    told: list[int] = []
    waiting.tick(0.0)
    with opened(waiting.alive) as (client, opening):
        assert ready(waiting).take(opening, told.append)
        assert client.recv(1) == b""
    assert loop.ends(0) == 137
    assert told == [137]


def _opens() -> None:
    os.open("/dev/null", os.O_RDONLY)


def _forks() -> None:
    read, write = os.pipe()
    if not os.fork():
        libc.set_parent_death_signal(signal.SIGKILL)
        os.close(write)
        while True:
            signal.pause()
    os.close(write)
    os.read(read, 1)  # until it would end with us
    os.close(read)


def _forgets() -> None:
    """A child that has ended, and that nobody waited for."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _replaces() -> None:
    """The same number, and another file."""
    null = os.open("/dev/zero", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)


def _thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _limits() -> None:
    """Whatever it is in the process of this test, which another test may have bounded before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def _pending() -> None:
    """Blocked, sent, and taken by nobody: the mask is as it was, and so is every handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.kill(os.getpid(), signal.SIGUSR1)


def _processor() -> None:
    """Where there is one alone it is the switch of keeping capabilities that is left instead."""
    there = os.sched_getaffinity(0)
    if len(there) > 1:
        os.sched_setaffinity(0, {min(there)})
    else:
        libc.prctl(_PR_SET_KEEPCAPS, 1)


def _kept() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    libc.mlock(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE)
    _left.append(page)


def _locks() -> None:
    """By a descriptor that is the number of the keeper's own, which it had closed."""
    fd = os.open("/dev/null", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.dup2(fd, 1)
    os.close(fd)


def _watches() -> None:
    assert ctypes.CDLL(None).inotify_init1(os.O_CLOEXEC) >= 0


_LEFT: dict[str, Callable[[], object]] = {
    "descriptor": _opens,
    "another file": _replaces,
    "a child": _forks,
    "a dead child": _forgets,
    "a thread": _thread,
    "a clock": lambda: signal.setitimer(signal.ITIMER_REAL, 600),
    "a handler": lambda: signal.signal(signal.SIGALRM, lambda number, frame: None),
    "an ignored signal": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "a blocked signal": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}),
    "umask": lambda: os.umask(0o123),
    "a limit": _limits,
    "a directory": lambda: os.chdir("/proc"),
    "a variable": lambda: os.environ.update(LEFT="behind"),
    "priority": lambda: os.nice(1),
    "a secret": secret_memory.guard_process,
    "a secret that was let go": lambda: secret_memory.Locked(8).close(),
    "a signal that is still to come": _pending,
    "a processor": _processor,
    "a page that is kept from the disk": _kept,
    "children of others": lambda: libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1),
    "a signal of its parent's death": lambda: libc.set_parent_death_signal(signal.SIGUSR1),
    "a bit of its credentials": lambda: libc.prctl(_PR_SET_KEEPCAPS, 1),
    "a turn before others": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    "a setting of threads": lambda: threading.stack_size(1 << 20),
    "a setting of sockets": lambda: socket.setdefaulttimeout(7),
    "a place of modules": lambda: sys.path.append("/tmp/left"),
    "a lock": _locks,
    "a place that is looked at": _watches,
    "memory": lambda: _left.append(bytearray(os.urandom(1 << 16)) * 1024),
}


@pytest.mark.parametrize("name", _LEFT)
def test_what_is_left_behind_ends_it(waiting: Ahead, loop: Loop, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    serves(monkeypatch, _LEFT[name])
    told: list[int] = []
    asked(waiting, told)
    loop.hears()
    assert told == []
    assert loop.ends(0) == 0
    assert told == [0]
    assert waiting._idle == []


def test_one_serves_so_often_and_ends(waiting: Ahead, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "TIMES", 3)
    told: list[int] = []
    served = []
    for _ in range(2):
        served.append(asked(waiting, told))
        loop.hears()
    served.append(asked(waiting, told))
    assert loop.ends(0) == 0
    assert told == [0] * 3
    assert len(set(served)) == 1
    assert asked(waiting, told) != served[0]


def test_so_many_wait_for_one_uid_and_for_all_and_for_so_long(waiting: Ahead, loop: Loop) -> None:
    def at_once(uid: int, count: int) -> None:
        with contextlib.ExitStack() as stack:
            clients = []
            for _ in range(count):
                waiting.soon()
                waiting.tick(time.monotonic())
                client, opening = stack.enter_context(opened(waiting.alive, uid))
                assert ready(waiting).take(opening, told.append)
                clients.append(client)
            for client in clients:
                assert client.recv(64)
        until = time.monotonic() + PATIENCE
        while len(told) < total[0] + count:
            assert time.monotonic() < until
            loop.hears()
        total[0] += count

    told: list[int] = []
    total = [0]
    for uid in range(worker_pool.MOST):
        # None of this uid waits yet, so that each has one that has served nobody.
        at_once(uid, worker_pool.MOST_OF_ONE + 1 if uid == 0 else 1)
        assert sum(one.uid == uid for one in waiting._idle) == (worker_pool.MOST_OF_ONE if uid == 0 else 1)
    assert len(waiting._idle) == worker_pool.MOST
    # The one that waited the longest has gone for the last that came.
    assert sum(one.uid == 0 for one in waiting._idle) == worker_pool.MOST_OF_ONE - 1
    assert told == [0] * total[0]
    last = waiting._idle[-1].since
    waiting._due = last + 2 * worker_pool.IDLE_SECONDS
    assert waiting.due() == waiting._idle[0].since + worker_pool.IDLE_SECONDS
    waiting.tick(last + worker_pool.IDLE_SECONDS)
    assert waiting._idle == []
    for index in range(len(loop.made) - (waiting._one is not None)):
        assert loop.ends(index) == 0
    assert told == [0] * total[0]


def test_one_that_is_killed_while_it_waits_takes_no_connection_along(waiting: Ahead, loop: Loop) -> None:
    told: list[int] = []
    asked(waiting, told)
    loop.hears()
    loop.made[0][0].signal(signal.SIGKILL)
    assert process.wait(loop.made[0][0].pidfd, PATIENCE)
    with opened(waiting.alive) as (_, opening):
        assert not waiting.take(opening, told.append)
        assert opening.sock.fileno() >= 0
    assert loop.ends(0) == 137
    assert told == [0]


def test_its_end_is_heard_of_on_either_way_first(waiting: Ahead, loop: Loop) -> None:
    told: list[int] = []
    asked(waiting, told)
    loop.hears()
    loop.made[0][0].signal(signal.SIGKILL)
    loop.hears()
    assert waiting._idle == []
    loop.ends(0)
    # It said that it is done, and was killed before anybody heard it.
    asked(waiting, told)
    (one,) = waiting._serve
    assert select.select([one.sock], (), (), PATIENCE)[0]
    loop.made[1][0].signal(signal.SIGKILL)
    assert loop.ends(1) == 137
    assert told == [0, 0]
    assert waiting._idle == []


def test_one_that_serves_while_all_are_let_go_is_told_of_once_and_ends(
    waiting: Ahead, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    monkeypatch.setattr(waiting, "alive", read)
    serves(monkeypatch, lambda: os.read(read, 1))
    told: list[int] = []
    waiting.tick(0.0)
    with opened(waiting.alive) as (client, opening):
        assert ready(waiting).take(opening, told.append)
        waiting.drop()
        os.write(write, b"x")
        assert client.recv(64)
    assert loop.ends(0) == 0
    assert told == [0]
    os.close(read)
    os.close(write)
