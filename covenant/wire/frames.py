"""The frames of the socket: a length of 4 bytes, big-endian, and that many bytes of UTF-8 JSON."""

from __future__ import annotations

import struct
from typing import Final

from policy import errors

# Version 1's MAX_FRAME, both ways.
MAX_BYTES: Final = 8 * 1024 * 1024
_HEADER: Final = struct.Struct(">I")
HEADER_BYTES: Final = _HEADER.size


def encode(payload: bytes) -> bytes:
    """One frame.

    Raises:
        errors.FrameError: it is longer than a frame may be.
    """
    if len(payload) > MAX_BYTES:
        raise errors.FrameError(f"a frame of {len(payload)} bytes; {MAX_BYTES} is the most")
    return _HEADER.pack(len(payload)) + payload


def length(header: bytes, *, most: int = MAX_BYTES) -> int:
    """How many bytes follow a header.

    Raises:
        errors.FrameError: more than ``most``.
    """
    size: int = _HEADER.unpack(header)[0]
    if size > most:
        raise errors.FrameError(f"a frame of {size} bytes; {most} is the most")
    return size


class Splitter:
    """Bytes as they come, cut into frames. ``most`` may be raised while it is used."""

    __slots__ = ("_bytes", "_start", "most")

    def __init__(self, *, most: int = MAX_BYTES) -> None:
        self.most = most
        self._bytes = bytearray()
        self._start = 0

    def __len__(self) -> int:
        """How many bytes wait."""
        return len(self._bytes) - self._start

    def feed(self, data: bytes) -> None:
        """More bytes."""
        if self._start and self._start == len(self._bytes):
            self._bytes.clear()
            self._start = 0
        self._bytes += data

    def wanted(self) -> int:
        """How many bytes the frame has that comes next, its header with it; 0 while the header is not whole.

        Raises:
            errors.FrameError: more than ``most``. What follows cannot be read as frames any more.
        """
        start = self._start
        if len(self._bytes) - start < HEADER_BYTES:
            return 0
        size: int = _HEADER.unpack_from(self._bytes, start)[0]
        if size > self.most:
            raise errors.FrameError(f"a frame of {size} bytes; {self.most} is the most")
        return size + HEADER_BYTES

    def next(self) -> bytes | None:
        """The payload of the next frame; None while it is not whole.

        Raises:
            errors.FrameError: as ``wanted``.
        """
        size = self.wanted()
        start = self._start
        if not size or len(self._bytes) - start < size:
            self._compact()
            return None
        self._start = start + size
        return bytes(memoryview(self._bytes)[start + HEADER_BYTES : start + size])

    def _compact(self) -> None:
        # Once a batch, not once a frame: taking from the front moves all that is behind it.
        if self._start:
            del self._bytes[: self._start]
            self._start = 0
