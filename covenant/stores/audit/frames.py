"""What the daemon and the scribe of its log say to each other, over a pair of sockets that nobody else has.

    length of the body, kind, a number; the body

    READY                    the scribe may be given the log
    HELLO    document        the log: signed heads, where the next record goes, the key; its files come along
    ROWS     time, lines     rows of one moment, and more are being made
    LAST     time, lines     rows, maybe none, and nobody else is ready to write
    SHOW                     have `head.json` name the last row, and say how the files are
    BYE                      the daemon writes on by itself
    DONE     frames, head    rows of so many frames are durable, and this is the head behind them
    FULL     frames, error   there was no room for them, and nothing else suffered
    FAILED   reason          nobody knows what is on the disk
    SHOWN    sizes, heads
    GONE     document        the log, handed back

What does not read so ends the exchange: it comes from nobody of ours.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

from policy import errors

READY, HELLO, ROWS, LAST, SHOW, BYE, DONE, FULL, FAILED, SHOWN, GONE = range(1, 12)
# What one frame carries at most: rows that are written together and are no more than that.
MAX_BYTES: Final = 1 << 30
# The lengths of events and chain, before the bytes of ``head.json``.
SIZES: Final = struct.Struct("<QQ")
_OPENING: Final = struct.Struct("<IBQ")
_OPENING_BYTES: Final = _OPENING.size

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


def garbage() -> errors.LedgerError:
    """What came is no frame of ours, or none that has its place here."""
    return errors.LedgerError("the daemon and the scribe of its log do not understand each other", where="audit")
