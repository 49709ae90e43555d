"""Paths of a source as grants: absolute, in one spelling, and without each one that a denial touches.

A grant covers all that is below it, and a manifest takes nothing out of one. So a path with a denied path above it,
below it or on it is not granted.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct
from pydantic_core import PydanticCustomError

from policy import data
from policy.compile.mounts import RESERVED
from policy.importing.vocabulary import Draft, shown
from policy.manifest import paths
from policy.rules import never

# What comes with a path to write.
WRITE_NOTE: Final = "a path to write needs a project quota, disk_mb more than its size, and brings a /tmp of the rest"
WRITE_LINE: Final = "resources.disk_mb = MIB"
_GLOB: Final = frozenset("*?[]{}")


class SourcePath(Struct, frozen=True):
    """A path of the source: its place there, and where it lies on the host.

    ``exact`` is false for a pattern; ``path`` is then the deepest directory that holds all that the pattern can name,
    and ``/`` where that is not known.
    """

    place: str
    written: str
    path: str
    exact: bool = True


def read(draft: Draft, place: str, written: str, *, relative: str = "") -> SourcePath:
    """Read a path or a pattern of the source. ``relative`` is where relative ones begin, if not at the base."""
    if "\\" in written:
        # An escape to some tools, a character of the name to others: it may stand for any path.
        return SourcePath(place, written, "/", exact=False)
    # `x/**` is the directory and all that is below it; `**` alone is a pattern.
    told = written.removesuffix("/**") or "/"
    if told == "~" or told.startswith("~/"):
        told = f"{draft.context.home}{told[1:]}" if draft.context.home else "/*"
    elif not told.startswith("/"):
        base = relative or draft.context.base
        # A pattern of names alone may name a file anywhere below the base.
        told = f"{base}/{told}" if base else "/*"
    if not _GLOB & set(told):
        # `..` may lead out of a link: as a text it has no one meaning.
        return SourcePath(place, written, _normal(told), ".." not in told.split("/"))
    fixed = posixpath.join("/", *_until_glob(told.split("/")))
    return SourcePath(place, written, _normal(fixed), exact=False)


def _normal(path: str) -> str:
    # normpath keeps two slashes at the beginning (POSIX).
    return "/" + posixpath.normpath(path).lstrip("/")


def _until_glob(parts: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for part in parts:
        if _GLOB & set(part):
            break
        kept.append(part)
    return kept


def overlaps(one: str, other: str) -> bool:
    """Whether one of two paths is the other, or lies below it."""
    return within(one, other) or within(other, one)


def within(path: str, tree: str) -> bool:
    """Whether a path is a tree's or lies below it."""
    return tree == "/" or path == tree or path.startswith(f"{tree}/")


def granted(
    draft: Draft, key: str, allowed: Sequence[SourcePath], denied: Sequence[SourcePath], *, write: bool
) -> list[str]:
    """Return the paths that can be granted, and add a loss for each of the rest. ``key`` is of agent.toml."""
    found = []
    for one in allowed:
        why = _refusal(one, write=write)
        if why is not None:
            draft.refused(one.place, f"{shown(one.written)} is not granted: {why}")
            continue
        if not one.exact:
            needed = "" if one.written.startswith("/") else "; --base and --home say where relative ones and `~` begin"
            draft.narrower(one.place, f"{shown(one.written)} is not granted: {key} takes whole paths{needed}")
            continue
        taken = next((two for two in denied if overlaps(one.path, two.path)), None)
        if taken is not None:
            draft.narrower(
                one.place,
                f"{shown(one.written)} is not granted: {shown(taken.written)} ({taken.place}) is denied, and a grant "
                "covers all that is below it",
            )
            continue
        if one.path not in found:
            found.append(one.path)
    return found


def _refusal(one: SourcePath, *, write: bool) -> str | None:
    """The reason why no manifest has this path, or None."""
    if not one.exact:
        return None
    if one.path == "/":
        return "it is the whole machine"
    try:
        paths.absolute(one.path)
    except PydanticCustomError as e:
        return str((e.context or {}).get("message", "it is no path of a manifest"))
    error = never.refusal(one.path, data.never_grantable(), {}, write=write)
    if error is not None:
        return error.message
    place = next((two for two in RESERVED if overlaps(one.path, two)), None)
    return None if place is None else f"{shown(place)} is a place of every agent's own"
