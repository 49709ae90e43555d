"""COVENANT_HOME: find it, and ensure that only its owner can access it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from policy import errors


def home(environment: Mapping[str, str] | None = None) -> Path:
    """Return COVENANT_HOME, created with mode 0700 if missing.

    Raises:
        errors.HomeError: run through sudo without COVENANT_HOME, or the directory is not ours alone.
    """
    given = os.environ if environment is None else environment
    named = given.get("COVENANT_HOME")
    if not named and given.get("SUDO_UID"):
        raise errors.HomeError(
            "COVENANT_HOME is not set under sudo",
            hint="give it: sudo COVENANT_HOME=/path/to/home covenant ...",
        )
    return private_directory(Path(named) if named else Path.home() / ".covenant")


def private_directory(path: Path) -> Path:
    """Return the directory at ``path``, created with mode 0700 if missing.

    Raises:
        errors.HomeError: it is not ours alone, or cannot be made.
    """
    if not path.is_absolute():
        path = Path.cwd() / path
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(path)
    except OSError as e:
        raise errors.HomeError(f"`{path}` cannot be used: {e.strerror}", where=str(path)) from e
    if not stat.S_ISDIR(info.st_mode):
        raise errors.HomeError(f"`{path}` is not a directory", where=str(path))
    if info.st_uid != os.geteuid():
        raise errors.HomeError(f"`{path}` belongs to uid {info.st_uid}", where=str(path))
    if info.st_mode & 0o077:
        raise errors.HomeError(
            f"`{path}` has mode {stat.S_IMODE(info.st_mode):04o}",
            hint=f"chmod 0700 {path}",
            where=str(path),
        )
    return path
