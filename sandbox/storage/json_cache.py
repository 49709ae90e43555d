"""Small private JSON records below COVENANT_STATE: what was found out once and is cheap to check again.

A record that is missing, malformed or could have been written by another is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any] | None:
    """The record, if it is ours alone (own uid, 0600, no symlink)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as stream:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                return None
            document = json.load(stream)
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Put the record in place whole; where nothing can be written it is found out anew next time."""
    # One name, so that what a killed writer leaves is overwritten and does not pile up. Of two that write at once one
    # may lose its record, or put the other's in place while it is written: a part of a document is as good as none.
    temporary = path.parent / f".{path.name}.new"
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "w") as stream:
                json.dump(document, stream)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink()
