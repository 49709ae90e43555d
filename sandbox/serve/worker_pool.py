"""Keepers that wait for a connection, so that nobody waits for a fork: one that has served nobody yet, and for a while
those that have.

One that has served nobody holds nothing of anybody: what a keeper is that was forked for a connection, it is from the
moment it is given one, over a socket that the main loop alone has the other end of. It says there when it is ready
(sandbox.serve.preload), is given one connection and serves it; another is forked when that request has ended, or works
for a second.

One that has served goes on only if it can show that nothing is left of the request (``_is_as_before``); else it ends.
It says so, which is the end of the request, and is given connections of the same uid and never of another: what
its memory still has of the first is near nobody else's. After so many, or when it grew, it ends all the same.

What they share with the main loop is as old as their fork. Of all that only the configuration ever changes there, and
whoever has an older one is let go (``drop``); state, log and trust root are opened by each keeper for itself and for
each request. Where none is ready, or it was killed, a keeper is forked as ever: nothing rests on them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from policy import errors
from sandbox.kernel import libc
from sandbox.network.gate import prefork
from sandbox.serve import connection, preload, process_state
from sandbox.serve.api.session import Caller
from sandbox.serve.connection import Opening
from sandbox.serve.process_state import Bearings
from sandbox.serve.standby_pool import Loop
from sandbox.supervisor import Supervisor

# As `ps` shows one that waits, and one that was given its connection; the kernel takes 15 bytes of a name.
WAITS, WORKS = "covenant-ahead", "covenant-keeper"
# After one was given a connection, or ended by itself: then another is forked, if no request has ended before.
AGAIN_SECONDS: Final = 1.0
# Of those that have served: so many wait for each uid, so many for all, and for so long.
MOST_OF_ONE: Final = 2
MOST: Final = 8
IDLE_SECONDS: Final = 10.0
# One serves so often, and not once more when it has grown by so much.
TIMES: Final = 32
GROWTH_BYTES: Final = 48 << 20
_THREAD_SECONDS: Final = 1.0
# Who asks (pid, uid, gid), and until when the request must be whole; the connection comes along (SCM_RIGHTS, unix(7)).
_CALLER = struct.Struct("=3id")
_INT = struct.Struct("i")
_READY, _GO = b"r", b"g"


@dataclass(eq=False)
class _One:
    """One that was forked. ``ended`` is who is told of the end of what it serves, None while it waits; ``uid`` whose it
    is from its first connection on; ``since`` when it began to wait for another."""

    sock: socket.socket
    ended: Callable[[int], None] | None = None
    uid: int = -1
    since: float = 0.0

    def says(self) -> bytes:
        """What it has said; nothing of one that is not there any more, of which the loop is told."""
        try:
            return self.sock.recv(1, socket.MSG_DONTWAIT)
        except OSError:
            return b""

    def give(self, opening: Opening) -> bool:
        """Whether it has the connection now, which then is closed here."""
        caller = opening.caller
        try:
            raw = _CALLER.pack(caller.pid, caller.uid, caller.gid, opening.until)
            socket.send_fds(self.sock, [raw], [opening.sock.fileno()], socket.MSG_DONTWAIT)
        except OSError:
            return False  # it was killed, of which the loop is told
        # INVARIANT: before it is told to go on, for which it waits. Whoever closes a connection last may have to wait
        # for what was sent over it and nobody took, and that is never this process.
        opening.sock.close()
        try:
            self.sock.send(_GO, socket.MSG_DONTWAIT)
        except OSError:
            # Without a word of ours it would wait for good, and with it whoever asked: the end of our side is one.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        return True


@dataclass
class Ahead:
    """The main loop's side: at most one that has served nobody, and those that have, by whose they are."""

    supervisor: Supervisor
    loop: Loop
    alive: int
    host_network: int
    _one: _One | None = None
    _due: float = 0.0
    _serve: set[_One] = field(default_factory=set)
    # The one that waits the longest first.
    _idle: list[_One] = field(default_factory=list)

    def due(self) -> float | None:
        """When to call ``tick`` (time.monotonic); None where nothing is to be done."""
        dues = [self._due] if self._one is None else []
        dues += [self._idle[0].since + IDLE_SECONDS] if self._idle else []
        return min(dues, default=None)

    def tick(self, now: float) -> None:
        """Let go of who has waited for too long; fork one, where none waits that has served nobody and it is time."""
        while self._idle and now >= self._idle[0].since + IDLE_SECONDS:
            self._close(self._idle[0])
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
        """Whether one has the connection now: then it is closed here, and ``ended`` is told how the request ended: with
        0, or as its keeper did."""
        uid = opening.caller.uid
        # The last that came to wait first: what it touched last is the nearest, and the others may end in time.
        for one in [one for one in reversed(self._idle) if one.uid == uid]:
            self._idle.remove(one)
            if one.give(opening):
                one.ended = ended
                self._serve.add(one)
                return True
            self._close(one)
        fresh = self._one
        if fresh is None or not fresh.says():
            return False
        self._one = None
        self._due = time.monotonic() + AGAIN_SECONDS
        if not fresh.give(opening):
            fresh.sock.close()
            return False
        fresh.ended, fresh.uid = ended, uid
        self._serve.add(fresh)
        self.loop.listen(fresh.sock.fileno(), functools.partial(self._said, fresh))
        return True

    def drop(self) -> None:
        """Let go of all: who waits sees the end of our side, and ends; so does who serves, when that is over."""
        if self._one is not None:
            self._one.sock.close()
            self._one = None
        for one in (*self._idle, *self._serve):
            self._close(one)

    def _said(self, one: _One) -> None:
        """One that has served says that it can serve again, or has ended."""
        if one.sock.fileno() < 0:
            return  # let go since the loop heard of it
        said, ended = one.says(), one.ended
        if said != _READY or ended is None:
            self._close(one)
            return
        self._serve.discard(one)
        one.ended, one.since = None, time.monotonic()
        self._idle.append(one)
        mine = [other for other in self._idle if other.uid == one.uid]
        if len(mine) > MOST_OF_ONE:
            self._close(mine[0])
        elif len(self._idle) > MOST:
            self._close(self._idle[0])
        ended(0)

    def _close(self, one: _One) -> None:
        """Of one that was given a connection: nothing more is heard of it but its end."""
        self._serve.discard(one)
        if one in self._idle:
            self._idle.remove(one)
        self.loop.forget(one.sock.fileno())
        one.sock.close()

    def _ended(self, one: _One, status: int) -> None:
        if one is self._one:
            # Nobody's: it held nothing that would have to be taken away.
            one.sock.close()
            self._one = None
            return
        if one.sock.fileno() >= 0 and one.uid >= 0:
            self._said(one)  # what it said before it ended counts
        if one.sock.fileno() >= 0 and one.uid >= 0:
            self._close(one)
        if one.ended is not None:
            one.ended(status)


