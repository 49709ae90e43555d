"""A keeper that waits for its connection: given one it serves it, and without one it holds up and leaves nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sandbox.serve import connection, preload, worker_pool
from sandbox.serve.connection import Opening
from sandbox.serve.worker_pool import WorkerPool
from sandbox.shim import process
from tests.unit.sandbox.ahead_loop import PATIENCE, Loop, opened, ready


@pytest.fixture
def loop() -> Iterator[Loop]:
    with Loop().running() as made:
        yield made


@pytest.fixture
def alive() -> Iterator[int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    yield read
    os.close(read)
    os.close(write)


@pytest.fixture
def waiting(loop: Loop, alive: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """One that says what it was given over the connection, in the place of an answer."""

    def serve(opening: Opening, supervisor: Any) -> None:
        said = [opening.caller.pid, opening.caller.uid, opening.caller.gid, opening.until, opening.alive, supervisor]
        opening.sock.setblocking(True)
        opening.sock.sendall(json.dumps(said).encode())

    monkeypatch.setattr(connection, "serve", serve)
    monkeypatch.setattr(preload, "repeat", lambda supervisor: None)
    one = WorkerPool(cast("Any", "the supervisor"), loop, alive, -1)
    yield one
    one.drop()


def test_it_is_given_connection_and_whoever_asked_and_ends(waiting: WorkerPool, loop: Loop, alive: int) -> None:
    told: list[int] = []
    assert waiting.due() == 0.0
    waiting.tick(0.0)
    assert waiting.due() is None
    with opened(alive) as (client, opening):
        assert ready(waiting).take(opening, told.append)
        assert opening.sock.fileno() == -1
        assert json.loads(client.recv(4096)) == [7, 8, 9, 12.5, alive, "the supervisor"]
        assert client.recv(1) == b""
    assert loop.ends(0) == 0
    assert told == [0]


def test_where_none_waits_connection_stays_caller_s(waiting: WorkerPool, alive: int) -> None:
    with opened(alive) as (_, opening):
        assert not waiting.take(opening, lambda status: None)
        assert opening.sock.fileno() >= 0


def test_one_is_for_one_connection_and_next_comes_when_request_has_ended(
    waiting: WorkerPool, loop: Loop, alive: int
) -> None:
    waiting.tick(0.0)
    waiting.tick(1e9)
    assert len(loop.made) == 1
    with opened(alive) as (_, opening):
        assert ready(waiting).take(opening, lambda status: None)
    due = waiting.due()
    assert due is not None
    assert due > time.monotonic()
    waiting.tick(due - 0.001)
    assert len(loop.made) == 1
    waiting.fork_soon()
    waiting.tick(time.monotonic())
    assert len(loop.made) == 2


def test_one_not_ready_yet_is_not_waited_for_and_takes_next(
    waiting: WorkerPool, alive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    waiting.alive = read
    monkeypatch.setattr(preload, "repeat", lambda supervisor: select.select([read], [], []))
    try:
        waiting.tick(0.0)
        with opened(alive) as (client, opening):
            assert not waiting.take(opening, lambda status: None)
            assert waiting.due() is None
            os.write(write, b"go")
            assert ready(waiting).take(opening, lambda status: None)
            assert client.recv(1) == b"["
    finally:
        os.close(read)
        os.close(write)


def test_it_serves_nothing_before_main_loop_has_closed_connection(waiting: WorkerPool, loop: Loop, alive: int) -> None:
    waiting.tick(0.0)
    assert waiting._one is not None
    ready(waiting)
    assert waiting._one.is_ready()
    with opened(alive) as (client, opening):
        raw = worker_pool.CALLER.pack(7, 8, 9, 12.5)
        socket.send_fds(waiting._one.sock, [raw], [opening.sock.fileno()])
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        waiting._one.sock.close()
        client.settimeout(PATIENCE)
        assert client.recv(1) == b"["


@pytest.mark.parametrize("heard", [False, True])
def test_one_let_go_ends_and_is_told_to_nobody(waiting: WorkerPool, loop: Loop, alive: int, *, heard: bool) -> None:
    waiting.tick(0.0)
    if heard:
        ready(waiting)
    waiting.drop()
    assert loop.ends(0) == 0
    with opened(alive) as (_, opening):
        assert not waiting.take(opening, lambda status: None)


def test_one_that_was_killed_takes_no_connection_along(waiting: WorkerPool, loop: Loop, alive: int) -> None:
    told: list[int] = []
    waiting.tick(0.0)
    loop.made[0][0].signal(signal.SIGKILL)
    assert process.wait(loop.made[0][0].pidfd, PATIENCE)
    with opened(alive) as (_, opening):
        assert not waiting.take(opening, told.append)
        assert opening.sock.fileno() >= 0
    assert loop.ends(0) == 137
    assert told == []
    # Only after the pause: a worker that is killed each time must not keep the loop busy.
    due = waiting.due()
    assert due is not None
    assert due >= worker_pool.AGAIN_SECONDS
    waiting.tick(due)
    assert waiting.due() is None


def test_end_of_one_before_its_use_is_seen(waiting: WorkerPool, loop: Loop) -> None:
    waiting.tick(0.0)
    loop.made[0][0].signal(signal.SIGTERM)
    loop.ends(0)
    due = waiting.due()
    assert due is not None
    waiting.tick(due)
    assert len(loop.made) == 2


def test_no_process_costs_no_descriptor_and_is_tried_again(waiting: WorkerPool, loop: Loop) -> None:
    loop.fails = True
    before = len(os.listdir("/proc/self/fd"))
    waiting.tick(0.0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert waiting.due() == worker_pool.AGAIN_SECONDS
    loop.fails = False
    waiting.tick(worker_pool.AGAIN_SECONDS)
    assert waiting.due() is None


def test_it_has_none_of_caller_s_descriptors_but_what_it_needs(
    waiting: WorkerPool, loop: Loop, alive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "serve", lambda opening, supervisor: opening.sock.sendall(_numbers(alive)))
    with opened(alive):  # two descriptors of ours at its fork that it is not to have
        waiting.tick(0.0)
    with opened(alive) as (client, opening):
        assert ready(waiting).take(opening, lambda status: None)
        # 0 to 2, the pipe, the connection, our way to it, and the directory that is being read.
        assert client.recv(64) == b"6 True"


def _numbers(alive: int) -> bytes:
    numbers = os.listdir("/proc/self/fd")
    return f"{len(numbers)} {str(alive) in numbers}".encode()
