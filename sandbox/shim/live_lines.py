"""Tell the client of a run each line of stderr as it comes: the beginning, which the run's answer has as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from policy import contract

# As much as the beginning that a run keeps (kernel.proc.pipes.BoundedTail), and less than a socket's buffer: a client
# that reads nothing holds up no run.
LIVE_BYTES: Final = contract.STDERR_BYTES // 2


class LiveLines:
    """Cut a stream into whole lines. ``shown`` makes text of them, ``tell`` takes it."""

    def __init__(self, shown: Callable[[bytes], str], tell: Callable[[str], None]) -> None:
        self._shown, self._tell = shown, tell
        self._pending, self._room = bytearray(), LIVE_BYTES

    def feed(self, data: bytes) -> None:
        """Take the next bytes. From the first line on that has no room nothing more is told."""
        self._pending += data[: max(0, self._room - len(self._pending))]
        lines = self._pending[: self._pending.rfind(b"\n") + 1]
        if lines:
            self._room -= len(lines)
            del self._pending[: len(lines)]
            self._tell(self._shown(bytes(lines)))
