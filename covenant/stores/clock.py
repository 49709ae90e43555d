"""The daemon's clock: Unix milliseconds that never go back, not even over a restart.

A grant, token or envelope that has expired must not hold again because the machine's clock was set back. So the clock
returns the greatest time that this home has seen until the machine's clock passes it. The greatest time is kept in
``$COVENANT_HOME/clock.json``. If the machine's clock was ahead once, ``covenant state clock`` takes it back (ADR 0098).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from policy import errors
from sandbox.storage import atomic_file

_LOG: Final = logging.getLogger(__name__)

FILE: Final = "clock.json"
# How far the machine's clock may be behind before the log, `doctor` and the metrics say so. NTP corrects by less.
BEHIND_MS: Final = 60_000
_KEEP_SECONDS: Final = 10.0
_MOST_BYTES: Final = 4096
_MOST_MS: Final = 2**53


class SteadyClock:
    """The clock of one home. Call it for the time; ``run`` keeps the greatest time in the file."""

    def __init__(self, home: Path, wall: Callable[[], int], greatest_ms: int = 0) -> None:
        self._home = home
        self._wall = wall
        self._greatest_ms = self._kept_ms = greatest_ms
        self._behind = False

    @classmethod
    def open(cls, home: Path, wall: Callable[[], int]) -> SteadyClock:
        """Read the greatest time of a home.

        Raises:
            errors.StoreError: the file cannot be read, or is damaged.
        """
        return cls(home, wall, kept_ms(home))

    def __call__(self) -> int:
        """Return the time: the machine's, or the greatest that was seen."""
        self._greatest_ms = max(self._greatest_ms, self._wall())
        return self._greatest_ms

    @property
    def behind_ms(self) -> int:
        """Return how far the machine's clock is behind the greatest time, that of the file too."""
        return max(0, self._greatest_ms - self._wall(), self._kept_ms - self._wall())

    def set(self) -> tuple[int, int]:
        """Take the greatest time back to the machine's clock; ``write`` makes it durable. Returns both times."""
        before, now = max(self(), self._kept_ms), self._wall()
        self._greatest_ms = now
        return before, now

    async def write(self) -> None:
        """Write the greatest time as it is now, even if the file has a later one.

        Raises:
            errors.StoreError: the file cannot be written.
        """
        await anyio.to_thread.run_sync(self._write, self._greatest_ms)

    async def run(self) -> None:
        """Keep the time in the file until cancelled, and log that the machine's clock is behind."""
        while True:
            await self.keep()
            await anyio.sleep(_KEEP_SECONDS)

    async def keep(self) -> None:
        """Write the time into the file, if it has moved; an error is logged."""
        self()
        behind = self.behind_ms >= BEHIND_MS
        if behind and not self._behind:
            _LOG.warning(
                "this machine's clock is %d s behind the latest time of this home, which is used instead; if the "
                "machine's clock is right now: covenant state clock",
                self.behind_ms // 1000,
            )
        self._behind = behind
        if self._greatest_ms <= self._kept_ms:
            return
        try:
            await anyio.to_thread.run_sync(self._write, self._greatest_ms)
        except errors.StoreError as e:
            _LOG.error("%s", e)

    def _write(self, moment_ms: int) -> None:
        directory = atomic_file.open_directory(self._home, error=errors.StoreError)
        try:
            atomic_file.replace(directory, FILE, json.dumps({"greatest_time_ms": moment_ms}).encode() + b"\n")
        except OSError as e:
            raise errors.StoreError(f"`{FILE}` cannot be written: {e.strerror}", where=str(self._home)) from e
        finally:
            os.close(directory)
        self._kept_ms = moment_ms


def kept_ms(home: Path) -> int:
    """Return the greatest time in a home's file; 0 if there is none.

    Raises:
        errors.StoreError: the file cannot be read, or is damaged.
    """
    directory = atomic_file.open_directory(home, error=errors.StoreError)
    try:
        raw = atomic_file.read(directory, FILE, max_bytes=_MOST_BYTES, where=str(home), error=errors.StoreError)
    finally:
        os.close(directory)
    if raw is None:
        return 0
    try:
        found = json.loads(raw)["greatest_time_ms"]
    except (ValueError, KeyError, TypeError):
        found = None
    if type(found) is not int or not 0 <= found <= _MOST_MS:
        # INVARIANT: a damaged ratchet is an error, never an empty one.
        raise errors.StoreError(
            f"`{FILE}` is damaged",
            hint="restore it from a backup, or delete it if nothing has expired",
            where=str(home),
        )
    return found
