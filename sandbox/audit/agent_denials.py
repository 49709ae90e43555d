"""Write a run's denials to the file that its agent reads (policy.explain.own_denials)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from policy import denials

if TYPE_CHECKING:
    from policy.explain.own_denials import OwnDenials
    from policy.why.ask import Sight


class AgentDenials:
    """Append each row to ``fd``, which its opener closes. ``sight`` is asked for at the first row.

    A file that cannot be written gets no more rows: the log has them all, and the run goes on.
    """

    def __init__(self, fd: int, sight: Callable[[], Sight]) -> None:
        self._fd, self._sight = fd, sight
        self._lines: OwnDenials | None = None
        self._is_broken = False

    def put(self, row: denials.Row) -> None:
        """Append one row."""
        if self._is_broken:
            return
        if self._lines is None:
            # Imported only here: most runs have no denial, and a cold start pays for each import.
            from policy.explain.own_denials import OwnDenials

            self._lines = OwnDenials(self._sight)
        raw = self._lines.line(row, at_ms=int(time.time() * 1000))
        try:
            # One write a line: a reader never sees a part of one, unless the disk is full.
            self._is_broken = os.write(self._fd, raw) != len(raw)
        except OSError:
            self._is_broken = True
