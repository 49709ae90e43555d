"""Read rows from the newest back: only the parts that a query needs, and no part twice.

The index of issuers is filled as rows are written, and for older rows as far back as queries went. So all queries for
one issuer among a million rows read the file once in all, and take eight bytes of memory for each row read.
"""

from __future__ import annotations

import json
import os
import re
import threading
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import pydantic

from covenant.stores.audit import files
from covenant.wire import parts

_BLOCK_BYTES: Final = 256 * 1024
# The beginning of our own lines and of version 1's.
_OPENING: Final = re.compile(
    rb'\{"id":"([0-9A-Za-z-]+)","timestamp_ms":(\d{1,20}),"issuer":\{"display":"[^"\\]*","pubkey":"([^"\\]*)"\}'
)


@dataclass(frozen=True, slots=True)
class Opening:
    """The fields at the beginning of every line."""

    event_id: str
    timestamp_ms: int
    pubkey: str


def opening(line: bytes) -> Opening | None:
    """Return the beginning of a line, or None if it is no event."""
    found = _OPENING.match(line)
    if found is not None:
        return Opening(found[1].decode(), int(found[2]), found[3].decode())
    try:
        event = json.loads(line)
        return Opening(str(event["id"]), int(event["timestamp_ms"]), str(event["issuer"]["pubkey"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def event(line: bytes) -> parts.AuditEvent | None:
    """Return the event of a line, or None if the wire format cannot carry it."""
    try:
        return parts.AuditEvent.model_validate_json(line)
    except pydantic.ValidationError:
        return None


@dataclass(slots=True)
class _Seen:
    newer: array[int] = field(default_factory=lambda: array("Q"))
    older: array[int] = field(default_factory=lambda: array("Q"))


class Rows:
    """The rows of open files. Its methods may be called from several threads at once."""

    def __init__(self, of: files.Files) -> None:
        self._files = of
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Clear the index: the file was replaced."""
        with self._lock:
            self._issuers: dict[str, _Seen] = {}
            # The index holds all rows from this offset on, and none below it.
            self._known_from = self._files.head.events_bytes

    def wrote(self, pubkeys: Iterable[str], lines: Iterable[bytes], offset: int) -> None:
        """Add rows written from ``offset`` on to the index, with their issuers."""
        with self._lock:
            for pubkey, line in zip(pubkeys, lines, strict=True):
                seen = self._issuers.get(pubkey)
                if seen is None:
                    seen = self._issuers[pubkey] = _Seen()
                seen.newer.append(offset)
                offset += len(line) + 1

    def backwards(self, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield every line with its offset, newest first."""
        stop, tail = (self._files.head.events_bytes if end is None else end), b""
        while stop > 0:
            start = max(0, stop - _BLOCK_BYTES)
            block = os.pread(self._files.events, stop - start, start) + tail
            offset = start + len(block)
            lines = block.split(b"\n")[:-1]
            # The first piece may be the end of a line that begins before this block.
            tail = lines.pop(0) + b"\n" if start else b""
            for line in reversed(lines):
                offset -= len(line) + 1
                yield offset, line
            stop = start

    def of(self, pubkey: str) -> Iterator[bytes]:
        """Yield the lines of one issuer, newest first."""
        with self._lock:
            seen = self._issuers.setdefault(pubkey, _Seen())
            newer = seen.newer[:]
        for offset in reversed(newer):
            yield self._line(offset)
        at = 0
        while True:
            with self._lock:
                if at >= len(seen.older) and not self._look_further():
                    return
                found = seen.older[at] if at < len(seen.older) else None
            if found is not None:
                at += 1
                yield self._line(found)

    def _look_further(self) -> bool:
        """Index one more block of rows; returns False if there is none left."""
        if self._known_from == 0:
            return False
        stop = max(0, self._known_from - _BLOCK_BYTES)
        for offset, line in self.backwards(self._known_from):
            found = opening(line)
            if found is not None:
                self._issuers.setdefault(found.pubkey, _Seen()).older.append(offset)
            self._known_from = offset
            if offset <= stop:
                break
        return True

    def _line(self, offset: int) -> bytes:
        size = 4096
        while True:
            block = os.pread(self._files.events, size, offset)
            end = block.find(b"\n")
            if end >= 0 or len(block) < size:
                return block[:end] if end >= 0 else block
            size *= 16
