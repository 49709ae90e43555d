"""How far an export has come: one private file for each log and sink, replaced in one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from policy import errors
from sandbox.audit.log_follow import Position
from sandbox.storage import atomic_file

_MOST_BYTES: Final = 4 * 1024 * 1024


class Cursor(msgspec.Struct, frozen=True):
    """A sink's acknowledgement: the log's key and the position behind the last row.

    ``open_runs`` are the runs that have started and not ended, for their spans. ``subtrees`` stand for the rows before
    the position, for proofs.
    """

    origin: str = ""
    position: Position | None = None
    open_runs: list[tuple[str, tuple[Any, ...]]] = []
    subtrees: list[bytes] = []


class Cursors:
    """The cursors in one directory. Make it with ``opened``."""

    def __init__(self, path: Path, folder: int) -> None:
        self._path = path
        self._folder = folder

    def load(self, log: str, sink: str) -> Cursor:
        """Return a cursor, at the beginning where there is none.

        Raises:
            errors.LedgerError: the file is no cursor.
        """
        name = _name(log, sink)
        where = str(self._path / name)
        raw = atomic_file.read(self._folder, name, max_bytes=_MOST_BYTES, where=where, error=errors.LedgerError)
        if raw is None:
            return Cursor()
        try:
            return msgspec.json.decode(raw, type=Cursor)
        except msgspec.DecodeError as e:
            raise errors.LedgerError("the cursor cannot be read", hint=f"mv {where} {where}.old", where=where) from e

    def save(self, log: str, sink: str, cursor: Cursor) -> None:
        """Replace a cursor, durably."""
        atomic_file.replace(self._folder, _name(log, sink), msgspec.json.encode(cursor))

    def check(self, log: str, sink: str, cursor: Cursor, origin: str) -> None:
        """Refuse to go on in another log than the cursor's.

        Raises:
            errors.LedgerError: its key is another.
        """
        if cursor.origin not in ("", origin):
            where = str(self._path / _name(log, sink))
            raise errors.LedgerError(
                f"the {log} log is another than was exported so far: its key is {origin[:12]}, not "
                f"{cursor.origin[:12]}",
                hint=f"to export it from its first row: mv {where} {where}.old",
                where=where,
            )


@contextlib.contextmanager
def opened(path: Path, folder: int) -> Iterator[Cursors]:
    """Use a directory for this process alone; ``folder`` is its descriptor.

    Raises:
        errors.LedgerError: another export uses it.
    """
    if not atomic_file.take(folder, 0):
        raise errors.LedgerError(
            "another export uses these cursors", hint="end it, or give --cursors DIR", where=str(path)
        )
    yield Cursors(path, folder)


def directory(path: Path, owner: int) -> int:
    """Open a directory that the worker, uid ``owner``, writes to. It is made if it is absent.

    Raises:
        errors.LedgerError: it is another user's, or others can write there.
    """
    try:
        made = False
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            made = True
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        # INVARIANT: by its descriptor, and ours alone. A user who owns the directory above may have put a link or a
        # directory in its place: the one would give away another directory, the other bring cursors of that user.
        if made and os.fstat(fd).st_uid == os.geteuid():
            os.fchown(fd, owner, owner)
    except OSError as e:
        raise errors.LedgerError(f"directory `{path}` cannot be used: {e.strerror}", where=str(path)) from e
    info = os.fstat(fd)
    if info.st_uid != owner or info.st_mode & 0o022:
        os.close(fd)
        raise errors.LedgerError(
            f"directory `{path}` is not the export's alone, which runs as uid {owner}",
            hint="name a directory that is not there yet, which is then made for it; "
            f"if this one has nothing else: chown {owner}: {path}; chmod 0700 {path}",
            where=str(path),
        )
    return fd


def _name(log: str, sink: str) -> str:
    return f"{log}-{sink}.json"
