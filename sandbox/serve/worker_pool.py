"""The prefork worker: one idle process of the supervisor, forked before its connection, that serves one request.

The main loop gives it a connection over a socket pair, and forks the next one when that request has ended or after
``AGAIN_SECONDS``. An idle worker holds nothing of any client, so its end needs no clean-up and no audit event. Where
none is ready the main loop forks a worker for the connection.

A worker shares the configuration as it was at its fork: the main loop drops it on SIGHUP (``drop``). It opens state,
log and trust root after it has its request.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from policy import errors
from sandbox.kernel import libc
from sandbox.serve import connection, preload
from sandbox.serve.api.session import Caller
from sandbox.serve.connection import Opening
from sandbox.serve.standby_pool import PoolLoop
from sandbox.supervisor import Supervisor

# The names that `ps` shows of an idle worker and of one that serves; the kernel takes 15 bytes of a name.
WAITS, WORKS = "covenant-ahead", "covenant-keeper"
# After a worker was given a connection, or ended while idle: then the next is forked, if no request has ended before.
AGAIN_SECONDS: Final = 1.0
# The client (pid, uid, gid), and when its request must be whole; the connection comes along (SCM_RIGHTS, unix(7)).
CALLER = struct.Struct("=3id")
_INT = struct.Struct("i")
_READY = b"r"


@dataclass(eq=False)
class _One:
    """A worker as the main loop has it. ``ended`` is called with the status of its request, None while it is idle."""

    sock: socket.socket
    ended: Callable[[int], None] | None = None

    def is_ready(self) -> bool:
        """Whether it has said that it waits for a connection; False where it has ended."""
        try:
            return self.sock.recv(1, socket.MSG_DONTWAIT) == _READY
        except OSError:
            return False

    def give(self, opening: Opening) -> bool:
        """Send it the connection, and close both ours and our side of the pair. Returns False where it has ended."""
        caller = opening.caller
        try:
            raw = CALLER.pack(caller.pid, caller.uid, caller.gid, opening.until)
            socket.send_fds(self.sock, [raw], [opening.sock.fileno()], socket.MSG_DONTWAIT)
        except OSError:
            self.sock.close()
            return False  # it was killed, and the loop hears of that
        # INVARIANT: the connection first, then our side of the pair, which the worker waits for. The process that
        # closes a connection last may have to wait for what was sent and not read (SO_LINGER): never the main loop.
        opening.sock.close()
        self.sock.close()
        return True


@dataclass
class WorkerPool:
    """The main loop's side: at most one idle worker."""

    supervisor: Supervisor
    loop: PoolLoop
    alive: int
    host_network: int
    _one: _One | None = None
    _due: float = 0.0

    def due(self) -> float | None:
        """When to call ``tick`` (time.monotonic); None while a worker is idle."""
        return self._due if self._one is None else None

    def tick(self, now: float) -> None:
        """Fork a worker where none is idle and it is time."""
        if self._one is not None or now < self._due:
            return
        self._due = now + AGAIN_SECONDS
        with contextlib.suppress(OSError, errors.KernelError):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                one = _One(ours)
                work = functools.partial(_keep, theirs.fileno(), self.supervisor, self.alive, self.host_network)
                keep = tuple(fd for fd in (2, theirs.fileno(), self.alive, self.host_network) if fd >= 0)
                try:
                    self.loop.fork(work, keep, functools.partial(self._ended, one))
                except errors.KernelError:
                    ours.close()
                    raise
            self._one = one

    def fork_soon(self) -> None:
        """A request has ended: fork the next worker at the next ``tick``."""
        self._due = min(self._due, time.monotonic())

    def take(self, opening: Opening, ended: Callable[[int], None]) -> bool:
        """Give the connection to the idle worker. True where it has it: then it is closed here, and ``ended`` is called
        with the worker's exit status."""
        one = self._one
        if one is None or not one.is_ready():
            return False
        self._one = None
        self._due = time.monotonic() + AGAIN_SECONDS
        if not one.give(opening):
            return False
        one.ended = ended
        return True

    def drop(self) -> None:
        """Let the idle worker end: it sees the end of our side."""
        if self._one is not None:
            self._one.sock.close()
            self._one = None

    def _ended(self, one: _One, status: int) -> None:
        if one is self._one:
            self.drop()
        if one.ended is not None:
            one.ended(status)


def _keep(fd: int, supervisor: Supervisor, alive: int, host_network: int) -> None:
    """In the worker: get ready, wait for the connection, serve it."""
    preload.repeat(supervisor)
    connection.enter_host_network(supervisor, host_network)
    # A collection during the request looks only at objects that were made after this.
    gc.freeze()
    with socket.socket(fileno=fd) as sock:
        with contextlib.suppress(OSError):  # the main loop dropped this worker, or ended
            sock.send(_READY)
        libc.set_name(WAITS)
        opening = _receive(sock, alive)
    if opening is not None:
        libc.set_name(WORKS)
        connection.serve(opening, supervisor)


def _receive(sock: socket.socket, alive: int) -> Opening | None:
    """The connection; None where the main loop dropped this worker, or ended."""
    try:
        raw, messages, _, _ = sock.recvmsg(CALLER.size, socket.CMSG_SPACE(_INT.size), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None  # the main loop closed its side and had not read that we are ready
    if not raw:
        return None
    pid, uid, gid, until = CALLER.unpack(raw)
    ((_, _, content),) = messages
    (fd,) = _INT.unpack(content)
    given = socket.socket(fileno=fd)
    given.setblocking(False)
    sock.recv(1)  # returns once the main loop has closed its side of the pair, and the connection before that
    # INVARIANT: the worker is in the network that requests are served in; the descriptor of it is closed.
    return Opening(given, Caller(pid, uid, gid), until, alive, -1)
