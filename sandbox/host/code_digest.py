"""Identify the code of this Covenant: a result of one version about a machine does not hold for the next."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

# The packages that decide and act; the command line does neither.
_ROOMS = ("policy", "sandbox")


@functools.lru_cache(maxsize=1)
def digest() -> str:
    """Return a digest over every file of these packages, data too, by name, size and ctime.

    The content is not read: that takes three times as long, and only a change of the clock can hide a new ctime.
    """
    top = Path(__file__).resolve().parents[2]
    found = sorted(one for room in _ROOMS for one in _files(top / room))
    return hashlib.sha256(repr(found).encode("utf-8", "surrogateescape")).hexdigest()


def _files(top: Path) -> Iterator[tuple[str, int, int]]:
    waiting = [str(top)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    info = entry.stat(follow_symlinks=False)
                    yield entry.path, info.st_size, info.st_ctime_ns
                elif entry.name != "__pycache__":  # Python writes byte code itself, from its source
                    waiting.append(entry.path)
