"""A file system without room."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def filled(place: Path) -> Iterator[None]:
    """Leave no room for another page on the file system of a directory while the block lasts."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    try:
        yield
    finally:
        filler.unlink()


def refuse(monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    """Have this process's writes to files of these names refused, until ``monkeypatch`` is undone."""
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(files):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
