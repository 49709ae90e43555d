"""A token bucket, for both sides of a gate. Imports nothing: it stands in processes that hold little."""

from __future__ import annotations


class Tokens:
    """``burst`` at once, refilled by ``per_second``. Times are the caller's clock, in seconds."""

    def __init__(self, per_second: float, burst: float, now: float) -> None:
        self._per_second, self._burst = per_second, burst
        self._left, self._at = burst, now

    def take(self, now: float) -> bool:
        """Take one if there is one."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
