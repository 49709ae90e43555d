"""Record what an agent shows in its terminal, as an asciicast (version 2: one header, then one JSON line an event).

The recording holds the agent's output and the sizes, and no key of the caller. Its output has passed the filter of
escape sequences, so that a replay is as harmless as the session was.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import time
from typing import Any

from sandbox.shim.escapes import EscapeFilter


class Recording:
    """One recording. ``feed`` returns the bytes to write; ``sha256`` is the digest of all that it returned."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._size = rows, columns = size
        self._hash = hashlib.sha256()
        self._filter = EscapeFilter()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begin = time.monotonic()
        self._resized = b""
        self._waiting = _line({"version": 2, "width": columns, "height": rows, "timestamp": int(time.time())})

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the recording so far."""
        return self._hash.hexdigest()

    def resize(self, rows: int, columns: int) -> None:
        """Record a size, unless it is the last one again. The last one is written with the next output.

        A caller that resizes while the agent is silent takes no memory by it.
        """
        if (rows, columns) == self._size:
            return
        self._size = rows, columns
        self._resized = _line([self._now(), "r", f"{columns}x{rows}"])

    def feed(self, data: bytes) -> bytes:
        """Return the lines for the next output; empty ``data`` is its end."""
        shown = self._filter.feed(data) if data else self._filter.flush()
        text = self._decoder.decode(shown, final=not data)
        lines = self._waiting + self._resized + (_line([self._now(), "o", text]) if text else b"")
        self._waiting = self._resized = b""
        self._hash.update(lines)
        return lines

    def _now(self) -> float:
        return round(time.monotonic() - self._begin, 6)


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"
