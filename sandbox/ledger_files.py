"""The files of the supervisor's log: opened with owner and mode checked, and read from their ends."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from policy import errors, events
from sandbox import durable


def open_directory(path: Path, stack: contextlib.ExitStack) -> int:
    """A descriptor of a directory of the log, made 0700 where there is none and closed with ``stack``.

    Raises:
        errors.LedgerError: it is not ours alone.
        OSError: it cannot be opened.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        durable.sync_directory(path.parent)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise errors.LedgerError(
            f"the log's directory `{path}` is not ours alone", hint=f"chown and chmod 0700 {path}", where=str(path)
        )
    return fd


def check_private(info: durable.Opened, name: str) -> None:
    """Refuse what is no plain file of ours alone, by that one name.

    Raises:
        errors.LedgerError: it is not.
    """
    # A second link would be a name of the same bytes outside our directory.
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        raise errors.LedgerError(f"`{name}` of the log is not a regular file with one name", where=name)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise errors.LedgerError(f"`{name}` of the log is not ours alone", hint=f"chmod 0600 {name}", where=name)


def read_private(name: str, folder: int) -> bytes | None:
    """What such a file holds, None where there is none.

    Raises:
        errors.LedgerError: as ``check_private``.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as stream:
        check_private(durable.opened(fd), name)
        return stream.read(4096)


def write_all(fd: int, content: bytes) -> None:
    """Write at the end of a file that was opened with O_APPEND."""
    # A short write means a full disk or a limit: the next one says which.
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def size(fd: int) -> int:
    """How long a file is."""
    # fstat(2) would ask for the times as well (libc.statx_which). Nobody reads or writes at the offset.
    return os.lseek(fd, 0, os.SEEK_END)


def last_line(fd: int, end: int) -> bytes:
    """The line that ends, with its newline, at offset ``end``; empty when there is none of sane length."""
    block, limit = 4096, events.MAX_LINE_BYTES + 2
    while True:
        step = min(block, end)
        chunk = os.pread(fd, step, end - step)
        if not chunk.endswith(b"\n"):
            return b""
        at = chunk.rfind(b"\n", 0, -1)
        if at >= 0 or step == end:
            return chunk[at + 1 : -1]
        if block > limit:
            return b""
        block *= 8
