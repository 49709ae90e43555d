"""Which files of the operator a service read at its start, so that a command can say which have changed since.

The host's name counts as one of them. The record is in the service's directory, and of no meaning once the service is
gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from sandbox.storage import atomic_file, json_cache

_NAME: Final = "files-read.json"
HOST: Final = "the host's name"

Seen = Mapping[str, list[int] | list[str] | None]


def look(files: Iterable[Path]) -> Seen:
    """Return what identifies the present content of each file; None for a file that is not there. And the host's name.

    Called before the files are read: a change in between then counts as one.
    """
    return {HOST: _identity(HOST), **{str(path): _identity(str(path)) for path in files}}


def note(directory: Path, seen: Seen) -> None:
    """Record that the service of ``directory`` has read the files. Without room on the disk there is no record."""
    json_cache.write(directory / _NAME, seen)


def changed(directory: Path, lock: str) -> tuple[str, ...]:
    """Return the files that have changed since the service read them; none without a live service, which has ``lock``.

    Raises:
        OSError: Raised when the directory is not this user's to read.
    """
    if not atomic_file.held(directory / lock):
        return ()
    seen: dict[str, Any] = json_cache.read(directory / _NAME) or {}
    return tuple(name for name, identity in seen.items() if _identity(name) != identity)


def _identity(path: str) -> list[int] | list[str] | None:
    if path == HOST:
        return [os.uname().nodename]
    try:
        info = os.stat(path)
    except OSError:
        return None
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns]
