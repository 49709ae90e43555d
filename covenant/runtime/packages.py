"""The packages below ``$COVENANT_HOME/agents``: one for each directory, with its manifest or the error that makes it
unusable.

Only ``agent.toml`` is read here, to route and to list. No decision rests on it: the code that runs a package reads all
of it again and verifies it. Symlinks are never followed.

A package at or below which another file system is mounted is read by a process, since that file system may not answer
(ADR 0160). ``$COVENANT_HOME`` and ``agents`` themselves have to answer.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from covenant.providers import package_files
from policy import decide, errors
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.manifest.tools import document
from policy.package import ENVELOPE_NAME, MANIFEST_BYTES
from policy.signing import envelope, statement, strict_json
from sandbox.storage import other_mounts, plain_file

# The most packages that are known, the first by name of their directories. Other entries beside them hide none, up to a
# number of entries that no real home has.
MOST_PACKAGES: Final = 4096
MOST_ENTRIES: Final = 262_144
# The most unusable packages that are listed one by one.
MOST_REFUSED: Final = 256
# The most packages with the same id that each of their errors names.
_MOST_NAMED: Final = 4

# What is read of a package here, with the most bytes of each.
_WANTED: Final = {
    decide.MANIFEST: MANIFEST_BYTES,
    document.FILE: document.MAX_BYTES,
    ENVELOPE_NAME: envelope.MAX_BYTES,
}
# For one package on another file system to answer, and so many are asked at a time.
ANSWER_SECONDS: Final = 10.0
_ASKED_AT_ONCE: Final = 16

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# By the name of its directory: the manifest of a package that a process read, None without one, or the error.
Mounted = Mapping[str, bytes | errors.CovenantError | None]


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


@dataclass(frozen=True, slots=True)
class OpenPackage:
    """A package whose manifest is its card's. ``files`` are those that a process has read, None without one."""

    directory: int
    files: Mapping[str, bytes] | None = None

    def read(self, name: str) -> bytes | None:
        """Return one of the files that are read of a package here; None if the package has none of this name.

        Raises:
            errors.PackageError: it cannot be read.
        """
        if self.files is not None:
            return self.files.get(name)
        return plain_file.read(self.directory, name, most=_WANTED[name])


async def mounted(place: Path) -> dict[str, bytes | errors.CovenantError | None]:
    """Read the manifests of the packages that are on other file systems. Each has ``ANSWER_SECONDS`` to answer.

    Raises:
        errors.HomeError: ``place`` cannot be looked at.
    """
    found = dict[str, bytes | errors.CovenantError | None]()
    limit = anyio.CapacityLimiter(_ASKED_AT_ONCE)

    async def read(path: Path) -> None:
        wanted = {decide.MANIFEST: MANIFEST_BYTES}
        async with limit:
            try:
                async with package_files.opened(path, wanted, seconds=ANSWER_SECONDS) as (_, files):
                    found[path.name] = files.get(decide.MANIFEST)
            except errors.CovenantError as e:
                # As of the other packages: every caller may see the error, and the path of the home is not for all.
                e.where = visible(path.name)
                found[path.name] = e

    async with anyio.create_task_group() as group:
        for path in _away(place):
            group.start_soon(read, path)
    return found


def _away(place: Path) -> frozenset[Path]:
    """Return the packages that are on other file systems than ``place``.

    Raises:
        errors.HomeError: ``place`` cannot be looked at.
    """
    try:
        return frozenset(place / name for name in other_mounts.names(place))
    except OSError as e:
        raise errors.HomeError(f"the agents cannot be read: {e.strerror}", where=str(place)) from e


def scan(place: Path, mounted: Mounted) -> tuple[Listed, ...]:
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
        found = list(_told_apart(_found(fd, place, mounted)))
    finally:
        os.close(fd)
    return tuple(sorted(found, key=lambda one: (one.id is None, one.id or "", one.directory)))


def directories(place: Path) -> list[Path]:
    """Return the directories in ``place`` that are on its own file system and whose names are text.

    Raises:
        OSError: it cannot be read.
    """
    away = other_mounts.names(place)
    with os.scandir(place) as entries:
        names = [one.name for one in entries if one.name not in away and one.is_dir(follow_symlinks=False)]
    return [place / name for name in sorted(names) if visible(name) == name]


def _found(directory: int, place: Path, mounted: Mounted) -> list[Listed]:
    """Return the packages up to the limits, and an error for the rest."""
    names, more = _names(directory, mounted)
    found, packages, refused, unlisted = list[Listed](), 0, 0, 0
    for name in names:
        one = _listed(directory, name, place, mounted)
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


@contextlib.asynccontextmanager
async def reached(card: Card) -> AsyncIterator[OpenPackage]:
    """Open the card's directory, also on a file system that may not answer. For the event loop.

    Raises:
        errors.HangingError: its file system does not answer.
        errors.CovenantError: as ``opened``.
    """
    if card.directory not in _away(card.directory.parent):
        with opened(card) as directory:
            yield OpenPackage(directory)
        return
    async with package_files.opened(card.directory, _WANTED, seconds=ANSWER_SECONDS) as (directory, files):
        _check(card, files.get(decide.MANIFEST))
        yield OpenPackage(directory, files)


