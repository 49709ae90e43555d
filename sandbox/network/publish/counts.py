"""Counts of a publish gate: memory that the gate writes and its supervisor reads, so that no report can be lost."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final, NamedTuple

_ROW: Final = struct.Struct("=QQQQ")


class Count(NamedTuple):
    """Connections that were carried and that were refused, and the bytes to and from the agent."""

    connections: int = 0
    refused: int = 0
    in_bytes: int = 0
    out_bytes: int = 0


class Counts:
    """Rows of counts, one for each published port, in a file in memory. Leave the descriptor with ``close``."""

    def __init__(self, fd: int, rows: int) -> None:
        self._memory = mmap.mmap(fd, rows * _ROW.size)

    @classmethod
    def create(cls, rows: int) -> tuple[int, Counts]:
        """Make the file. Returns its descriptor, which is the caller's."""
        fd = os.memfd_create("publish-counts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, rows * _ROW.size)
        # A smaller file would end its reader by SIGBUS.
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, cls(fd, rows)

    def read(self, row: int) -> Count:
        """Return a row. The gate may be writing to it."""
        return Count(*_ROW.unpack_from(self._memory, row * _ROW.size))

    def add(self, row: int, **more: int) -> None:
        """Add to the fields of a row."""
        now = self.read(row)._asdict()
        _ROW.pack_into(self._memory, row * _ROW.size, *(now[name] + more.get(name, 0) for name in now))

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
