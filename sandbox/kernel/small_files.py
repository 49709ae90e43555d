"""Read and write small files whole, by system calls only.

A stream of Python makes five more, and a run reads 100 files.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_CHUNK_BYTES = 1 << 16


def whole(path: str | Path) -> bytes:
    """Read a file to its end.

    Raises:
        OSError: Raised when it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return to_end(fd)
    finally:
        os.close(fd)


def open_plain(path: str | Path) -> int:
    """Open a regular file to read. A FIFO does not block, and a symlink is not followed. The caller closes it.

    Raises:
        OSError: Raised when it cannot be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return fd


def put(path: str | Path, raw: bytes) -> None:
    """Replace the content of a private file (0600), which is created if it does not exist.

    The file is not truncated first: ext4 flushes a truncated file to the disk at its close (auto_da_alloc, ext4(5)).

    Raises:
        OSError: Raised when it cannot be written, or is a symlink.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        left = memoryview(raw)
        while left:
            left = left[os.write(fd, left) :]
        if os.lseek(fd, 0, os.SEEK_END) > len(raw):
            os.ftruncate(fd, len(raw))
    finally:
        os.close(fd)


def to_end(fd: int) -> bytes:
    """Read an open file from its offset to its end.

    Raises:
        OSError: Raised when it cannot be read.
    """
    chunks = []
    while chunk := os.read(fd, _CHUNK_BYTES):
        chunks.append(chunk)
    return b"".join(chunks)


def text(path: str | Path) -> str:
    """Read a file as UTF-8. Other bytes, such as those in names chosen by users, become surrogates (os.fsdecode).

    Raises:
        OSError: Raised when it cannot be opened or read.
    """
    return whole(path).decode("utf-8", "surrogateescape")