@contextlib.contextmanager
def opened(card: Card) -> Iterator[int]:
    """Open the card's directory, to read the package through the descriptor. This waits for its file system.

    Raises:
        errors.PackageError: it no longer exists, or is no directory now.
        errors.StaleAgentError: its manifest differs from the card's, for which the caller was checked.
    """
    try:
        fd = os.open(card.directory, _DIRECTORY)
    except OSError as e:
        raise errors.PackageError(f"package of agent `{card.id}`: {e.strerror}", where=card.where) from e
    try:
        _check(card, plain_file.read(fd, decide.MANIFEST, most=MANIFEST_BYTES))
        yield fd
    finally:
        os.close(fd)


def _check(card: Card, raw: bytes | None) -> None:
    """Check that a package still has the card's manifest.

    Raises:
        errors.StaleAgentError: it has another, or none.
    """
    if raw is None or hashlib.sha256(raw).hexdigest() != card.digest:
        raise errors.StaleAgentError(
            f"the manifest of agent `{card.id}` was changed",
            hint="covenant agents reload, then ask again",
            where=card.where,
        )


async def ends(cards: Sequence[Card]) -> dict[str, int | None]:
    """Return when the envelope of each card's package says that it ends, by the agent's id; None without a readable
    one. Nothing is verified.
    """
    found = dict[str, int | None]()
    limit = anyio.CapacityLimiter(_ASKED_AT_ONCE)

    async def ask(card: Card) -> None:
        async with limit:
            found[card.id] = None
            with contextlib.suppress(errors.CovenantError):
                async with reached(card) as one:
                    found[card.id] = _ends_at(one)

    def read(card: Card) -> int | None:
        with contextlib.suppress(errors.CovenantError), opened(card) as directory:
            return _ends_at(OpenPackage(directory))
        return None

    away = {path for place in {card.directory.parent for card in cards} for path in _away(place)}
    near = [card for card in cards if card.directory not in away]
    found |= await anyio.to_thread.run_sync(lambda: {card.id: read(card) for card in near})
    async with anyio.create_task_group() as group:
        for card in cards:
            if card.directory in away:
                group.start_soon(ask, card)
    return found


def _ends_at(one: OpenPackage) -> int | None:
    with contextlib.suppress(strict_json.MalformedJsonError):
        raw = one.read(ENVELOPE_NAME)
        return None if raw is None else statement.parse(envelope.decode(raw).payload).expires_at
    return None


def visible(name: str) -> str:
    """Return a file name in a form that JSON can carry: bytes that are no UTF-8 as escapes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _names(directory: int, mounted: Mounted) -> tuple[list[str], str | None]:
    """Return the names of possible packages, sorted, and a message if not all entries were read."""
    names = list[str]()
    with os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number >= MOST_ENTRIES:
                return sorted(names), f"more than {MOST_ENTRIES} entries, which are not all looked at"
            if entry.name in mounted or not entry.is_file(follow_symlinks=False):
                names.append(entry.name)
    return sorted(names), None


def _listed(within: int, name: str, place: Path, mounted: Mounted) -> Listed | None:
    """Return the listing of one entry; None if it is no package."""
    shown = visible(name)
    try:
        raw = mounted[name] if name in mounted else _manifest(within, name, shown)
        if isinstance(raw, errors.CovenantError):
            raise raw
        if raw is None:
            return None
        manifest = parse.parse(raw, file=decide.MANIFEST)
    except errors.CovenantError as e:
        return Listed(shown, None, e)
    return Listed(shown, Card(place / name, manifest, hashlib.sha256(raw).hexdigest()), None)


def _manifest(within: int, name: str, shown: str) -> bytes | None:
    """Return the bytes of a package's manifest; None if the entry is no package.

    Raises:
        errors.PackageError: it cannot be read.
    """
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    except OSError as e:
        # O_NOFOLLOW with O_DIRECTORY gives ENOTDIR for a link, and also for a socket or a fifo, which are skipped.
        if e.errno in (errno.ENOENT, errno.ENXIO) or not _matters(within, name):
            return None
        reason = "it is a symlink" if e.errno in (errno.ENOTDIR, errno.ELOOP) else e.strerror
        raise errors.PackageError(f"it cannot be read: {reason}", where=shown) from e
    try:
        return plain_file.read(fd, decide.MANIFEST, most=MANIFEST_BYTES)
    finally:
        os.close(fd)


def _matters(within: int, name: str) -> bool:
    """Whether an unopenable entry may be meant as a package: a link, or a directory without permission."""
    with contextlib.suppress(OSError):
        mode = os.stat(name, dir_fd=within, follow_symlinks=False).st_mode
        return stat.S_ISLNK(mode) or stat.S_ISDIR(mode)
    return False


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
