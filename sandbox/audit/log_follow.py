"""Follow an audit log as it grows: its acknowledged rows from a position on, across cuts.

The reader takes no lock, so that it delays no writer: a lock of a reader that hangs would stop every run. It reads the
newest signed head, then the rows up to it, and folds their hashes. Rows are returned only where they lead to the head's
chain hash; where a writer or a cut was between its files, the next look finds them whole.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Struct

from policy import errors
from policy.audit_log import chain, events, merkle, truncation
from sandbox.audit import log_files

CHUNK_BYTES: Final = 512 * 1024
MOST_CHUNK_BYTES: Final = 4 * 1024 * 1024
# As many looks in a row may find rows that do not lead to the head: a cut replaces one file after the other.
MOST_MISMATCHES: Final = 100
_FIRST_BYTES: Final = 64 * 1024
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_HEAD: Final = "audit-head"
_CHECKPOINTS: Final = "checkpoints.jsonl"
_CHECKPOINT_KEY: Final = "checkpoint.vkey"
_HINT: Final = "run `covenant audit verify`; to begin anew, move the cursor's file away"


class Position(Struct, frozen=True):
    """Where a reader stands: the next leaf of the log's tree, and where its line begins.

    ``cut`` is the number of rows that were cut from the file's beginning. ``offset`` and ``chain_hash_hex`` are of the
    file that this cut left. ``last_hash_hex`` is the event hash of the row before, empty where none was read.
    """

    index: int = 0
    cut: int = 0
    offset: int = 0
    chain_hash_hex: str = chain.GENESIS
    last_hash_hex: str = ""


class Chunk(Struct, frozen=True):
    """Whole lines, and the positions before and behind them.

    ``lost`` counts the rows that were cut before this reader saw them. ``subtrees`` stand for what was cut, where the
    chunk is the record of a cut. ``whole`` says that nothing more was acknowledged when this was read.
    """

    origin: str
    tree_size: int
    start: Position
    end: Position
    lines: bytes
    whole: bool
    lost: int = 0
    subtrees: tuple[bytes, ...] = ()


class Checkpoints(Struct, frozen=True):
    """The key of the log's checkpoints as it is written, and the last line of their file; empty where it has none."""

    key: bytes = b""
    newest: bytes = b""


