"""Serve in the publish gate's own process: take connections of the host, and carry each to its port of the agent.

It has one thread and one epoll, and does not copy the carried bytes. It is in an empty network namespace and can
neither make nor connect a socket: ``sandbox.network.publish.connector`` begins the connections to the agent.
``sandbox.network.publish.gate`` starts both.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from sandbox.network.publish import connector
from sandbox.network.publish.counts import Counts
from sandbox.network.tls.connection import reset_on_close
from sandbox.network.tls.splice import Flow, Pipes
from sandbox.rate_limit import Tokens

CONNECTIONS: Final = 256
# Below what the gateway's walls allow (sandbox.network.base_rules): more clients wait in the listener's backlog.
PER_SECOND, BURST = 56, 256
_CONNECT_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.25
_WAIT_SECONDS: Final = 0.02


Begin = Callable[[int], socket.socket | None]


class Carried:
    """One connection: the host's side ``near`` and the agent's side ``far``, with a flow each way."""

    def __init__(self, row: int, near: socket.socket, far: socket.socket, pipes: Pipes, now: float) -> None:
        self.row, self.near, self.far = row, near, far
        self.up, self.down = Flow(near, far, pipes), Flow(far, near, pipes)
        self.connected = self.closed = False
        self.deadline = now + _CONNECT_SECONDS

    def interest(self) -> Mapping[int, int]:
        """Return the events to wait for, by descriptor."""
        if self.closed:
            return {}
        if not self.connected:
            return {self.far.fileno(): select.EPOLLOUT}
        wanted = {}
        for one, reads, writes in ((self.near, self.up, self.down), (self.far, self.down, self.up)):
            mask = (select.EPOLLIN if reads.wants_to_read else 0) | (select.EPOLLOUT if writes.wants_to_write else 0)
            if mask:
                wanted[one.fileno()] = mask
        return wanted

    def turn(self) -> None:
        """Carry what can be carried now, and never wait.

        Raises:
            OSError: Raised when one of the two sides is gone.
        """
        if not self.connected:
            failed = self.far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            self.connected = True
        self.up.pump()
        self.down.pump()
        if self.up.ended and self.down.ended:
            self.close(reset=False)

    def close(self, *, reset: bool = True) -> None:
        """Close both sides, by a reset unless all bytes were carried."""
        self.closed = True
        self.up.close()
        self.down.close()
        for one in (self.near, self.far):
            if reset:
                with contextlib.suppress(OSError):
                    reset_on_close(one)
            one.close()


class PublishServer:
    """Serves ``listeners``, which do not block; each has the agent's port and its row of ``counts``.

    ``begin`` returns a socket that connects to a port of the agent, None if it cannot begin.
    """

    def __init__(self, begin: Begin, listeners: Mapping[int, tuple[socket.socket, int]], counts: Counts) -> None:
        self._begin, self._counts = begin, counts
        self._listeners = {one.fileno(): (row, one, port) for row, (one, port) in listeners.items()}
        self._pipes, self._epoll = Pipes(), select.epoll()
        self._tokens = Tokens(PER_SECOND, BURST, time.monotonic())
        self._open: set[Carried] = set()
        self._by_fd: dict[int, Carried] = {}
        self._waited: dict[Carried, Mapping[int, int]] = {}
        self._takes = False
        self._next_look = 0.0
        self._take_more(True)

    def serve(self) -> None:
        """Serve for good."""
        while True:
            self.turn(_WAIT_SECONDS if not self._takes else _LOOK_SECONDS if self._open else None)

    def turn(self, wait_seconds: float | None) -> None:
        """Wait so long for something to do (None: without end), and do what can be done."""
        for fd, _ in self._epoll.poll(wait_seconds):
            if fd in self._listeners:
                self._accept(*self._listeners[fd])
            elif (one := self._by_fd.get(fd)) is not None:
                self._carry(one)
        now = time.monotonic()
        if not self._takes and len(self._open) < CONNECTIONS:
            self._take_more(True)
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            for one in [one for one in self._open if not one.connected and one.deadline <= now]:
                self._end(one)

    def close(self) -> None:
        """Close all connections. The caller still owns the listeners."""
        for one in tuple(self._open):
            self._end(one)
        self._pipes.close()
        self._epoll.close()

    def _take_more(self, takes: bool) -> None:
        """Wait for new connections, or leave them in the backlog."""
        if takes != self._takes:
            self._takes = takes
            for fd in self._listeners:
                if takes:
                    self._epoll.register(fd, select.EPOLLIN)
                else:
                    self._epoll.unregister(fd)

    def _accept(self, row: int, listener: socket.socket, port: int) -> None:
        """Take one connection: the next is another event."""
        now = time.monotonic()
        if not self._takes or len(self._open) >= CONNECTIONS or not self._tokens.take(now):
            self._take_more(False)
            return
        try:
            near, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # ECONNABORTED, or no descriptor left on the machine: not in a busy loop.
            self._take_more(False)
            return
        self._take(row, near, port, now)

    def _take(self, row: int, near: socket.socket, port: int, now: float) -> None:
        # Not socket.setblocking, whose ioctl the gate's filter does not have.
        fcntl.fcntl(near, fcntl.F_SETFL, fcntl.fcntl(near, fcntl.F_GETFL) | os.O_NONBLOCK)
        far = self._begin(port)
        if far is None:
            self._counts.add(row, refused=1)
            near.close()
            return
        one = Carried(row, near, far, self._pipes, now)
        self._open.add(one)
        self._wait_for(one)

    def _carry(self, one: Carried) -> None:
        was = one.connected
        before = (one.up.moved, one.down.moved)
        try:
            one.turn()
        except BlockingIOError:
            pass
        except OSError:
            self._end(one)
        finally:
            moved = {"in_bytes": one.up.moved - before[0], "out_bytes": one.down.moved - before[1]}
            self._counts.add(one.row, connections=int(one.connected and not was), **moved)
        self._wait_for(one)

    def _end(self, one: Carried) -> None:
        if not one.connected:
            self._counts.add(one.row, refused=1)
        one.close()
        self._wait_for(one)

    def _wait_for(self, one: Carried) -> None:
        """Register the connection's present events with epoll."""
        before, after = self._waited.get(one, {}), one.interest()
        if one.closed:
            # Closed descriptors have left the epoll by themselves; their numbers may be another's already.
            self._open.discard(one)
            self._waited.pop(one, None)
            for fd in before:
                if self._by_fd.get(fd) is one:
                    del self._by_fd[fd]
            return
        for fd in before.keys() - after.keys():
            # A descriptor registered without events would still report a hang-up, again and again.
            self._epoll.unregister(fd)
            del self._by_fd[fd]
        for fd, mask in after.items():
            if fd not in before:
                self._epoll.register(fd, mask)
                self._by_fd[fd] = one
            elif before[fd] != mask:
                self._epoll.modify(fd, mask)
        self._waited[one] = after


def serve(gate: Any) -> None:
    """Serve as the gate process: seal, then serve the listeners, which are named by their row."""
    ports = gate.plan["ports"]
    counts = Counts(gate.fds["counts"], len(ports))
    listeners = {row: (socket.socket(fileno=gate.fds[f"{row}"]), port) for row, port in enumerate(ports)}
    line = socket.socket(fileno=gate.fds["line"])
    server = PublishServer(functools.partial(connector.asked, line), listeners, counts)
    gate.seal()
    server.serve()
