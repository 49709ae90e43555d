"""The ends of an agent's pipes: read without waiting, keep the ends of an endless stream, close a number early."""

from __future__ import annotations

import os
import select

_CHUNK = 65536


class BoundedTail:
    """The first and the last half of a stream that may be endless; says how much fell out between."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._half)]

    def value(self) -> bytes:
        """What was kept, with a mark where bytes were dropped."""
        dropped = self.total - len(self._head) - len(self._tail)
        mark = f"\n[{dropped} bytes dropped]\n".encode() if dropped else b""
        return bytes(self._head) + mark + bytes(self._tail)

    def since(self, offset: int) -> tuple[int, bytes]:
        """What is kept from ``offset`` of the whole stream on, without a gap, and where that begins."""
        held, begin = bytes(self._head), self.total - len(self._tail)
        if begin == len(held):
            return offset, (held + self._tail)[offset:]
        if offset < len(held):
            return offset, held[offset:]
        begins = max(offset, begin)
        return begins, bytes(self._tail[begins - begin :])


def read(fd: int) -> bytes | None:
    """What is there, at most 64 KiB; empty at the end of the stream, None when there is nothing yet."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None


def readable(fd: int, seconds: float) -> bool:
    """Whether there is something to read, or the end, within so many seconds; of a pidfd, whether its process ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    # Of less than nothing, as of a time that is over, poll(2) waits for ever.
    return bool(poll.poll(max(0.0, seconds) * 1000))


def shut(fd: int) -> None:
    """Give the reader its end of file while the number stays ours: the caller closes it later."""
    null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(null, fd, inheritable=False)
    finally:
        os.close(null)
