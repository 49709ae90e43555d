"""Globs of `.covenantignore`, matched by RE2 in time linear in the text's length.

    Glob           a rule that may match anywhere in a text; RE2 finds its places
    path_regex     a rule that matches a path as git would; pathspec writes the expression, RE2 runs it

Texts are UTF-8 bytes here, and places are spans of bytes.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

import re2
from pathspec.patterns.gitignore.base import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

# NAME_MAX of Linux: no name is longer, and a star spans at most as many characters.
NAME: Final = 255
# The most that RE2 may take for one expression. A star costs 37 KiB, so a rule may have about 250 stars.
_MEMORY_BYTES: Final = 16 << 20

Span = tuple[int, int]


class Glob:
    """Pieces with `**` between them. A `*` in a piece is at most ``NAME`` characters, none of them a slash.

    The last piece is not empty, since stars at the end of a rule say nothing.

    Raises:
        ValueError: RE2 refuses the rule, because it is too large.
    """

    def __init__(self, pieces: Sequence[str], *, anchored: bool) -> None:
        self._anchored = anchored
        *head, last = pieces
        # RE2 keeps no table of states for a counted star in a text made for it (3 us a character), so that a text
        # without the parts in their order is refused by the uncounted star first (0.01 us).
        self._loose = _compile("(?s:.)*?".join(_translated(piece, "[^/]*") for piece in pieces))
        self._whole = _compile("(?s:.)*?".join(map(_lazy, pieces)))
        self._last = _compile(_greedy(last), longest_match=True)
        self._head = _compile("(?s:.)*?".join(map(_lazy, head))) if head else None
        # The pieces of the head from the last to the first, each to be searched in a reversed text.
        self._reversed = [_compile(_lazy(piece[::-1])) for piece in reversed(head)]

    def finds(self, text: bytes) -> bool:
        """Whether the rule matches any place."""
        return self._first(self._loose, text) is not None and self._first(self._whole, text) is not None

    def _first(self, regex: Any, text: bytes) -> Any:
        return regex.match(text) if self._anchored else regex.search(text)

    def spans(self, text: bytes, most: int) -> list[Span]:
        """Up to ``most`` places: the longest match of the last piece from each place on, none within another.

        Each place begins where the nearest match of the pieces before it begins.
        """
        if self._first(self._loose, text) is None:
            return []
        if self._head is None:
            if not self._anchored:
                return _found(self._last, text, 0, most)
            only = self._last.match(text)
            return [only.span()] if only else []
        first = self._first(self._head, text)
        if first is None:
            return []
        spans = _found(self._last, text, first.end(), most)
        if self._anchored:
            return [(0, end) for _, end in spans]
        starts = [start for start, _ in spans]
        backwards = text.decode()[::-1].encode()
        for piece in self._reversed:
            starts = _nearest(piece, backwards, starts)
        return [(start, end) for start, (_, end) in zip(starts, spans, strict=True)]


def path_regex(pattern: str) -> Any:
    """The expression for a pattern of gitignore, to be matched from the beginning of a path.

    Raises:
        ValueError: the pattern is invalid, or matches nothing.
    """
    try:
        with warnings.catch_warnings():
            # Python warns of `[[`; RE2 runs the expression.
            warnings.simplefilter("ignore", FutureWarning)
            compiled = GitIgnoreSpecPattern(pattern).regex
    except (GitIgnorePatternError, re.error) as e:
        raise ValueError(str(e)) from e
    if compiled is None:
        raise ValueError("the pattern matches nothing")
    # pathspec writes some patterns without an anchor, `*/` as `/`: they match anywhere in a path.
    text = compiled.pattern if compiled.pattern.startswith("^") else f"(?s:.*?){compiled.pattern}"
    return _compile(text)


def _found(regex: Any, text: bytes, at: int, most: int) -> list[Span]:
    return [found.span() for found in itertools.islice(regex.finditer(text, at), most)]


def _nearest(piece: Any, backwards: bytes, limits: list[int]) -> list[int]:
    """Return for each of ascending limits the start of the match that ends last before it.

    ``backwards`` is the reversed text. The first limit has a match before it. A match serves all limits behind it, so
    that each part of the text is searched once.
    """
    size = len(backwards)
    starts, end, start = [0] * len(limits), size + 1, 0
    for number in range(len(limits) - 1, -1, -1):
        if end > limits[number]:
            found = piece.search(backwards, size - limits[number])
            end, start = size - found.start(), size - found.end()
        starts[number] = start
    return starts


def _lazy(piece: str) -> str:
    return _translated(piece, f"[^/]{{0,{NAME}}}?")


def _greedy(piece: str) -> str:
    return _translated(piece, f"[^/]{{0,{NAME}}}")


def _translated(piece: str, star: str) -> str:
    return "".join(star if char == "*" else "[^/]" if char == "?" else re2.escape(char) for char in piece)


def _compile(expression: str, *, longest_match: bool = False) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = _MEMORY_BYTES
    options.longest_match = longest_match
    try:
        return re2.compile(expression, options)
    except re2.error as e:
        raise ValueError(str(e)) from e
