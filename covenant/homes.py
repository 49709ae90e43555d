"""COVENANT_HOME: find it, and ensure that only its owner can access it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from policy import errors

_ANOTHER = "set COVENANT_HOME or COVENANT_STATE, whichever names it, to a directory of yours"


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


def _as_user(uid: int) -> str:
    import pwd

    try:
        return f"sudo -u {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"sudo -u '#{uid}'"


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
        raise errors.HomeError(f"`{path}` cannot be used: {e.strerror}", hint=_ANOTHER, where=str(path)) from e
    if not stat.S_ISDIR(info.st_mode):
        raise errors.HomeError(f"`{path}` is not a directory", hint=_ANOTHER, where=str(path))
    if info.st_uid != os.geteuid():
        raise errors.HomeError(
            f"`{path}` belongs to uid {info.st_uid}",
            hint=f"run it as that user: {_as_user(info.st_uid)} covenant ...",
            where=str(path),
        )
    if info.st_mode & 0o077:
        raise errors.HomeError(
            f"`{path}` has mode {stat.S_IMODE(info.st_mode):04o}",
            hint=close_hint(path, "0700"),
            where=str(path),
        )
    return path


def close_hint(path: Path | str, mode: str) -> str:
    """Return the hint about one path that is open to others: its own command, and the one for a whole home."""
    return f"chmod {mode} {path}, or for a whole home: covenant state modes --apply"


# The packages have modes of their own, and the supervisor's state is its own to check.
_OTHERS = frozenset({"agents", "supervisor", "runtime"})


def open_to_others(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield what of a home users other than its owner can access: each path with its mode and the mode that it needs.

    Symlinks are not followed, and files of other users are left out: ``chmod`` is refused for them.

    Raises:
        errors.HomeError: the home cannot be read.
    """

    def fail(e: OSError) -> None:
        raise errors.HomeError(f"`{path}` cannot be read: {e.strerror}", where=str(path)) from e

    yield from _open_entry(path, 0o700)
    for at, directories, files in os.walk(path, onerror=fail):
        if Path(at) == path:
            directories[:] = sorted(set(directories) - _OTHERS)
        for name in directories:
            yield from _open_entry(Path(at) / name, 0o700)
        for name in sorted(files):
            yield from _open_entry(Path(at) / name, 0o600)


def _open_entry(path: Path, needs: int) -> Iterator[tuple[Path, int, int]]:
    info = os.lstat(path)
    kept = stat.S_ISDIR(info.st_mode) if needs == 0o700 else stat.S_ISREG(info.st_mode)
    if kept and info.st_uid == os.geteuid() and info.st_mode & 0o077:
        yield path, stat.S_IMODE(info.st_mode), needs


def close_to_others(path: Path, needs: int) -> None:
    """Give a path of our own this mode.

    Raises:
        errors.HomeError: it is a link now, another user's, or has another name elsewhere, which would be changed too.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise errors.HomeError(f"`{path}` cannot be opened: {e.strerror}", where=str(path)) from e
    try:
        info = os.fstat(fd)
        directory = stat.S_ISDIR(info.st_mode)
        if info.st_uid != os.geteuid() or not (directory or (stat.S_ISREG(info.st_mode) and info.st_nlink == 1)):
            raise errors.HomeError(
                f"`{path}` is no file or directory of its owner alone",
                hint="look at it: a link, or another name of a file",
                where=str(path),
            )
        os.chmod(f"/proc/self/fd/{fd}", needs)
    finally:
        os.close(fd)
