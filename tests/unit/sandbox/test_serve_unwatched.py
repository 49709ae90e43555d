"""The main loop where the kernel watches nothing more (epoll_ctl(2)): who comes is told, and it goes on."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy import errors
from sandbox import unix_wire
from sandbox.serve.overdue import Overdue
from sandbox.serve.server import Server


class Full:
    """A selector that takes nothing more once it is full."""

    def __init__(self) -> None:
        self.full, self.watched = True, set[int]()

    def register(self, fd: int, events: int, data: object) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.watched.add(fd)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[Server, Full]]:
    config = SimpleNamespace(callers=(), caller_requests=1, request_seconds=60.0)
    supervisor: Any = SimpleNamespace(config=config)
    with socket.socket(socket.AF_UNIX) as listener:
        made, full = Server(supervisor, listener), Full()
        made._selector = full  # type: ignore[assignment]
        made._overdue = Overdue(tmp_path, made)
        yield made, full


def test_who_comes_is_told_that_there_is_no_room_and_counts_no_more(loop: tuple[Server, Full]) -> None:
    server, full = loop
    ours, theirs = socket.socketpair()
    with theirs:
        server._admit(ours)
        assert json.loads(theirs.recv(65536)[unix_wire.LENGTH.size :])["code"] == "too_many_requests"
        assert theirs.recv(1) == b""
        (refused,) = server._refused
        refused.close()
        assert server._waiting == {}
        assert [one.open for one in server._accounts.values()] == [0]
    full.full = False
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server._admit(ours)
        assert list(server._waiting) == [ours.fileno()] == list(full.watched), "the control"


def test_nobody_works_whose_end_would_not_be_heard_of(loop: tuple[Server, Full]) -> None:
    server, full = loop
    read, write = os.pipe2(os.O_CLOEXEC)
    with pytest.raises(errors.KernelError, match="No space left"):
        server.fork(signal.pause, (write,), lambda status: None)
    os.close(write)
    assert os.read(read, 1) == b"", "it is gone"
    assert server._keepers == {}
    full.full = False
    server.fork(lambda: None, (), lambda status: None)
    ((child, _),) = server._keepers.values()
    assert full.watched == {child.pidfd}, "the control"
    assert child.reap() == 0
    child.close()
    os.close(read)
