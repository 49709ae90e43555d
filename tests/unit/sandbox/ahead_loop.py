"""A main loop that the test turns by hand, for the tests of workers that wait."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Callable, Iterator

from policy import errors
from sandbox.serve.api.session import Caller
from sandbox.serve.connection import Opening
from sandbox.serve.worker_pool import WorkerPool
from sandbox.shim import process
from sandbox.shim.process import Shim

PATIENCE = 60.0


class Loop:
    """Forks as the main loop does, and is asked by the test for each end."""

    def __init__(self) -> None:
        self.made: list[tuple[Shim, Callable[[int], None]]] = []
        self.fails = False

    def fork(self, work: Callable[[], None], keep: tuple[int, ...], ended: Callable[[int], None]) -> None:
        if self.fails:
            raise errors.KernelError("fork: no memory")
        self.made.append((process.fork(work, keep=keep), ended))

    def listen(self, fd: int, act: Callable[[], None]) -> None:
        raise AssertionError

    def forget(self, fd: int) -> None:
        raise AssertionError

    def recover(self) -> None:
        raise AssertionError

    def ends(self, index: int) -> int:
        """Wait until this one has ended, and tell."""
        child, ended = self.made[index]
        assert process.wait(child.pidfd, PATIENCE)
        status = child.reap()
        assert status is not None
        ended(status)
        return status

    @contextlib.contextmanager
    def running(self) -> Iterator[Loop]:
        """Kill the remaining workers at the end of the block."""
        try:
            yield self
        finally:
            for child, _ in self.made:
                child.signal(signal.SIGKILL)
                child.reap()
                child.close()


def ready(one: WorkerPool) -> WorkerPool:
    """One that has said that it is ready, or has ended."""
    assert one._one is not None
    poll = select.poll()
    poll.register(one._one.sock, select.POLLIN)
    assert poll.poll(PATIENCE * 1000)
    return one


@contextlib.contextmanager
def opened(alive: int, uid: int = 8) -> Iterator[tuple[socket.socket, Opening]]:
    """A client, and its connection as the main loop has it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    with ours, theirs:
        yield ours, Opening(theirs, Caller(7, uid, 9), 12.5, alive, -1)