class Follower:
    """Read one log: ``path`` is its ``audit`` directory; ``audit-head`` is beside it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self._events: int | None = None
        self._begun: merkle.Frontier | None = None
        self._raw_head: bytes = b""
        self._head: chain.Head | None = None
        self._key: Ed25519PublicKey | None = None
        self._mismatches = 0

    def close(self) -> None:
        """Close the files."""
        if self._events is not None:
            os.close(self._events)
            self._events = None

    def read(self, at: Position | None, limit: int = CHUNK_BYTES) -> Chunk | None:
        """Return the rows behind a position, at most about ``limit`` bytes of them. None: there is no log yet, or its
        files are being changed; look again.

        Raises:
            errors.LedgerError: the position is of another log, or the rows do not lead to the signed head.
        """
        head, key = self._newest()
        if head is None or key is None or not self._opened() or self._events is None:
            return None
        begun = self._beginning(key)
        if begun is None:
            return None
        origin = chain.key_id(key)
        tree_size = begun.size + head.count - (1 if begun.size else 0)
        if at is None or (begun.size != at.cut):
            if at is not None and begun.size < at.cut:
                self._broken(f"the {self.name} log is an older copy: {at.cut} rows were cut, now {begun.size}")
            if begun.size:
                return self._relocated(at, begun, origin, tree_size)
            at = Position()
        if log_files.size(self._events) < head.events_bytes:
            # After a power cut the head carries rows that the files lack until the next opening.
            return None
        lines = self._lines(at.offset, head.events_bytes, limit)
        end = behind(at, lines)
        whole = end.offset >= head.events_bytes
        if whole and (end.offset, end.chain_hash_hex) != (head.events_bytes, head.chain_hash_hex):
            self._mismatched()
            return Chunk(origin, tree_size, at, at, b"", False)
        self._mismatches = 0
        return Chunk(origin, tree_size, at, end, lines, whole)

    def checkpoints(self) -> Checkpoints:
        """Return what is there of the log's checkpoints."""
        key = self._content(_HEAD, _CHECKPOINT_KEY, 4096) or b""
        fd = self._file(self.path.name, _CHECKPOINTS)
        if fd is None:
            return Checkpoints(key)
        try:
            return Checkpoints(key, log_files.last_line(fd, log_files.size(fd)))
        finally:
            os.close(fd)

    def _newest(self) -> tuple[chain.Head | None, Ed25519PublicKey | None]:
        if self._key is None:
            raw_key = self._content(_HEAD, "ledger.pub", 4096)
            self._key = None if raw_key is None else chain.read_public_key(raw_key)
        raw = self._content(_HEAD, "head.json", chain.HEAD_BYTES)
        if raw is None or self._key is None:
            return None, None
        if raw != self._raw_head:
            self._head, self._raw_head = chain.read_head(raw, self._key), raw
        return self._head, self._key

    def _opened(self) -> bool:
        """Open the file that has the name now."""
        fd = self._file(self.path.name, log_files.EVENTS)
        if fd is None:
            return False
        if self._events is not None and os.path.samestat(os.fstat(fd), os.fstat(self._events)):
            os.close(fd)
            return True
        self.close()
        self._events, self._begun = fd, None
        return True

    def _file(self, folder: str, name: str) -> int | None:
        """Open a regular file of a directory beside the log, where both belong to the owner of the log's home.

        No component that the owner could replace is followed: this process may read more than the owner.
        """
        try:
            directory = os.open(self.path.with_name(folder), _DIRECTORY)
        except FileNotFoundError:
            return None
        except OSError as e:
            self._broken(f"`{self.path.with_name(folder)}` cannot be opened: {e.strerror}")
        try:
            fd = os.open(name, _OPEN, dir_fd=directory)
        except FileNotFoundError:
            return None
        except OSError as e:
            self._broken(f"`{name}` of the {self.name} log cannot be opened: {e.strerror}")
        finally:
            owner = os.fstat(directory).st_uid
            os.close(directory)
        info = os.fstat(fd)
        alone = info.st_uid == owner == os.stat(self.path.parent).st_uid
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1 or not alone:
            os.close(fd)
            self._broken(f"`{name}` of the {self.name} log is not a file of the log's owner alone")
        return fd

    def _content(self, folder: str, name: str, limit: int) -> bytes | None:
        fd = self._file(folder, name)
        if fd is None:
            return None
        try:
            return os.pread(fd, limit, 0)
        finally:
            os.close(fd)

    def _beginning(self, key: Ed25519PublicKey) -> merkle.Frontier | None:
        """Return what stands for the rows that were cut from the file. None: its first line is being written."""
        if self._begun is None and self._events is not None:
            first = self._lines(0, log_files.size(self._events), _FIRST_BYTES)
            if not first:
                return merkle.Frontier()
            self._begun = truncation.frontier(first.partition(b"\n")[0], key)
            if self._begun is None:
                self._broken(f"the {self.name} log begins with a record of a cut that does not hold")
        return self._begun

    def _relocated(self, at: Position | None, begun: merkle.Frontier, origin: str, tree_size: int) -> Chunk | None:
        """Return the record of a cut; its chunk ends where this reader stood before the cut."""
        assert self._events is not None
        size = log_files.size(self._events)
        lost = 0 if at is None else max(0, begun.size - at.index)
        skipped = 0 if at is None else max(0, at.index - begun.size)
        first = self._lines(0, size, _FIRST_BYTES).partition(b"\n")[0] + b"\n"
        start = Position(begun.size, begun.size)
        here = _at_leaf(behind(start, first), begun.size)
        while skipped:
            lines = self._lines(here.offset, size, CHUNK_BYTES)
            if not lines:
                return None
            parts = lines.splitlines(keepends=True)[:skipped]
            here, skipped = behind(here, b"".join(parts)), skipped - len(parts)
        if at is not None and at.index > begun.size and here.last_hash_hex != at.last_hash_hex:
            self._broken(f"row {at.index - 1} of the {self.name} log is another than was read before the cut")
        return Chunk(origin, tree_size, start, here, first, False, lost, tuple(begun.hashes))

    def _lines(self, start: int, end: int, limit: int) -> bytes:
        """Return whole lines between two offsets: about ``limit`` bytes, and at least one line."""
        assert self._events is not None
        limit = min(max(limit, 1), MOST_CHUNK_BYTES)
        raw = os.pread(self._events, max(0, min(limit, end - start)), start)
        at = raw.rfind(b"\n")
        if at < 0 and end - start > limit:
            raw = os.pread(self._events, min(events.MAX_LINE_BYTES + 1, end - start), start)
            at = raw.find(b"\n")
        return raw[: at + 1]

    def _mismatched(self) -> None:
        """Let a writer or a cut finish with its files. No writer leaves this for long."""
        self._mismatches += 1
        if self._mismatches > MOST_MISMATCHES:
            self._broken(f"the rows of the {self.name} log do not lead to its signed head")

    def _broken(self, message: str) -> NoReturn:
        raise errors.LedgerError(message, hint=_HINT, where=str(self.path))


def behind(at: Position, lines: bytes) -> Position:
    """Return the position behind these lines."""
    here, last, count = at.chain_hash_hex, at.last_hash_hex, 0
    for line in lines.split(b"\n")[:-1]:
        last = chain.event_hash(line)
        here = chain.chain_hash(here, last)
        count += 1
    return Position(at.index + count, at.cut, at.offset + len(lines), here, last)


def _at_leaf(at: Position, index: int) -> Position:
    """Return the position with another index."""
    return Position(index, at.cut, at.offset, at.chain_hash_hex, at.last_hash_hex)


def shortened(chunk: Chunk, lines: bytes) -> Chunk:
    """Return the chunk with the first of its lines alone."""
    start = chunk.start
    return Chunk(chunk.origin, chunk.tree_size, start, behind(start, lines), lines, False, chunk.lost, chunk.subtrees)
