"""Small files whole, by the kernel's calls alone: a stream of Python's asks it for five things more, and a run reads a
hundred of them."""

from __future__ import annotations

import os
from pathlib import Path

_CHUNK_BYTES = 1 << 16


def whole(path: str | Path) -> bytes:
    """A file to its end.

    Raises:
        OSError: it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return to_end(fd)
    finally:
        os.close(fd)


def put(path: str | Path, raw: bytes) -> None:
    """Have these bytes, and no others, in a file of the caller's own (0600), made where there is none.

    Not emptied first: ext4 writes a file that was to the disk as soon as it is closed (auto_da_alloc, ext4(5)).

    Raises:
        OSError: it cannot be written, or is a symlink.
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
    """What an open file has from where it stands on.

    Raises:
        OSError: it cannot be read.
    """
    chunks = []
    while chunk := os.read(fd, _CHUNK_BYTES):
        chunks.append(chunk)
    return b"".join(chunks)


def text(path: str | Path) -> str:
    """``whole`` as UTF-8; what is none of it, such as a name that somebody chose, as surrogates (os.fsdecode).

    Raises:
        OSError: as ``whole``.
    """
    return whole(path).decode("utf-8", "surrogateescape")
