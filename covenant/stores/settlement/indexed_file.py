"""The receipts' file with its index: answers where a receipt is, and reads it from there.

The file is the truth. The journal's thread reports each durable write (``follow``), and the index follows in that
thread, so that it is never ahead of the disk. Any doubt about the index, such as a row that leads to another receipt,
drops it; the next question makes it again from the file. Where the disk cannot take it, it is made in memory, so that
a full disk makes no answer wrong and loses no receipt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from covenant.stores import journal
from covenant.stores.settlement import rows
from covenant.stores.settlement.index import DAMAGED, Index, Placed, Position, remove, stamp
from policy import errors

_LOG: Final = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 1 << 20

T = TypeVar("T")


class _Unfit(Exception):
    """A row of the index leads to something else than its receipt."""


class IndexedFile:
    """The open file and its index. All methods block: call them in worker threads.

    INVARIANT: descriptor, size and index change together under the lock. So a reader beside a rewrite reads the old
    file by the old rows until the rewrite is durable, and then the new file by the new rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index_path = path.with_name("index.db")
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0
        self._index: Index | None = None
        self._changes: Sequence[Placed] = ()

    def follow(self, fd: int, size: int) -> None:
        """Take in what the journal wrote: called by its thread at its opening, and after each write that is durable.

        Raises:
            errors.StoreError: at the opening: a line is no receipt or repeats an id, or the index's name is not ours.
        """
        with self._lock:
            changes, self._changes = self._changes, ()
            is_opening, is_other, self._size = self._fd < 0, False, size
            if is_opening:
                self._fd = os.dup(fd)
                self._index = Index.opened(self._index_path, self._path, stamp(fd), self._crc_to)
            elif is_other := not os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                # This frees the old file's room before the index needs some.
                os.dup2(fd, self._fd, inheritable=False)
            if self._index is not None:
                try:
                    self._take_in(self._index, changes if is_other else None)
                except (*DAMAGED, OSError, errors.StoreError, _Unfit) as e:
                    # The write is durable all the same. The next question makes the index again.
                    self._drop(e)
            if is_opening:
                self._fitting()

    def will_change(self, changes: Sequence[Placed]) -> None:
        """Announce the changes of the rewrite that is going on; called in the journal's thread."""
        self._changes = changes

    def find(self, rows_of: Callable[[Index], Sequence[Position]]) -> list[Placed]:
        """Return the receipts of the rows that ``rows_of`` selects.

        Raises:
            errors.StoreError: the file cannot be read, or a line of it is no receipt.
        """
        return self.ask(lambda index: self._read(rows_of(index)))

    def ask(self, question: Callable[[Index], T]) -> T:
        """Return the answer of the index, which is made again if it turns out not to fit.

        Raises:
            errors.StoreError: as ``find``.
        """
        with self._lock:
            try:
                return question(self._fitting())
            except (*DAMAGED, OSError, _Unfit) as e:
                self._drop(e)
            try:
                return question(self._fitting())
            except (*DAMAGED, OSError, _Unfit) as e:
                self._drop(e)
                raise errors.StoreError(f"the receipts cannot be read: {e}", where=str(self._path)) from e

    def close(self) -> None:
        """Close the file and its index."""
        with self._lock:
            if self._index is not None:
                self._index.close()
            if self._fd >= 0:
                os.close(self._fd)
            self._index, self._fd = None, -1

    def _take_in(self, index: Index, changes: Sequence[Placed] | None) -> None:
        """Have the index follow the file: new lines at its end, or a rewrite with changes."""
        fits = stamp(self._fd)
        if changes is None:
            index.take(self._lines(index.end), fits)
        elif index.path is None:
            raise _Unfit("it is in memory, and the disk had room for a rewrite")
        else:
            index.replace(changes, fits, self._crc_to(self._size))

    def _crc_to(self, end: int) -> int:
        """Return the CRC-32 of the file up to ``end``, or -1, which no CRC is, if the file is shorter."""
        position = crc = 0
        while position < end:
            chunk = os.pread(self._fd, min(_CHUNK_BYTES, end - position), position)
            if not chunk:
                return -1
            position, crc = position + len(chunk), zlib.crc32(chunk, crc)
        return crc

    def _fitting(self) -> Index:
        if self._index is None:
            fits = stamp(self._fd)
            try:
                self._index = Index.made(self._index_path, self._path, self._lines(0), fits)
            except (sqlite3.Error, OSError) as e:
                with contextlib.suppress(OSError):
                    remove(self._index_path)
                _LOG.warning("the index of the receipts is in memory until the disk takes it: %s", e)
                self._index = Index.made(None, self._path, self._lines(0), fits)
        return self._index

    def _drop(self, reason: Exception) -> None:
        _LOG.warning("the index of the receipts is made again: %s", reason)
        if self._index is not None:
            self._index.close()
        self._index = None

    def _read(self, found: Sequence[Position]) -> list[Placed]:
        if not found:
            return []
        start = min(row.offset for row in found)
        size = max(row.offset + row.length for row in found) - start
        if size > _CHUNK_BYTES:
            return [self._placed(row, os.pread(self._fd, row.length, row.offset)) for row in found]
        # Neighbours are read at once.
        near = os.pread(self._fd, size, start)
        return [self._placed(row, near[row.offset - start : row.offset - start + row.length]) for row in found]

    def _placed(self, row: Position, line: bytes) -> Placed:
        try:
            receipt = rows.read(line, f"{self._path}:{row.place}")
        except errors.StoreError as e:
            raise _Unfit(str(e)) from e
        if receipt.id != row.id or (receipt.batch_id is None) != (row.batch is None):
            raise _Unfit(f"line {row.place} is not receipt `{row.id}`")
        return Placed(row, line, receipt)

    def _lines(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the durable lines from an offset on, each with its offset."""
        for whole in journal.lines_by_chunk(self._fd, start, self._size, where=self._path):
            for line in whole:
                yield start, line
                start += len(line) + 1
