"""Check how a run waits for a slow vault while it serves other descriptors. These tests use no real vault."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from policy import errors
from sandbox.broker.vault_process import Fetcher

# The first descriptor number that select(2) cannot take.
_MOST_OF_SELECT = 1024


@pytest.fixture
def high() -> Iterator[int]:
    """Return the reading end of a pipe without a writer, under a number as high as if many files were open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] <= _MOST_OF_SELECT + 64:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_OF_SELECT + 64, limits[1]))
    read, write = os.pipe()
    os.close(write)
    try:
        fd = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, _MOST_OF_SELECT)
        os.close(read)
        yield fd
        os.close(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_whoever_came_when_many_were_there_is_served_while_vault_takes_its_time(high: int) -> None:
    ended = errors.KilledError("it was asked to end")
    fetcher: Any = object.__new__(Fetcher)
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, theirs:
        fetcher._own, fetcher._seconds, fetcher._waiting = own, 30.0, deque([lambda found: None])
        assert fetcher.settle({high: lambda: ended}) is ended
