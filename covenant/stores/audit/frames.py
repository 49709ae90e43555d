"""What the daemon and the scribe of its log say to each other, over a pair of sockets that nobody else has.

    length of the body, kind, a number; the body

    READY                    the scribe may be given the log
    HELLO    document        the log: signed heads, where the next record goes, the key; its files come along
    ROWS     time, rows      rows of one moment, and more are being made
    LAST     time, rows      rows, maybe none, and nobody else is ready to write
    SHOW                     have `head.json` name the last row, and say how the files are
    BYE                      the daemon writes on by itself
    DONE     frames, head    rows of so many frames are durable, and this is the head behind them
    FULL     frames, error   there was no room for them, and nothing else suffered
    FAILED   reason          nobody knows what is on the disk
    SHOWN    sizes, the two heads of `head.json`, the head that is right
    GONE     document        the log, handed back

Rows are: how many, and how long the last line is; of each its id, then of each its hash; the lines with their newlines.
What does not read so ends the exchange: it comes from nobody of ours.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from policy import errors, ledger

READY, HELLO, ROWS, LAST, SHOW, BYE, DONE, FULL, FAILED, SHOWN, GONE = range(1, 12)
# What one frame carries at most: rows that are written together and are no more than that.
MAX_BYTES: Final = 1 << 30
# The lengths of events and chain, before the bytes of ``head.json``.
SIZES: Final = struct.Struct("<QQ")
_OPENING: Final = struct.Struct("<IBQ")
_OPENING_BYTES: Final = _OPENING.size
_ROWS: Final = struct.Struct("<II")
_ID_BYTES: Final = 36
_HASH_BYTES: Final = 64

Frame = tuple[int, int, bytes]


def frame(kind: int, number: int = 0, body: bytes = b"") -> bytes:
    """A frame as it is sent."""
    return _OPENING.pack(len(body), kind, number) + body


def document(kind: int, number: int, **members: Any) -> bytes:
    """A frame whose body is a JSON object."""
    return frame(kind, number, json.dumps(members).encode())


class Incoming:
    """Frames out of what was received, whatever pieces it came in."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> None:
        """More was received."""
        del self._held[: self._at]
        self._at = 0
        self._held += data

    def take(self) -> Frame | None:
        """The next frame, None where the rest of it is still to come.

        Raises:
            errors.LedgerError: it is none.
        """
        at = self._at
        if len(self._held) - at < _OPENING_BYTES:
            return None
        size, kind, number = _OPENING.unpack_from(self._held, at)
        if size > MAX_BYTES or not READY <= kind <= GONE:
            raise garbage()
        begin = at + _OPENING_BYTES
        if len(self._held) < begin + size:
            return None
        self._at = begin + size
        return kind, number, bytes(memoryview(self._held)[begin : self._at])


def members(body: bytes, **types: type) -> dict[str, Any]:
    """The members of a document, each of its type, and no other.

    Raises:
        errors.LedgerError: it is none.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise garbage() from e
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != types:
        raise garbage()
    return found


def rows(of: Sequence[ledger.Row]) -> bytes:
    """Rows as the body of a frame; nothing for none. Their ids are UUIDs."""
    if not of:
        return b""
    sha256 = hashlib.sha256
    ids, hashes = [row[1] for row in of], [sha256(row[0]).hexdigest() for row in of]
    lines = [row[0] for row in of]
    opening = _ROWS.pack(len(of), len(lines[-1]) + 1)
    return b"".join((opening, "".join(ids).encode("ascii"), "".join(hashes).encode("ascii"), b"\n".join(lines), b"\n"))


class Rows(NamedTuple):
    """What ``rows`` made."""

    ids: list[str]
    hashes: list[str]
    lines: bytes
    last_size: int


def read_rows(body: bytes) -> Rows:
    """What ``rows`` made.

    Raises:
        errors.LedgerError: it is nothing of that kind.
    """
    try:
        count, last_size = _ROWS.unpack_from(body)
        ids_end = _ROWS.size + _ID_BYTES * count
        hashes_end = ids_end + _HASH_BYTES * count
        ids, hashes = body[_ROWS.size : ids_end].decode("ascii"), body[ids_end:hashes_end].decode("ascii")
    except (struct.error, UnicodeDecodeError) as e:
        raise garbage() from e
    lines = body[hashes_end:]
    if not count or lines.count(b"\n") != count or lines.rfind(b"\n", 0, -1) != len(lines) - last_size - 1:
        raise garbage()
    return Rows(
        [ids[at : at + _ID_BYTES] for at in range(0, len(ids), _ID_BYTES)],
        [hashes[at : at + _HASH_BYTES] for at in range(0, len(hashes), _HASH_BYTES)],
        lines,
        last_size,
    )


def garbage() -> errors.LedgerError:
    """What came is no frame of ours, or none that has its place here."""
    return errors.LedgerError("the daemon and the scribe of its log do not understand each other", where="audit")
