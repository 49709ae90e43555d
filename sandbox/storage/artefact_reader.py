"""Read a directory of ``policy compile`` back as bytes. Its content is untrusted: it may have been changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from policy import errors
from policy.compile import artefacts

# A filter has at most 32 KiB, a mount plan or a rule set of the largest manifest some hundred.
MAX_BYTES = 8 * 1024 * 1024
_DIGEST_BYTES = 256
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def holds(path: Path) -> bool:
    """Whether ``path`` looks like such a directory rather than like a package.

    Raises:
        errors.ArtefactError: Raised when it looks like both, since an answer about one could be taken for the other.
    """
    if not (path / artefacts.NAMES[0]).exists():
        return False
    if not (path / "agent.toml").exists():
        return True
    if all((path / name).exists() for name in artefacts.NAMES):
        raise errors.ArtefactError(
            f"`{path}` holds a package and artefacts", hint="compile into a directory of its own", where=str(path)
        )
    return False


def read(path: Path) -> artefacts.Artefacts:
    """Read the artefacts in a directory. Besides them only the file ``digest`` may be there.

    Raises:
        errors.ArtefactError: Raised when one is missing, no plain file, or too large, or there is another file.
    """
    directory = _open(path)
    try:
        if extra := sorted(set(os.listdir(directory)) - {*artefacts.NAMES, "digest"}):
            raise errors.ArtefactError(f"`{extra[0]}` is no artefact", hint="name a directory that compile wrote")
        files = {name: _read(directory, name) for name in artefacts.NAMES}
    finally:
        os.close(directory)
    return artefacts.Artefacts(files)


def digest(path: Path) -> str | None:
    """Return the content of the file ``digest`` of such a directory. None if there is none.

    Raises:
        errors.ArtefactError: Raised when it is no plain file.
    """
    directory = _open(path)
    try:
        if "digest" not in os.listdir(directory):
            return None
        return _read(directory, "digest")[:_DIGEST_BYTES].decode("ascii", "replace").strip()
    finally:
        os.close(directory)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise errors.ArtefactError(f"`{path}` cannot be opened: {e.strerror}", where=str(path)) from e


def _read(directory: int, name: str) -> bytes:
    try:
        fd = os.open(name, _FILE, dir_fd=directory)
    except OSError as e:
        raise errors.ArtefactError(f"`{name}` cannot be read: {e.strerror}", where=name) from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise errors.ArtefactError(f"`{name}` is no plain file", where=name)
    with os.fdopen(fd, "rb") as stream:
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise errors.ArtefactError(f"`{name}` is larger than {MAX_BYTES} bytes", where=name)
    return raw
