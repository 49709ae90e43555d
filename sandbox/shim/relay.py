"""Move the bytes of one direction of a stream: bounded, without blocking, and with backpressure.

A relay reads only when everything that it read before is written. So a slow reader slows the writer down, as with one
pipe between the two, and a relay holds at most one chunk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Collection
from typing import Final

from sandbox.kernel.proc import pipes
from sandbox.shim.agent_loop import AgentLoop

# What one turn moves at most, and the size that a pipe is asked to have for it.
CHUNK_BYTES: Final = 256 * 1024
# Room for the rest of an agent's output in the caller's pipe: a full pipe, a chunk, and what the agent's pipe holds.
_REST_BYTES: Final = 1 << 20


class ByteCount:
    """Count the bytes of one direction, and digest them."""

    def __init__(self) -> None:
        self._hash, self.total = hashlib.sha256(), 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        self.total += len(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of all bytes."""
        return self._hash.hexdigest()


class Sink:
    """One descriptor that a relay writes to. ``change`` returns what is written for the bytes that were read."""

    def __init__(self, fd: int, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self.fd, self._change = fd, change
        self._pending = memoryview(b"")
        self.broken = False

    def put(self, data: bytes) -> None:
        """Take the next bytes; all that were taken before are written. Empty at the end of the stream."""
        self._pending = memoryview(b"" if self.broken else self._change(data))

    def written(self) -> bool:
        """Write what is pending. Returns False when the descriptor takes no more for now."""
        try:
            while self._pending:
                self._pending = self._pending[os.write(self.fd, self._pending) :]
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.broken, self._pending = True, memoryview(b"")  # the reader is gone
        return True


class Relay:
    """Carry bytes from ``source`` to ``sink``, both non-blocking; ``copy`` gets them too.

    The end of file of the source closes the sinks; a sink without a reader closes the source, whose writer then gets
    EPIPE. Closing replaces a descriptor by /dev/null, so that its number stays the owner's. ``seen`` takes the bytes as
    they were read. ``over`` is called at the end of file, when all is written.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        *,
        seen: Callable[[bytes], object] = lambda data: None,
        copy: Sink | None = None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._seen, self._over = source, seen, over
        self._sinks = (Sink(sink), *(() if copy is None else (copy,)))
        self._blocked: Sink | None = None
        self._ended = self._closed = False

    def start(self, loop: AgentLoop, first: bytes = b"") -> None:
        """Begin to read. ``first`` is written to the sink before."""
        self._loop = loop
        for fd in self.fds:
            os.set_blocking(fd, False)
            enlarge(fd, CHUNK_BYTES)
        loop.listen(self._source, self._read)
        if first:
            self._sinks[0].put(first)
            self._write()

    @property
    def fds(self) -> Collection[int]:
        """Return all descriptors; none when the relay is over."""
        return () if self._closed else (self._source, *(one.fd for one in self._sinks))

    def stop(self) -> None:
        """Move nothing more, and close all sides."""
        if not self._closed:
            fds = self.fds
            self._closed = True
            for fd in fds:
                self._loop.forget(fd)
                pipes.shut(fd)

    def _read(self) -> None:
        data = _read(self._source)
        if data is None:
            return
        self._ended = not data
        if data:
            self._seen(data)
        for one in self._sinks:
            one.put(data)
        self._write()

    def _write(self) -> None:
        """Write what was read, then read on. What waits for a sink reads nothing meanwhile."""
        before, self._blocked = self._blocked, next((one for one in self._sinks if not one.written()), None)
        if self._sinks[0].broken or (self._ended and self._blocked is None):
            self.stop()
            if not self._sinks[0].broken:
                self._over()
            return
        if self._blocked is before:
            return
        self._loop.forget(self._source if before is None else before.fd)
        if self._blocked is None:
            self._loop.listen(self._source, self._read)
        else:
            self._loop.listen(self._blocked.fd, self._write, writable=True)


def enlarge(fd: int, size: int) -> None:
    """Ask for a pipe of this size, where ``fd`` is a pipe and the kernel allows it. It never becomes smaller."""
    with contextlib.suppress(OSError):
        if fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) < size:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)


def make_room(fd: int) -> None:
    """Make room in a pipe of the caller for the rest of the output, so that a slow reader does not hold up the end."""
    enlarge(fd, _REST_BYTES)


def _read(fd: int) -> bytes | None:
    try:
        return os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError as e:
        if e.errno != errno.EIO:  # the other side of a terminal is closed
            raise
        return b""
