"""OCSF events as JSON lines in a file that others may rename, or on stdout."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from covenant.export.cursor import Cursor
from covenant.export.sinks import About, RowBatch
from policy import errors
from policy.audit_log import exported, ocsf

_OPEN: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_BLOCK_BYTES: Final = 1 << 16
_encode = msgspec.json.Encoder().encode


def encoded(documents: Iterable[dict[str, Any]]) -> bytes:
    """Return documents as lines."""
    return b"".join([_encode(one) + b"\n" for one in documents])


class Lines:
    """Append whole lines to a file. A file that was renamed is followed by a new one under its name.

    The file is ``path``, in the directory that ``folder`` is the descriptor of. Without them it is stdout. One object
    serves all logs.
    """

    def __init__(self, path: Path | None, folder: int, about: About) -> None:
        self._path = path
        self._folder = folder
        self._about = about
        self._fd = -1

    @property
    def is_file(self) -> bool:
        """Whether it is a file; otherwise it is stdout."""
        return self._path is not None

    async def write(self, raw: bytes) -> None:
        """Append whole lines, durably where it is a file. A full disk is waited for.

        Raises:
            errors.ExportTimeoutError: it took nothing for as long as this export waits.
        """
        backoff = self._about.backoff(f"`{self._path}`")
        while True:
            try:
                self._append(raw)
            except OSError as e:
                if self._path is None:
                    raise errors.LedgerError(f"stdout takes no more: {e.strerror}") from e
                if backoff.since is None:
                    self._about.tell(f"`{self._path}` takes no rows: {e.strerror}; they wait in the log")
                await asyncio.sleep(backoff.failed())
                continue
            if backoff.succeeded() is not None:
                self._about.tell(f"`{self._path}` takes rows again")
            return

    def _append(self, raw: bytes) -> None:
        if self._path is None:
            _write(1, raw)
            return
        if not self._has_its_name(self._path):
            fd = self._opened(self._path)
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
        before = os.fstat(self._fd).st_size
        try:
            _write(self._fd, raw)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, before)
            raise

    def _has_its_name(self, path: Path) -> bool:
        try:
            named = os.stat(path.name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._fd >= 0 and os.path.samestat(named, os.fstat(self._fd))

    def _opened(self, path: Path) -> int:
        """Open the file, and cut a line that a killed export left in part: its row comes again."""
        try:
            fd = os.open(path.name, _OPEN, 0o600, dir_fd=self._folder)
        except PermissionError as e:
            hint = f"let uid {os.geteuid()} write it"
            raise errors.LedgerError(f"`{path}` cannot be written: {e.strerror}", hint=hint, where=str(path)) from e
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise errors.LedgerError(f"`{path}` is not a regular file", hint="name a file, or - for stdout")
        end = os.fstat(fd).st_size
        while end:
            start = max(0, end - _BLOCK_BYTES)
            at = os.pread(fd, end - start, start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        os.ftruncate(fd, end)
        return fd


class OcsfSink:
    """The rows of one log as OCSF events."""

    def __init__(self, lines: Lines, about: About) -> None:
        self.name = "ocsf" if lines.is_file else "stdout"
        self._lines = lines
        self._about = about

    def resume(self, cursor: Cursor) -> None:
        """Go on where the cursor is."""

    def make(self, rows: Sequence[exported.ExportedRow], log: exported.Log, cursor: Cursor) -> RowBatch:
        """Encode the events."""
        about = self._about
        return RowBatch(encoded(ocsf.event(row, host=about.host, version=about.version) for row in rows), cursor)

    async def deliver(self, content: bytes) -> None:
        """Append the events."""
        await self._lines.write(content)


def _write(fd: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[os.write(fd, view) :]
