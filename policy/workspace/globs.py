"""Patterns of a workspace's files: ``*`` and ``?`` within a name, ``**`` for any number of directories.

A pattern without a slash is matched with the last name of a path, at any depth. One with a slash is matched with the
whole path from the workspace's directory. A trailing ``/**`` stands for a directory and everything below it: what
replaces the directory, as a link, would replace what is below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

ANY_DIRECTORIES: Final = "**"


@functools.lru_cache(maxsize=64)
def matching(patterns: Sequence[str]) -> Callable[[str], Any]:
    """Return a function that is true for each relative path that a pattern names. ``patterns`` is a tuple.

    Names that differ from a pattern only in case are matched too: on some file systems they are the same file. The time
    is linear in the path (RE2): its name is the agent's.
    """
    import re2

    return re2.compile(f"(?is)(?:{'|'.join(map(_expression, patterns))})").fullmatch if patterns else lambda path: None


class LastNames(NamedTuple):
    """The last names of the paths that patterns name, in lower case: whole, how they begin, and how they end."""

    names: frozenset[str]
    begins: tuple[str, ...]
    ends: tuple[str, ...]

    def may_be(self, name: str) -> bool:
        """Whether a path with this last name, in lower case, may be named by one of the patterns."""
        return name in self.names or name.startswith(self.begins) or name.endswith(self.ends)


def last_names(patterns: Sequence[str]) -> LastNames | None:
    """Return what is known of the last names alone, which rules most paths out. None where any name may be one."""
    names, begins, ends = set[str](), set[str](), set[str]()
    for pattern in patterns:
        last = pattern.rpartition("/")[2].lower()
        rest = last.strip("*")
        if "*" in rest or "?" in rest or not rest.isascii() or not rest or (last[0] == last[-1] == "*"):
            return None
        (names if rest == last else begins if last[-1] == "*" else ends).add(rest)
    return LastNames(frozenset(names), tuple(sorted(begins)), tuple(sorted(ends)))


@functools.lru_cache(maxsize=64)
def with_directories(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns, and those of the directories above what they name: a link there would lead to other files.

    ``patterns`` is a tuple.
    """
    parts = [pattern.split("/") for pattern in patterns]
    above = {"/".join(one[:depth]) for one in parts for depth in range(1, len(one))} - {ANY_DIRECTORIES}
    return (*patterns, *sorted(above - set(patterns)))


def _expression(pattern: str) -> str:
    parts = pattern.split("/")
    if len(parts) == 1:
        parts = [ANY_DIRECTORIES, *parts]
    out = ""
    below = len(parts) > 1 and parts[-1] == ANY_DIRECTORIES
    names = parts[:-1] if below else parts
    for index, part in enumerate(names):
        last = index == len(names) - 1
        if part == ANY_DIRECTORIES:
            out += ".+" if last else "(?:.+/)?"
        else:
            out += "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else _escaped(c) for c in part)
            out += "" if last else "/"
    return out + "(?:/.+)?" * below


def _escaped(character: str) -> str:
    return character if character.isalnum() or character in "_/" or not character.isascii() else f"\\{character}"
