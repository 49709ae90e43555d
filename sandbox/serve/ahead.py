"""One keeper forked ahead of its connection, so that nobody waits for a fork.

It holds nothing of anybody: what a keeper is that was forked for a connection, it is from the moment it is given one,
over a socket that the main loop alone has the other end of. It says there when it is ready (sandbox.serve.warm), is
given one connection, serves it and ends; another is forked when that request has ended, or works for a second.

What it shares with the main loop is as old as its fork. Of all that only the configuration ever changes there, and
whoever waits with an older one is let go (``drop``); state, log and trust root are opened by each keeper for itself,
when it has a request. Where none is ready, or it was killed, a keeper is forked as ever: nothing rests on it.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from policy import errors
from sandbox.kernel import libc
from sandbox.serve import connection, warm
from sandbox.serve.connection import Opening
from sandbox.serve.conversation import Caller
from sandbox.serve.pool import Loop
from sandbox.supervisor import Supervisor

# As `ps` shows one that waits, and one that was given its connection; the kernel takes 15 bytes of a name.
WAITS, WORKS = "covenant-ahead", "covenant-keeper"
# After one was given a connection, or ended by itself: then another is forked, if no request has ended before.
AGAIN_SECONDS: Final = 1.0
# Who asks (pid, uid, gid), and until when the request must be whole; the connection comes along (SCM_RIGHTS, unix(7)).
_CALLER = struct.Struct("=3id")
_INT = struct.Struct("i")


@dataclass
class _One:
    """One that was forked. ``ended`` is who is told of its end once it has a connection."""

    sock: socket.socket
    ended: Callable[[int], None] | None = None

    def is_ready(self) -> bool:
        """Whether it has said so; no of one that is not there any more, of which the loop is told."""
        try:
            return bool(self.sock.recv(1, socket.MSG_DONTWAIT))
        except OSError:
            return False


@dataclass
class Ahead:
    """The main loop's side: at most one that waits."""

    supervisor: Supervisor
    loop: Loop
    alive: int
    host_network: int
    _one: _One | None = None
    _due: float = 0.0

    def due(self) -> float | None:
        """When to call ``tick`` (time.monotonic); None while one waits."""
        return self._due if self._one is None else None

    def tick(self, now: float) -> None:
        """Fork one, where none waits and it is time."""
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

    def soon(self) -> None:
        """A request has ended: whoever asks next should find one."""
        self._due = min(self._due, time.monotonic())

    def take(self, opening: Opening, ended: Callable[[int], None]) -> bool:
        """Whether one has the connection now: then it is closed here, and ``ended`` is told its exit status."""
        one = self._one
        if one is None or not one.is_ready():
            return False
        self._one = None
        self._due = time.monotonic() + AGAIN_SECONDS
        caller = opening.caller
        with one.sock:
            try:
                raw = _CALLER.pack(caller.pid, caller.uid, caller.gid, opening.until)
                socket.send_fds(one.sock, [raw], [opening.sock.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                return False  # it was killed, of which the loop is told
            # INVARIANT: before our side ends, for which it waits. Whoever closes a connection last may have to wait for
            # what was sent over it and nobody took, and that is never this process.
            opening.sock.close()
        one.ended = ended
        return True

    def drop(self) -> None:
        """Let go of whoever waits: it sees the end of our side, and ends."""
        if self._one is not None:
            self._one.sock.close()
            self._one = None

    def _ended(self, one: _One, status: int) -> None:
        if one.ended is not None:
            one.ended(status)
        elif one is self._one:
            # Nobody's: it held nothing that would have to be taken away.
            self.drop()


def _keep(fd: int, supervisor: Supervisor, alive: int, host_network: int) -> None:
    """In the keeper."""
    warm.again(supervisor)
    with socket.socket(fileno=fd) as sock:
        with contextlib.suppress(OSError):  # the main loop let go of us, or ended
            sock.send(b"r")
        libc.set_name(WAITS)
        opening = _receive(sock, alive, host_network)
    if opening is not None:
        libc.set_name(WORKS)
        connection.serve(opening, supervisor)


def _receive(sock: socket.socket, alive: int, host_network: int) -> Opening | None:
    """The connection, None when the main loop let go of us, or ended."""
    try:
        raw, messages, _, _ = sock.recvmsg(_CALLER.size, socket.CMSG_SPACE(_INT.size), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None  # it closed its side and had not heard that we are ready
    if not raw:
        return None
    pid, uid, gid, until = _CALLER.unpack(raw)
    ((_, _, content),) = messages
    (fd,) = _INT.unpack(content)
    given = socket.socket(fileno=fd)
    given.setblocking(False)
    sock.recv(1)  # its end: the main loop has closed the connection
    return Opening(given, Caller(pid, uid, gid), until, alive, host_network)
