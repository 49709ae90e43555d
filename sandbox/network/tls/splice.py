"""Carries bytes from one socket to another: through a pipe in the kernel, without a copy through this process.

One ``Flow`` is one direction of a connection. It never waits: ``pump`` does what can be done now, and ``wants_to_read``
and ``wants_to_write`` say what it waits for. Pipes are a bounded stock, because the kernel counts them per uid over all
gates (pipe(7), pipe-user-pages-soft): a flow holds one only while its receiver is slower than its sender, and carries
bytes by recv and send when the stock is empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from typing import Final

# What one splice may move, and what one turn of a flow may move before others have theirs.
PIPE_BYTES: Final = 256 << 10
TURN_BYTES: Final = 1 << 20
PIPES: Final = 32
_COPY_BYTES: Final = 64 << 10


class Pipes:
    """A bounded stock of pipes; those that are given back are empty."""

    def __init__(self, most: int = PIPES) -> None:
        self._left = most
        self._idle: list[tuple[int, int]] = []

    def take(self) -> tuple[int, int] | None:
        """The reading and the writing end of an empty pipe; None when all are in use or the kernel gives no more."""
        if self._idle:
            return self._idle.pop()
        if not self._left:
            return None
        try:
            made = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        # A uid over its share gets a smaller pipe, which is only slower.
        with contextlib.suppress(OSError):
            fcntl.fcntl(made[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._left -= 1
        return made

    def give(self, pipe: tuple[int, int], *, empty: bool) -> None:
        """Take a pipe back. One that still holds bytes is closed, since no other connection may get them."""
        if empty:
            self._idle.append(pipe)
            return
        self._left += 1
        for fd in pipe:
            os.close(fd)

    def close(self) -> None:
        """Close all idle pipes."""
        while self._idle:
            for fd in self._idle.pop():
                os.close(fd)


class Flow:
    """One direction. Both sockets do not block and stay the caller's.

    ``pending`` are bytes to be sent before any others. ``moved`` counts what has been sent; ``ended`` is true when
    the sender has ended its side, all is sent, and the receiver has its end of file.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, pipes: Pipes, *, pending: bytes = b"") -> None:
        self._source, self._sink, self._pipes = source, sink, pipes
        self._pipe: tuple[int, int] | None = None
        self._held = 0
        self._pending = memoryview(pending)
        self._end_of_file = False
        self.ended = False
        self.moved = 0

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits for the receiver."""
        return bool(self._held or self._pending)

    @property
    def wants_to_read(self) -> bool:
        """Whether it waits for the sender."""
        return not self.wants_to_write and not self._end_of_file

    def pump(self, budget: int = TURN_BYTES) -> None:
        """Move what can be moved now, at most about ``budget`` bytes.

        Raises:
            OSError: one of the two sides is gone.
        """
        while not self.ended and self.flush() and budget > 0:
            if self._end_of_file:
                self._sink.shutdown(socket.SHUT_WR)
                self.ended = True
                break
            taken = self._fill()
            if taken is None:
                break
            budget -= taken
        if not self._held:
            self._release()

    def flush(self) -> bool:
        """Write the held bytes to the receiver. Returns whether none are left.

        Raises:
            OSError: Raised when the receiver is gone.
        """
        try:
            while self._pending:
                sent = self._sink.send(self._pending)
                self._pending = self._pending[sent:]
                self.moved += sent
            while self._held and self._pipe is not None:
                sent = os.splice(self._pipe[0], self._sink.fileno(), self._held)
                self._held -= sent
                self.moved += sent
        except BlockingIOError:
            return False
        return True

    def push(self, data: bytes) -> None:
        """Send these bytes after what is already held in this process; only before the first ``pump``."""
        self._pending = memoryview(bytes(self._pending) + data)

    def close(self) -> None:
        """Give back what it holds."""
        self._release()

    def _fill(self) -> int | None:
        """Read from the sender. Returns the number of bytes, None if there are none now."""
        if self._pipe is None:
            self._pipe = self._pipes.take()
        try:
            if self._pipe is None:
                data = self._source.recv(_COPY_BYTES)
                self._pending = memoryview(data)
                taken = len(data)
            else:
                taken = self._held = os.splice(self._source.fileno(), self._pipe[1], PIPE_BYTES)
        except BlockingIOError:
            return None
        self._end_of_file = not taken
        return taken

    def _release(self) -> None:
        if self._pipe is not None:
            self._pipes.give(self._pipe, empty=not self._held)
            self._pipe, self._held = None, 0
