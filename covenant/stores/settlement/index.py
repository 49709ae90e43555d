"""The index of ``receipts/working.jsonl``: a SQLite database with the place of each receipt, and no content.

It is derived from the file and made again when it does not fit. So no commit waits for the disk: after a power failure
it is the index of an earlier moment, and takes the lines behind that. ``IndexedFile`` owns it and serialises its use.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from covenant.stores.settlement import rows
from covenant.wire import types
from policy import errors

VERSION: Final = 1
# Raised where a database is damaged. Not only SQLite's: Python decodes its texts, also those of error messages.
DAMAGED: Final = (sqlite3.Error, ValueError, TypeError, OverflowError)
# SQLite's integers have a sign; no clock gets there.
_MOST: Final = 2**63 - 1
# The log of writes is cut to this size when it begins anew: an index that was just made leaves a long one.
_WAL_BYTES: Final = 1 << 20
_BESIDE: Final = ("", "-wal", "-shm", "-journal")

# A receipt's place is the number of its line. An open receipt has no batch.
_TABLES: Final = (
    "CREATE TABLE fits (stamp TEXT NOT NULL, size INTEGER NOT NULL, crc INTEGER NOT NULL) STRICT",
    "INSERT INTO fits VALUES ('', 0, 0)",
    """CREATE TABLE receipts (
        place INTEGER PRIMARY KEY, id TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
        settled_at INTEGER NOT NULL, batch INTEGER
    ) STRICT""",
    """CREATE TABLE batches (
        number INTEGER PRIMARY KEY, batch_id TEXT NOT NULL UNIQUE, confirmed INTEGER NOT NULL
    ) STRICT""",
)
# Made after the rows: sorting them once costs half of keeping them sorted, and no more memory.
_INDEXES: Final = (
    "CREATE UNIQUE INDEX receipts_by_id ON receipts (id)",
    # With the time, only for the integrity check: it compares the columns of an index with those of the table.
    "CREATE INDEX receipts_by_batch ON receipts (batch, place, settled_at)",
)
_ROW: Final = "SELECT place, id, offset, length, batch FROM receipts"
_BATCH: Final = "SELECT batch_id, (SELECT count(*) FROM receipts WHERE batch = number) FROM batches"
_NUMBER: Final = "(SELECT number FROM batches WHERE batch_id = ?)"


class Position(NamedTuple):
    """Where a receipt is in the file: line number from 1, bytes, and the number of its batch."""

    place: int
    id: str
    offset: int
    length: int
    batch: int | None


class Placed(NamedTuple):
    """A receipt with its line, which does not include the newline, and its row."""

    row: Position
    line: bytes
    receipt: types.SettlementReceipt


def stamp(fd: int) -> str:
    """Return the state of the file that an index fits: every write, and a copy from a backup, changes its ctime."""
    info = os.fstat(fd)
    return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_ctime_ns}"


class Index:
    """An open index. Make it with ``opened`` or ``made``.

    Methods raise one of ``DAMAGED`` when the database cannot be used; the caller then drops the index.
    """

    def __init__(self, path: Path | None, file: Path) -> None:
        self.path = path
        self._db = _connected(path)
        self._file = file

    @classmethod
    def opened(cls, path: Path, file: Path, fits: str, crc_to: Callable[[int], int]) -> Self | None:
        """Open the index at ``path``. Returns None if there is none that fits the file up to ``end``.

        It fits by the stamp, or by the checksum of its part of the file: ``crc_to`` returns that of the first bytes.

        Raises:
            errors.StoreError: the name belongs to something else, such as a symlink.
        """
        try:
            if not _is_private(path):
                return None
            index = cls(path, file)
        except (OSError, *DAMAGED):
            return None
        with contextlib.suppress(*DAMAGED):
            if index._fits(fits, crc_to):
                return index
        index.close()
        return None

    @classmethod
    def made(cls, path: Path | None, file: Path, lines: Iterable[tuple[int, bytes]], fits: str) -> Self:
        """Make the index of these lines at ``path``, in place of another; None: in memory.

        Raises:
            errors.StoreError: a line is no receipt, or repeats an id.
            OSError: no file can be made there.
        """
        if path is not None:
            remove(path)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        index = cls(path, file)
        try:
            with index._transaction(fits):
                for statement in _TABLES:
                    index._db.execute(statement)
                index._insert(0, lines)
                index._complete()
        except BaseException:
            index.close()
            raise
        return index

    @property
    def end(self) -> int:
        """The size of the file up to the last line that is in the index."""
        return self._last()[1]

    def take(self, lines: Iterable[tuple[int, bytes]], fits: str) -> None:
        """Add the lines after ``end``, each with its offset."""
        if self._db.execute("SELECT stamp FROM fits").fetchone() == (fits,):
            return
        with self._transaction(fits):
            self._insert(self._last()[0], lines)

    def replace(self, changes: Sequence[Placed], fits: str, crc: int) -> None:
        """Update the rows of receipts whose lines were replaced, and move those behind them.

        ``changes`` have the old rows, with the new lines and receipts, in the order of the file. ``crc`` is that of the
        new file.
        """
        with self._transaction(fits):
            self._db.execute("UPDATE fits SET crc = ?", (crc,))
            moved = before = 0
            for row, line, receipt in changes:
                self._move(moved, before, row.place)
                self._db.execute(
                    "UPDATE receipts SET length = ?, settled_at = ?, batch = ? WHERE place = ?",
                    (len(line), min(receipt.settled_at, _MOST), self._batch(receipt), row.place),
                )
                moved, before = moved + len(line) - row.length, row.place
            self._move(moved, before, _MOST)
            confirmed = {one.receipt.batch_id for one in changes if _is_confirmed(one.receipt)}
            self._db.executemany(
                "UPDATE batches SET confirmed = 1 WHERE batch_id = ?", [(batch_id,) for batch_id in confirmed]
            )

    def by_id(self, receipt_id: str) -> Position | None:
        """Return the row of a receipt. No line has an id with lone surrogates, which SQLite takes for no text."""
        try:
            receipt_id.encode()
        except UnicodeEncodeError:
            return None
        return next(self._rows("WHERE id = ?", receipt_id), None)

    def newest(self, before: int | None, since_ms: int | None, limit: int) -> list[Position]:
        """Return rows before a place, the last ones of the file first, settled at ``since_ms`` or later."""
        bounds = (_MOST if before is None else before, max(0, min(since_ms or 0, _MOST)), limit)
        return list(self._rows("WHERE place < ? AND settled_at >= ? ORDER BY place DESC LIMIT ?", *bounds))

    def open_after(self, place: int, limit: int) -> list[Position]:
        """Return rows of open receipts behind a place, in the order of the file."""
        return list(self._rows("WHERE batch IS NULL AND place > ? ORDER BY place LIMIT ?", place, limit))

    def of_batch(self, batch_id: str, place: int, limit: int) -> list[Position]:
        """Return rows of a batch behind a place, in the order of the file."""
        return list(self._rows(f"WHERE batch = {_NUMBER} AND place > ? ORDER BY place LIMIT ?", batch_id, place, limit))

    def batches(self, limit: int) -> list[tuple[str, int]]:
        """Return the newest batches first: their ids and numbers of receipts."""
        return self._db.execute(f"{_BATCH} ORDER BY number DESC LIMIT ?", (limit,)).fetchall()

    def unconfirmed(self, limit: int) -> list[tuple[str, int]]:
        """Return the batches that no chain has, as ``batches`` does, oldest first."""
        return self._db.execute(f"{_BATCH} WHERE NOT confirmed ORDER BY number LIMIT ?", (limit,)).fetchall()

    def close(self) -> None:
        """Close the database."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _fits(self, fits: str, crc_to: Callable[[int], int]) -> bool:
        """Whether the index is of this version, whole, and accounts for each byte of the file up to its end."""
        if self._db.execute("PRAGMA user_version").fetchone() != (VERSION,):
            return False
        found, size, crc = self._db.execute("SELECT stamp, size, crc FROM fits").fetchone() or ("", 0, -1)
        count, lines = self._db.execute(
            "SELECT count(*) FILTER (WHERE length > 0), total(length + 1) FROM receipts"
        ).fetchone()
        return (
            self._last() == (count, size)
            and int(lines) == size
            and (found == fits or crc_to(size) == crc)
            # Ten times as long as quick_check, which does not see that an id is missing in its index: it would be
            # taken twice.
            and self._db.execute("PRAGMA integrity_check(1)").fetchall() == [("ok",)]
        )

    def _last(self) -> tuple[int, int]:
        found = self._db.execute("SELECT place, offset + length + 1 FROM receipts ORDER BY place DESC LIMIT 1")
        return found.fetchone() or (0, 0)

    def _rows(self, condition: str, *values: Any) -> Iterator[Position]:
        return map(Position._make, self._db.execute(f"{_ROW} {condition}", values))

    def _insert(self, place: int, lines: Iterable[tuple[int, bytes]]) -> None:
        crc: int = self._db.execute("SELECT crc FROM fits").fetchone()[0]

        def values() -> Iterator[tuple[Any, ...]]:
            nonlocal crc
            for number, (offset, line) in enumerate(lines, place + 1):
                one = rows.read(line, f"{self._file}:{number}")
                crc = zlib.crc32(b"\n", zlib.crc32(line, crc))
                yield number, one.id, offset, len(line), min(one.settled_at, _MOST), self._batch(one)

        self._db.executemany("INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?)", values())
        self._db.execute("UPDATE fits SET crc = ?", (crc,))

    def _batch(self, receipt: types.SettlementReceipt) -> int | None:
        """Return the number of the receipt's batch, which gets one with its first receipt."""
        if receipt.batch_id is None:
            return None
        found = self._db.execute(f"SELECT {_NUMBER}", (receipt.batch_id,)).fetchone()[0]
        if found is None:
            values = (receipt.batch_id, _is_confirmed(receipt))
            found = self._db.execute("INSERT INTO batches VALUES (NULL, ?, ?)", values).lastrowid
        return int(found)

    def _move(self, by: int, after: int, last: int) -> None:
        if by:
            self._db.execute(
                "UPDATE receipts SET offset = offset + ? WHERE place > ? AND place <= ?", (by, after, last)
            )

    def _complete(self) -> None:
        try:
            for statement in _INDEXES:
                self._db.execute(statement)
        except sqlite3.IntegrityError as e:
            twice = "WHERE place NOT IN (SELECT min(place) FROM receipts GROUP BY id) ORDER BY place"
            row = next(self._rows(twice))
            raise errors.StoreError(
                f"receipt `{row.id}` stands twice in the file", where=f"{self._file}:{row.place}"
            ) from e
        self._db.execute(f"PRAGMA user_version = {VERSION}")

    @contextlib.contextmanager
    def _transaction(self, fits: str) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("UPDATE fits SET stamp = ?, size = ?", (fits, self.end))
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise


