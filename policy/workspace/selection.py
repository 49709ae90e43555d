"""Select changes of a workspace by path, name a selection by its digest, and group changes into questions."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from policy.workspace import git
from policy.workspace.changes import Change, ancestors


class ApplyQuestion(Struct, frozen=True):
    """Changes that are applied together or not at all: one path, or a removed or replaced path with all in it."""

    changes: tuple[Change, ...]

    @property
    def path(self) -> str:
        """The path that the question is about."""
        return self.changes[0].path


def digest(changes: Sequence[Change]) -> str:
    """Return the SHA-256 (hex) of changes, without the content that the host had before."""
    rows = [(one.path, one.action, one.kind, one.mode, one.sha256, one.target) for one in changes]
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


def asked(found: Sequence[Change], paths: Collection[str], *, exact: bool = False) -> list[Change]:
    """Return the changes at and below ``paths``, all of them without one. With ``exact`` those below are left out."""
    if exact:
        wanted = frozenset(paths)
        return [one for one in found if one.path in wanted]
    return [one for one in found if not paths or any(_within(one.path, path) for path in paths)]


def chosen(found: Sequence[Change], paths: Collection[str] = (), *, exact: bool = False) -> list[Change]:
    """Return the changes that an apply of ``paths`` does: those asked for that nothing speaks against.

    The new directories above them are added, so that a file of a new directory can be applied alone, and to references
    and an index of git the new objects of their repository.
    """
    taken = [one for one in asked(found, paths, exact=exact) if one.is_applicable()]
    objects = git.needed([one.path for one in taken], [one.path for one in found if _is_new(one)])
    listed = {one.path for one in taken}
    taken += [one for one in found if one.path in objects - listed and one.is_applicable()]
    above = {path for one in taken for path in ancestors(one.path)}
    needed = {one.path for one in found if one.path in above and one.kind == "dir" and one.action == "add"}
    have = {(one.path, one.action) for one in taken}
    # With a new directory goes the file or link that it replaces.
    more = [one for one in found if one.path in needed and (one.path, one.action) not in have]
    order = {(one.path, one.action): number for number, one in enumerate(found)}
    return sorted([*taken, *more], key=lambda one: order[one.path, one.action])


def _is_new(change: Change) -> bool:
    return change.action == "add" and change.kind == "file"


def questions(found: Sequence[Change]) -> list[ApplyQuestion]:
    """Group the changes that can be applied, in the order of their paths.

    A removed directory, or a path of another kind, is one question with all that is in it. A new directory is a
    question only when nothing is in it: it is made with the first of its files.
    """
    applicable = [one for one in found if one.is_applicable()]
    twice = _twice(applicable)
    whole = {one.path for one in applicable if one.action == "delete" and one.kind == "dir"} | twice
    filled = {path for one in applicable for path in ancestors(one.path)}
    groups: dict[str, list[Change]] = {}
    for one in applicable:
        tops = [path for path in (one.path, *ancestors(one.path)) if path in whole]
        if tops:
            groups.setdefault(tops[-1], []).append(one)
        elif not (one.action == "add" and one.kind == "dir" and one.path in filled):
            groups[one.path] = [one]
    return [ApplyQuestion(tuple(group)) for group in groups.values()]


def _twice(changes: Sequence[Change]) -> set[str]:
    """Return the paths that are removed and made again as another kind."""
    removed = {one.path for one in changes if one.action == "delete"}
    return {one.path for one in changes if one.action != "delete" and one.path in removed}


def _within(path: str, above: str) -> bool:
    above = above.rstrip("/")
    return above == "." or path == above or path.startswith(above + "/")
