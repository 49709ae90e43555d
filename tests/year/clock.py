"""A wall clock for the processes under test: a preloaded object adds an offset that this process may change.

The machine's clock is never set. ``clock.c`` names what keeps the machine's time.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import time
from pathlib import Path
from typing import Final

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
VARIABLE: Final = "COVENANT_TEST_CLOCK"
_SOURCE: Final = Path(__file__).with_name("clock.c")
_PLACE: Final = struct.Struct("q")


class Clock:
    """The offset of every process that was started with ``environment``; they see a change at once."""

    def __init__(self, directory: Path) -> None:
        """Open the clock of a directory, and make it if there is none."""
        self.path, self._object = directory / "clock", directory / "clock.so"
        if not self.path.exists():
            command = ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(self._object), str(_SOURCE)]
            subprocess.run([*command, "-ldl"], check=True, timeout=60)
            self.path.write_bytes(_PLACE.pack(0))
            for made in (self.path, self._object):
                made.chmod(0o755)
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _PLACE.size)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process has this clock."""
        return {"LD_PRELOAD": str(self._object), VARIABLE: str(self.path)}

    @property
    def offset_ms(self) -> int:
        """How far this clock is ahead of the machine's."""
        return int(_PLACE.unpack_from(self._map)[0]) // 1_000_000

    def move(self, by_ms: int) -> None:
        """Move it, back if negative."""
        _PLACE.pack_into(self._map, 0, _PLACE.unpack_from(self._map)[0] + by_ms * 1_000_000)


def inherited() -> Clock | None:
    """The clock with which this process was started."""
    path = os.environ.get(VARIABLE)
    return None if path is None else Clock(Path(path).parent)


def now_ms() -> int:
    """The time as this process sees it."""
    return time.time_ns() // 1_000_000