def remove(path: Path) -> None:
    """Remove the index and the files that SQLite keeps beside it.

    Raises:
        OSError: one cannot be removed.
    """
    for name in _BESIDE:
        path.with_name(path.name + name).unlink(missing_ok=True)


def _is_private(path: Path) -> bool:
    """Whether there is an index that only its owner can access.

    Raises:
        errors.StoreError: the name belongs to something else.
    """
    closed = os.path.lexists(path)
    for name in _BESIDE:
        one = path.with_name(path.name + name)
        with contextlib.suppress(FileNotFoundError):
            info = os.lstat(one)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_uid != os.geteuid():
                raise errors.StoreError(
                    f"`{one}` is no plain file of this user with one name",
                    hint=f"remove {one}: the index is made again from the receipts",
                    where=str(one),
                )
            closed = closed and not info.st_mode & 0o077
    return closed


def _connected(path: Path | None) -> sqlite3.Connection:
    # The owner serialises the threads. A second opener, which cannot be, is an error and no wait.
    db = sqlite3.connect(path or ":memory:", timeout=0, isolation_level=None, check_same_thread=False)
    try:
        # Alone with its file, SQLite needs no shared memory beside it.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        # No commit waits for the disk; after a power failure the database is whole, and of an earlier moment.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    except BaseException:
        db.close()
        raise
    return db


def _is_confirmed(receipt: types.SettlementReceipt) -> bool:
    return (receipt.tx_sig or receipt.onchain_sig) is not None
