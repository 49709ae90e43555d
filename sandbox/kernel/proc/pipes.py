"""Handle an agent's pipes: read without blocking, keep both ends of an endless stream, close one side early."""

from __future__ import annotations

import os
import select
from typing import Final

# Bytes of one read: as many as a pipe holds. malloc maps and unmaps a buffer of 128 KiB or more for each read, which
# then takes 13 us instead of 1 (mallopt(3), M_MMAP_THRESHOLD).
CHUNK_BYTES: Final = 65536


class BoundedTail:
    """Keeps the beginning and the end of a stream that may be endless, and counts the bytes dropped between."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._half)]

    def value(self) -> bytes:
        """Return the kept bytes, with a mark where bytes were dropped."""
        dropped = self.total - len(self._head) - len(self._tail)
        mark = f"\n[{dropped} bytes dropped]\n".encode() if dropped else b""
        return bytes(self._head) + mark + bytes(self._tail)

    def since(self, offset: int) -> tuple[int, bytes]:
        """Return the kept bytes from ``offset`` of the stream on, without a gap, and the offset where they begin."""
        held, begin = bytes(self._head), self.total - len(self._tail)
        if begin == len(held):
            return offset, (held + self._tail)[offset:]
        if offset < len(held):
            return offset, held[offset:]
        begins = max(offset, begin)
        return begins, bytes(self._tail[begins - begin :])


def read(fd: int) -> bytes | None:
    """Read available bytes, at most 64 KiB. Empty at the end of the stream, None if there is nothing yet."""
    try:
        return os.read(fd, CHUNK_BYTES)
    except BlockingIOError:
        return None


def readable(fd: int, seconds: float) -> bool:
    """Whether a descriptor becomes readable, or ends, within ``seconds``. For a pidfd: whether its process ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    # With a negative timeout, such as for a past deadline, poll(2) waits without limit.
    return bool(poll.poll(max(0.0, seconds) * 1000))


def shut(fd: int) -> None:
    """Give the reader its end of file and keep the descriptor's number. The caller closes it later."""
    null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(null, fd, inheritable=False)
    finally:
        os.close(null)
