"""The packages below ``$COVENANT_HOME/agents``: one a directory, each with what its manifest says or why it cannot be
used.

Only ``agent.toml`` is read here, to route by and to list. Nothing that decides rests on it: whoever runs a package
reads all of it again and verifies it. No name is followed to where a link points.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from policy import decide, errors
from policy.manifest import parse
from policy.manifest.agent import Manifest

# A directory that holds more is no place of agents, and a manifest is no longer than that (sandbox.catalogue).
MOST_PACKAGES: Final = 4096
MANIFEST_BYTES: Final = 256 * 1024

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a fifo in a file's place must not hang us.
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Card:
    """An agent that can be routed to. ``digest`` is the SHA-256 of the manifest's bytes."""

    directory: Path
    manifest: Manifest
    digest: str

    @property
    def id(self) -> str:
        """The agent's id."""
        return self.manifest.agent.id

    @property
    def where(self) -> str:
        """Its directory, as errors name it."""
        return visible(str(self.directory))


@dataclass(frozen=True, slots=True)
class Listed:
    """One package as it is listed: a card, or the error that keeps it from being routed to, or both."""

    directory: str
    card: Card | None
    error: errors.CovenantError | None

    @property
    def id(self) -> str | None:
        """The agent's id, None where no manifest could be read."""
        return None if self.card is None else self.card.id


def scan(place: Path) -> tuple[Listed, ...]:
    """Every package below ``place``, sorted by agent id, those without one last. Plain files, and directories without
    a manifest, are none; where ``place`` is not there, there are none.

    Raises:
        errors.HomeError: it cannot be read, or holds more than ``MOST_PACKAGES`` directories.
    """
    try:
        fd = os.open(place, _DIRECTORY)
    except FileNotFoundError:
        return ()
    except OSError as e:
        raise errors.HomeError(f"the agents cannot be read: {e.strerror}", where=str(place)) from e
    try:
        found = [one for name in _names(fd, place) if (one := _listed(fd, name, place)) is not None]
    finally:
        os.close(fd)
    return tuple(sorted(_told_apart(found), key=lambda one: (one.id is None, one.id or "", one.directory)))


@contextlib.contextmanager
def opened(card: Card) -> Iterator[int]:
    """The card's directory, open for whoever reads the package by it.

    Raises:
        errors.PackageError: it is not there any more, or became something else.
        errors.StaleAgentError: its manifest is another than the one that the card was made of: what was checked of the
            caller was checked against that.
    """
    try:
        fd = os.open(card.directory, _DIRECTORY)
    except OSError as e:
        raise errors.PackageError(f"package of agent `{card.id}`: {e.strerror}", where=card.where) from e
    try:
        raw = _manifest(fd)
        if raw is None or hashlib.sha256(raw).hexdigest() != card.digest:
            raise errors.StaleAgentError(
                f"the manifest of agent `{card.id}` was changed",
                hint="covenant agents reload, then ask again",
                where=card.where,
            )
        yield fd
    finally:
        os.close(fd)


def visible(name: str) -> str:
    """A name of the file system as any JSON takes it: what is no UTF-8 of it, as escapes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _names(directory: int, place: Path) -> list[str]:
    names = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                continue
            names.append(entry.name)
            if len(names) > MOST_PACKAGES:
                raise errors.HomeError(f"`{place}` holds more than {MOST_PACKAGES} directories", where=str(place))
    return sorted(names)


def _listed(within: int, name: str, place: Path) -> Listed | None:
    """One entry; None where it is no package at all."""
    shown = visible(name)
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    except OSError as e:
        # O_NOFOLLOW with O_DIRECTORY says ENOTDIR of a link, and of a socket or a fifo, which are not ours to name.
        if e.errno in (errno.ENOENT, errno.ENXIO) or not _matters(within, name):
            return None
        reason = "it is a symlink" if e.errno in (errno.ENOTDIR, errno.ELOOP) else e.strerror
        return Listed(shown, None, errors.PackageError(f"it cannot be read: {reason}", where=shown))
    try:
        raw = _manifest(fd)
        if raw is None:
            return None
        manifest = parse.parse(raw, file=decide.MANIFEST)
    except errors.CovenantError as e:
        return Listed(shown, None, e)
    except OSError as e:
        return Listed(shown, None, errors.PackageError(f"it cannot be read: {e.strerror}", where=shown))
    finally:
        os.close(fd)
    return Listed(shown, Card(place / name, manifest, hashlib.sha256(raw).hexdigest()), None)


def _matters(within: int, name: str) -> bool:
    """Whether an entry that could not be opened may be meant as a package: a link, or a directory closed to us."""
    with contextlib.suppress(OSError):
        mode = os.stat(name, dir_fd=within, follow_symlinks=False).st_mode
        return stat.S_ISLNK(mode) or stat.S_ISDIR(mode)
    return False


def _manifest(package: int) -> bytes | None:
    """The manifest's bytes; None where there is none.

    Raises:
        errors.PackageError: it is no plain file, or too large.
        OSError: it cannot be read.
    """
    try:
        fd = os.open(decide.MANIFEST, _FILE, dir_fd=package)
    except FileNotFoundError:
        return None
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise errors.PackageError(f"`{decide.MANIFEST}` is a symlink", where=decide.MANIFEST) from e
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise errors.PackageError(f"`{decide.MANIFEST}` is no plain file", where=decide.MANIFEST)
        with os.fdopen(fd, "rb", closefd=False) as stream:
            raw = stream.read(MANIFEST_BYTES + 1)
    finally:
        os.close(fd)
    if len(raw) > MANIFEST_BYTES:
        raise errors.PackageError(f"`{decide.MANIFEST}` is over {MANIFEST_BYTES} bytes", where=decide.MANIFEST)
    return raw


def _told_apart(found: list[Listed]) -> Iterator[Listed]:
    """With an error in each of those that share an id: whichever came first would be whoever put it there."""
    count = Counter(one.id for one in found if one.id is not None)
    for one in found:
        if one.id is None or count[one.id] == 1:
            yield one
            continue
        others = " and ".join(f"`{other.directory}`" for other in found if other.id == one.id and other is not one)
        error = errors.AgentIdTakenError(
            f"agent `{one.id}` stands in {others} as well", hint="take one of them away", where=one.directory
        )
        yield replace(one, error=error)
