"""Marks in a run's directory: revoked, stopped, logged."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from policy import errors

# Of who asks for something, and of the reason that they give, as the log has them.
WORDS = 200
_REVOKED = "revoked"
STOPPED = "stopped"


def mark_revoked(path: Path, reason: str, *, like: Path | None = None) -> None:
    """Write into a run's directory that it is being ended, behind the gate; the first reason stays.

    ``like`` is the directory of another that was marked for the same reason: a second name of its mark is had at once,
    where a file system that has just removed many files may take half a millisecond to make another.
    """
    write_mark(path, _REVOKED, reason, like)


def mark_stopped(path: Path, by: str, reason: str, *, like: Path | None = None) -> None:
    """Mark a run that an operator ends with its tree, as ``mark_revoked`` does: by whom, and why."""
    write_mark(path, STOPPED, json.dumps({"by": by, "reason": reason}), like)


def stopped_of(path: Path) -> tuple[str, str] | None:
    """Read by whom and why a run ends with its tree. None: it has no mark."""
    said = _said(path)
    return None if said is None else (said["by"], said["reason"])


def _said(path: Path) -> dict[str, Any] | None:
    try:
        with open(path / STOPPED, encoding="utf-8") as file:
            said: dict[str, Any] = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {"by": "", "reason": ""}  # its writer was killed over it
    return said


def write_mark(path: Path, name: str, text: str, like: Path | None) -> None:
    with contextlib.suppress(FileExistsError):
        if like is not None:
            try:
                os.link(like / name, path / name, follow_symlinks=False)
            except FileExistsError:
                return
            except OSError:  # the other mark is gone, or has as many names as it may have
                pass
            else:
                return
        fd = os.open(path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        # In any locale of the writer: another keeper reads it, and text that cannot be encoded must not stop the end.
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def revoked_of(path: Path) -> str | None:
    """Return why a run is being ended. None: it has no mark."""
    try:
        fd = os.open(f"{path}/{_REVOKED}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(fd, encoding="utf-8", errors="replace") as file:
        return file.read() or "revoked"


def verdict(path: Path) -> errors.RunRevokedError | errors.KilledError | None:
    """The error of a run that was marked, None for another."""
    if (reason := revoked_of(path)) is not None:
        return errors.RunRevokedError(reason)
    if (said := _said(path)) is None:
        return None
    error = errors.SupersededError if said.get("superseded") else errors.KilledError
    return error(in_words("ended", said["by"], said["reason"]))


def in_words(what: str, by: str, reason: str) -> str:
    """Format who acted on a run and why, for the log: bounded, with the reason as the requester wrote it."""
    given = f": {reason[:WORDS]}" if reason else ""
    return f"{what} by {by[:WORDS] or 'root'}{given}"


def told(path: Path) -> None:
    """Note at a run's mark that a durable row names the run: the mark can be read only, from now on. A change of mode
    needs no room on the disk, and holds for all that were marked with it.

    Raises:
        OSError: it is not marked, or it is gone.
    """
    if not is_told(path):
        os.chmod(path / _REVOKED, 0o400)


def is_told(path: Path) -> bool:
    """Whether ``told`` was called for the run, or for one that was marked with it."""
    try:
        return not os.lstat(path / _REVOKED).st_mode & stat.S_IWUSR
    except (FileNotFoundError, NotADirectoryError):
        return False
