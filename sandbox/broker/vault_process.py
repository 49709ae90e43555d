"""Ask a slow vault in a process of its own, so that the run's own loop never waits for it.

    shim -> fetcher    agent id, NUL, name
    fetcher -> shim    status, version, value; into locked memory at both ends

It is forked before the agent starts, so that an unusable vault refuses the run. It ends with its shim.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.proc.secret_memory import Locked, guard_process
from sandbox.run_io import Outcome, Watches
from sandbox.shim import process
from sandbox.vault.backend import MAX_VALUE_BYTES, Backend, OpenedSecret

_REPLY: Final = struct.Struct("!BQ")
_VALUE, _ABSENT, _FAILED, _READY = range(4)
_REQUEST_BYTES = 1024

Then = Callable[[OpenedSecret | errors.VaultError | None], None]


class Fetcher:
    """Hold one run's fetcher. Use as a context manager.

    ``make`` opens the vault, in the other process. ``agent_id`` is only for a first question, under no name.

    Raises:
        errors.VaultError: Raised when the vault cannot be opened or does not answer within ``seconds``.
    """

    def __init__(self, make: Callable[[], Backend], agent_id: str, *, seconds: float) -> None:
        self._waiting: deque[Then] = deque()
        self._seconds = seconds
        self._own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo:
            undo.callback(self._own.close)
            with theirs:
                parent = os.getpid()
                self._process = process.fork(lambda: _work(theirs, make, agent_id, parent), keep=[theirs.fileno()])
            undo.callback(self._end)
            self._own.settimeout(seconds)
            ready = self._receive()
            if ready is None or ready[0] != _READY:
                words = "does not answer" if ready is None else ready[2]
                raise errors.VaultError(f"the vault cannot be used: {words}")
            self._own.setblocking(False)
            self._undo = undo.pop_all()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is an answer."""
        return self._own.fileno()

    def ask(self, agent_id: str, name: str, then: Then) -> None:
        """As ``credentials.Source.ask``."""
        try:
            self._own.send(agent_id.encode() + b"\0" + name.encode())
        except OSError:
            then(errors.VaultError("the vault's process does not answer"))
        else:
            self._waiting.append(then)

    def serve(self) -> None:
        """Pass on the answer that has arrived."""
        with Locked(_REPLY.size + MAX_VALUE_BYTES) as buffer:
            try:
                size = self._own.recv_into(buffer.view)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not self._waiting:
                return
            if size < _REPLY.size:
                while self._waiting:
                    self._waiting.popleft()(errors.VaultError("the vault's process has ended"))
                return
            status, version = _REPLY.unpack_from(buffer.view)
            then = self._waiting.popleft()
            if status != _VALUE:
                then(None if status == _ABSENT else errors.VaultError("the vault cannot be asked"))
                return
            with Locked(size - _REPLY.size) as value:
                value.view[:] = buffer.view[_REPLY.size : size]
                then(OpenedSecret(version, value))

    def settle(self, watches: Watches) -> Outcome:
        """Wait for every answer that is due, each at most as long as the first one may take.

        A missing answer closes the fetcher: a late one would be taken for the answer to another question. ``watches``
        are served meanwhile, and an outcome of one of them ends the wait.
        """
        while self._waiting:
            until, count = time.monotonic() + self._seconds, len(self._waiting)
            while len(self._waiting) == count and (left := until - time.monotonic()) > 0:
                ready = _readable((self.fileno(), *watches), left)
                if self.fileno() in ready:
                    self.serve()
                for outcome in (watches[fd]() for fd in ready if fd in watches):
                    if outcome is not None:
                        return outcome
            if len(self._waiting) == count:
                self._own.shutdown(socket.SHUT_RDWR)
                while self._waiting:
                    self._waiting.popleft()(errors.VaultError("the vault does not answer"))
        return None

    def _receive(self) -> tuple[int, int, str] | None:
        try:
            data = self._own.recv(_REQUEST_BYTES)
        except OSError:
            return None
        if len(data) < _REPLY.size:
            return None
        status, version = _REPLY.unpack_from(data)
        return status, version, data[_REPLY.size :].decode("utf-8", "replace")

    def _end(self) -> None:
        self._process.signal(signal.SIGKILL)
        self._process.reap()
        self._process.close()


def _readable(fds: Iterable[int], seconds: float) -> list[int]:
    """Wait up to so many seconds, and return the descriptors that are readable or at their end.

    This uses poll(2): a descriptor may have a number that select(2) does not take.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(seconds * 1000)]


def _work(channel: socket.socket, make: Callable[[], Backend], agent_id: str, parent: int) -> None:
    """Serve one question at a time, until the shim hangs up or dies."""
    libc.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return
    guard_process()
    try:
        vault = make()
        with vault.opened(agent_id, ""):
            pass
    except errors.VaultError as e:
        channel.send(_REPLY.pack(_FAILED, 0) + e.message.encode()[:512])
        return
    channel.send(_REPLY.pack(_READY, 0))
    while request := channel.recv(_REQUEST_BYTES):
        agent, _, name = request.partition(b"\0")
        _answer(channel, vault, agent.decode(), name.decode())


def _answer(channel: socket.socket, vault: Backend, agent_id: str, name: str) -> None:
    try:
        with vault.opened(agent_id, name) as found:
            if found is None:
                channel.send(_REPLY.pack(_ABSENT, 0))
            else:
                channel.sendmsg([_REPLY.pack(_VALUE, found.version), found.value.view])
    except errors.VaultError:
        channel.send(_REPLY.pack(_FAILED, 0))
