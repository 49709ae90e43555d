"""The packages below ``$COVENANT_HOME/agents``: one for each directory, with its manifest or the error that makes it
unusable.

Only ``agent.toml`` is read here, to route and to list. No decision rests on it: the code that runs a package reads all
of it again and verifies it. Symlinks are never followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from policy import decide, errors, package
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.signing import envelope, statement, strict_json

# The most packages that are known, the first by name of their directories. Other entries beside them hide none, up to a
# number of entries that no real home has.
MOST_PACKAGES: Final = 4096
MOST_ENTRIES: Final = 262_144
# The most unusable packages that are listed one by one.
MOST_REFUSED: Final = 256
# The most packages with the same id that each of their errors names.
_MOST_NAMED: Final = 4
MANIFEST_BYTES: Final = package.LISTED_MANIFEST_BYTES

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a fifo in place of a file must not block.
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
        """Its directory, in the form that errors show."""
        return visible(str(self.directory))


@dataclass(frozen=True, slots=True)
class Listed:
    """A listed package: a card, or the error that keeps it from being routed to, or both."""

    directory: str
    card: Card | None
    error: errors.CovenantError | None

    @property
    def id(self) -> str | None:
        """The agent's id; None if its manifest could not be read."""
        return None if self.card is None else self.card.id


def scan(place: Path) -> tuple[Listed, ...]:
    """Return every package below ``place``, sorted by agent id, those without one last. Plain files, and directories
    without a manifest, are skipped; a missing ``place`` has none. All packages beyond the limits are one error.

    Raises:
        errors.HomeError: it cannot be read.
    """
    try:
        fd = os.open(place, _DIRECTORY)
    except FileNotFoundError:
        return ()
    except OSError as e:
        raise errors.HomeError(f"the agents cannot be read: {e.strerror}", where=str(place)) from e
    try:
        found = list(_told_apart(_found(fd, place)))
    finally:
        os.close(fd)
    return tuple(sorted(found, key=lambda one: (one.id is None, one.id or "", one.directory)))


def _found(directory: int, place: Path) -> list[Listed]:
    """Return the packages up to the limits, and an error for the rest."""
    names, more = _names(directory)
    found, packages, refused, unlisted = list[Listed](), 0, 0, 0
    for name in names:
        one = _listed(directory, name, place)
        if one is None:
            continue
        if one.card is not None and packages >= MOST_PACKAGES:
            more = f"more than {MOST_PACKAGES} packages: those from `{visible(name)}` on are not looked at"
            break
        packages += one.card is not None
        refused += one.card is None
        if one.card is None and refused > MOST_REFUSED:
            unlisted += 1
        else:
            found.append(one)
    if unlisted:
        found.append(_instead(f"{unlisted} more that cannot be used"))
    if more is not None:
        found.append(_instead(more))
    return found


def _instead(what: str) -> Listed:
    """Return an entry for the directory itself, in place of many."""
    return Listed(".", None, errors.PackageError(f"it holds {what}", hint="take away what is no agent", where="."))


@contextlib.contextmanager
def opened(card: Card) -> Iterator[int]:
    """Open the card's directory, to read the package through the descriptor.

    Raises:
        errors.PackageError: it no longer exists, or is no directory now.
        errors.StaleAgentError: its manifest differs from the card's, for which the caller was checked.
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


def ends_at(card: Card) -> int | None:
    """Return when the envelope of a card's package says that it ends; None without a readable one. Not verified."""
    with contextlib.suppress(OSError, errors.CovenantError, strict_json.MalformedJsonError), opened(card) as directory:
        fd = os.open(package.ENVELOPE_NAME, _FILE, dir_fd=directory)
        with os.fdopen(fd, "rb") as stream:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                signed = envelope.decode(stream.read(envelope.MAX_BYTES + 1))
                return statement.parse(signed.payload).expires_at
    return None


def visible(name: str) -> str:
    """Return a file name in a form that JSON can carry: bytes that are no UTF-8 as escapes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _names(directory: int) -> tuple[list[str], str | None]:
    """Return the names of possible packages, sorted, and a message if not all entries were read."""
    names = list[str]()
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number >= MOST_ENTRIES:
                return sorted(names), f"more than {MOST_ENTRIES} entries, which are not all looked at"
            if not entry.is_file(follow_symlinks=False):
                names.append(entry.name)
    return sorted(names), None


def _listed(within: int, name: str, place: Path) -> Listed | None:
    """Return the listing of one entry; None if it is no package."""
    shown = visible(name)
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    except OSError as e:
        # O_NOFOLLOW with O_DIRECTORY gives ENOTDIR for a link, and also for a socket or a fifo, which are skipped.
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
    """Whether an unopenable entry may be meant as a package: a link, or a directory without permission."""
    with contextlib.suppress(OSError):
        mode = os.stat(name, dir_fd=within, follow_symlinks=False).st_mode
        return stat.S_ISLNK(mode) or stat.S_ISDIR(mode)
    return False


def _manifest(package: int) -> bytes | None:
    """Return the manifest's bytes; None if there is none.

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


def _told_apart(found: Sequence[Listed]) -> Iterator[Listed]:
    """Give each of the packages that share an id an error: preferring the first would let an added package take
    over."""
    alike: dict[str, list[str]] = {}
    for one in found:
        if one.id is not None:
            alike.setdefault(one.id, []).append(one.directory)
    for one in found:
        same = alike[one.id] if one.id is not None else []
        if len(same) < 2:
            yield one
            continue
        others = [name for name in same[: _MOST_NAMED + 1] if name != one.directory][:_MOST_NAMED]
        named = " and ".join(f"`{name}`" for name in others)
        rest = len(same) - 1 - len(others)
        error = errors.AgentIdTakenError(
            f"agent `{one.id}` stands in {named}{f' and {rest} more' if rest else ''} as well",
            hint="take one of them away",
            where=one.directory,
        )
        yield replace(one, error=error)