def _keep(fd: int, supervisor: Supervisor, alive: int, host_network: int) -> None:
    """In the keeper."""
    _has_had_a_thread()
    preload.again(supervisor)
    connection.enter_host_network(supervisor, host_network)
    # What a request leaves to be collected is looked for among what came after this.
    gc.freeze()
    with socket.socket(fileno=fd) as sock:
        before, grown = Bearings.take(), process_state.resident_bytes() + GROWTH_BYTES
        uids: set[int] = set()
        for _ in range(TIMES):
            with contextlib.suppress(OSError):  # the main loop let go of us, or ended
                sock.send(_READY)
            libc.set_name(WAITS)
            opening = _receive(sock, alive)
            if opening is None:
                return
            libc.set_name(WORKS)
            uids.add(opening.caller.uid)
            if len(uids) > 1:
                raise errors.InternalError("a keeper was given the connection of another user")
            clean = connection.serve(opening, supervisor)
            del opening
            needed = prefork.let_go()
            if not (clean and _is_as_before(before, grown)):
                return
            # After it has shown that nothing is left: these are nobody's yet, and the next will need the same.
            prefork.ahead(needed)


def _has_had_a_thread() -> None:
    """glibc catches a signal of its own from the first thread of a process on (nptl(7)). A run with a network has
    threads, and its keeper looked changed by it for good: none of them was ever asked again."""
    with contextlib.suppress(RuntimeError):  # how Python says EAGAIN
        first = threading.Thread(target=int, name="first")
        first.start()
        first.join()
        # Its interpreter's part has ended; the kernel's takes a moment more, and would be counted among our bearings.
        until = time.monotonic() + _THREAD_SECONDS
        while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < until:
            time.sleep(0.0002)


def _is_as_before(before: Bearings, grown: int) -> bool:
    """Whether nothing is left of a request that came to its end."""
    gc.collect()
    return before.free and Bearings.take() == before and process_state.resident_bytes() <= grown


def _receive(sock: socket.socket, alive: int) -> Opening | None:
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
    sock.recv(1)  # the main loop has closed the connection, or with it its side
    # INVARIANT: we are in the network where requests are served; a descriptor of it is not there any more.
    return Opening(given, Caller(pid, uid, gid), until, alive, -1)
