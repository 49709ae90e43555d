"""Keep the end of what an agent wrote to its terminal, for a caller that attaches later and for ``covenant logs``."""

from __future__ import annotations

from typing import Final

# The most bytes that are kept of one session, as the agent wrote them. They are filtered where they are shown.
SCROLLBACK_BYTES: Final = 64 * 1024
# A line that is longer is not waited for.
_LINE_BYTES: Final = 4096


class Scrollback:
    """The last bytes of one terminal."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._total = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        self._total += len(data)
        self._kept += data[-SCROLLBACK_BYTES:]
        # Cut in steps: most calls bring a few bytes, and a cut moves all that is kept.
        if len(self._kept) > 2 * SCROLLBACK_BYTES:
            del self._kept[:-SCROLLBACK_BYTES]

    def since(self, offset: int) -> tuple[int, bytes]:
        """Return the kept bytes from ``offset`` of the stream on, and the offset where they begin."""
        kept = bytes(self._kept[-SCROLLBACK_BYTES:])
        first = self._total - len(kept)
        begins = max(offset, first)
        return begins, kept[begins - first :]

    def replay(self) -> bytes:
        """Return the end of the output for a new screen: from the beginning of a line on, where bytes are missing."""
        begins, kept = self.since(0)
        if not begins:
            return kept
        line = kept.find(b"\n", 0, _LINE_BYTES)
        # The beginning of a cut sequence or character is missing; its rest is text at most.
        return kept[line + 1 :] if line >= 0 else kept.lstrip(bytes(range(0x80, 0xC0)))
