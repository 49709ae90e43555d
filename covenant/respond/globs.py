"""Globs whose matching takes time by the length of the text, whatever the glob and the text are.

`re` goes back to every star before the one that failed: of three stars and a line of 4,096 characters that is minutes.

    Piece      what stands between two `**` of a rule, found anywhere in a text: each part between two stars is looked
               up in the whole text at once, and the parts are joined from one end to the other
    PathGlob   a path as git matches it: all ways through the pattern are followed at the same time, one character
               after the other (Thompson 1968), with what was seen once remembered
"""

from __future__ import annotations

import bisect
import re
import warnings
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from pathspec.patterns.gitignore.base import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

# NAME_MAX of Linux: no name is longer, and a star spans no more.
NAME: Final = 255
# So much of a text is looked at in one go: the arrays of a part are as long.
_WINDOW: Final = 1 << 18
_SLASH: Final = ord("/")

Span = tuple[int, int]
_Places = npt.NDArray[np.int64]


class Piece:
    """Parts without a star, each a `*` of at most ``NAME`` characters apart, none of them a slash."""

    def __init__(self, text: str) -> None:
        self._parts = text.split("*")
        # Without a star a match is as long as the piece: nothing to go back to.
        self._plain = re.compile("".join(map(_one, text))) if len(self._parts) == 1 else None
        self._longest = sum(map(len, self._parts)) + NAME * (len(self._parts) - 1)

    def spans(self, text: str, at: int = 0, *, anchored: bool = False) -> Iterator[Span]:
        """The longest match from each place on, none within another, the first first."""
        if self._plain is not None:
            yield from self._plain_spans(text, at, anchored=anchored)
            return
        for start, found in self._windows(text, at):
            starts, ends = found.longest(only=start if anchored else None)
            number = 0
            while (number := bisect.bisect_left(starts, at, lo=number)) < len(starts):
                if starts[number] >= start + _WINDOW:
                    break
                at = ends[number]
                yield starts[number], at
            if anchored:
                return

    def by_end(self, text: str, at: int = 0, *, anchored: bool = False) -> Iterator[Span]:
        """For each place at which a match ends the shortest such match, the first first."""
        if self._plain is not None:
            yield from self._plain_spans(text, at, anchored=anchored)
            return
        told = -1
        for start, found in self._windows(text, at):
            for span in found.shortest(only=start if anchored else None):
                # What ends within the length of a match from here, the window before has told with all its starts.
                if span[1] > told:
                    yield span
            told = start + _WINDOW + self._longest
            if anchored:
                return

    def _plain_spans(self, text: str, at: int, *, anchored: bool) -> Iterator[Span]:
        assert self._plain is not None
        if anchored:
            found = self._plain.match(text, at)
            if found is not None:
                yield found.span()
            return
        for one in self._plain.finditer(text, at):
            yield one.span()

    def _windows(self, text: str, at: int) -> Iterator[tuple[int, _Found]]:
        """Every match lies whole in a window: each goes on for the length of a match beyond where the next begins."""
        literals = [word for part in self._parts for word in part.split("?") if word]
        if any(text.find(word, at) < 0 for word in literals):
            return
        for start in range(at, len(text), _WINDOW):
            yield start, _Found(self._parts, text[start : start + _WINDOW + self._longest], start)


class _Found:
    """Where the parts of a piece stand in one window of a text, which begins at ``offset`` of it."""

    def __init__(self, parts: list[str], window: str, offset: int) -> None:
        self._offset = offset
        self._lengths = [len(part) for part in parts]
        codes = np.frombuffer(window.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        # Behind the last one another, so that each place has one after it.
        self._slashes = np.append(np.flatnonzero(codes == _SLASH), len(codes))
        self._places = [_places(codes, part) for part in parts]

    def longest(self, only: int | None = None) -> tuple[list[int], list[int]]:
        """Each start of a match, with the last end of one that starts there."""
        places = self._from(only)
        starts = places[-1]
        ends = starts + self._lengths[-1]
        for place, length in zip(places[-2::-1], self._lengths[-2::-1], strict=True):
            low = place + length
            high = np.minimum(low + NAME, self._next_slash(low))
            # The last one within reach ends last: of two ways, the later place of each part makes a way as well.
            last = np.searchsorted(starts, high, side="right") - 1
            alive = last >= 0
            alive[alive] = starts[last[alive]] >= low[alive]
            starts, ends = place[alive], ends[last[alive]]
        return (starts + self._offset).tolist(), (ends + self._offset).tolist()

    def shortest(self, only: int | None = None) -> Iterator[Span]:
        """Each end of a match, with the last start of one that ends there."""
        places = self._from(only)
        begins, starts = places[0], places[0]
        for number, place in enumerate(places[1:]):
            ends = starts + self._lengths[number]
            last = np.searchsorted(ends, place, side="right") - 1
            alive = last >= 0
            end, here = ends[last[alive]], place[alive]
            alive[alive] = (here - end <= NAME) & (self._next_slash(end) >= here)
            starts, begins = place[alive], begins[last[alive]]
        ends = starts + self._lengths[-1]
        return zip((begins + self._offset).tolist(), (ends + self._offset).tolist(), strict=True)

    def _from(self, only: int | None) -> list[_Places]:
        if only is None:
            return self._places
        first = self._places[0]
        return [first[first == only - self._offset], *self._places[1:]]

    def _next_slash(self, places: _Places) -> _Places:
        return self._slashes[np.searchsorted(self._slashes, places)]


def _places(codes: npt.NDArray[np.uint32], part: str) -> _Places:
    """Where a part stands; one that is empty stands everywhere, also at the end."""
    count = len(codes) - len(part) + 1
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    alive = np.ones(count, dtype=np.bool_)
    for number, char in enumerate(part):
        shifted = codes[number : number + count]
        alive &= shifted != _SLASH if char == "?" else shifted == ord(char)
    return np.flatnonzero(alive)


def _one(char: str) -> str:
    return "[^/]" if char == "?" else re.escape(char)


# --- paths --------------------------------------------------------------------------------------------------------

# What pathspec makes of a pattern, and nothing else: brackets hold no slash, since a pattern is split at slashes first.
_TOKEN: Final = re.compile(
    r"""(?P<above>\(\?:\.\+/\)\?)
      | (?P<between>\(\?:/\.\+\)\?)
      | (?P<end>\(\?:\(\?P<ps_d>/\)\|\$\))
      | (?P<directory>\(\?P<ps_d>/\))
      | (?P<name>\[\^/\]\+)
      | (?P<star>\[\^/\]\*)
      | (?P<bracket>\[\^?\]?[^\]]*\])
      | \\(?P<escaped>.)
      | (?P<plain>[^\\()\[\]{}.*+?^$|])""",
    re.VERBOSE | re.DOTALL,
)
_ANY: Final = re.compile(r".")
_NO_SLASH: Final = re.compile(r"[^/]")
_A_SLASH: Final = re.compile(r"/")
# So many steps are remembered; a pattern can have more ways of having come so far than a machine has memory.
_MOST_KNOWN: Final = 65_536

_States = frozenset[int]
_NONE: Final[_States] = frozenset()


class PathGlob:
    """A pattern of gitignore, held against a path as pathspec holds it, which makes a regular expression of it.

    Raises:
        ValueError: it is no pattern, or matches nothing.
    """

    def __init__(self, pattern: str) -> None:
        try:
            with warnings.catch_warnings():
                # Of `[[`, which re may read otherwise one day; git reads it as a bracket in a bracket.
                warnings.simplefilter("ignore", FutureWarning)
                compiled = GitIgnoreSpecPattern(pattern).regex
                if compiled is None:
                    raise ValueError("it matches nothing")
                self._steps = _Steps(compiled.pattern)
        except (GitIgnorePatternError, re.error) as e:
            raise ValueError(str(e)) from e
        self._regex: re.Pattern[str] = compiled
        self._known: dict[_States, dict[str, _States]] = {}
        self._count = 0

    def matches(self, path: str) -> bool:
        """Whether the pattern names it, or a directory above it."""
        if self._steps.simple:
            return self._regex.match(path) is not None
        steps, at = self._steps, self._steps.first
        for char in path:
            if steps.over in at:
                return True
            following = self._known.get(at, {}).get(char)
            at = self._after(at, char) if following is None else following
            if not at:
                return False
        return steps.over in at or steps.at_end in at

    def _after(self, at: _States, char: str) -> _States:
        if self._count >= _MOST_KNOWN:
            self._known.clear()
            self._count = 0
        found = self._known.setdefault(at, {})[char] = self._steps.after(at, char)
        self._count += 1
        return found


class _Steps:
    """A regular expression of pathspec's as steps from 0 to ``over``, each taken by a character.

    ``simple``: it has one star a name and none over several, so that `re` has one place to go back to, and is faster.
    """

    def __init__(self, regex: str) -> None:
        self._takes: list[tuple[re.Pattern[str], bool]] = []
        # Where one may be as well without a character.
        self._skips: dict[int, int] = {}
        self.at_end = -1
        self.simple = True
        stars = brackets = 0
        # Behind the `^` that each of them begins with.
        at = 1
        while (token := _TOKEN.match(regex, at)) is not None:
            at = token.end()
            kind = str(token.lastgroup)
            self._read(kind, token)
            stars = 0 if token.group() == "/" else stars + (kind in {"star", "name"})
            brackets += kind == "bracket"
            self.simple = self.simple and stars <= 1 and not (stars and brackets) and kind != "between"
        if at < len(regex) or not regex.startswith("^"):
            raise ValueError(f"`{regex}` is none that pathspec made")
        self.over = len(self._takes)
        self.first = self._closed({0})

    def after(self, at: _States, char: str) -> _States:
        """Where one may be after a character, that may have been at ``at`` before it."""
        found = set[int]()
        for step in at - {self.over}:
            takes, repeated = self._takes[step]
            if takes.match(char):
                found.add(step if repeated else step + 1)
        return self._closed(found)

    def _closed(self, states: set[int]) -> _States:
        waiting = list(states)
        while waiting:
            skipped = self._skips.get(waiting.pop())
            if skipped is not None and skipped not in states:
                states.add(skipped)
                waiting.append(skipped)
        return frozenset(states)

    def _read(self, kind: str, token: re.Match[str]) -> None:
        match kind:
            case "above":
                self._skips[len(self._takes)] = len(self._takes) + 3
                self._add(_ANY)
                self._add(_ANY, repeated=True)
                self._add(_A_SLASH)
            case "between":
                self._skips[len(self._takes)] = len(self._takes) + 3
                self._add(_A_SLASH)
                self._add(_ANY)
                self._add(_ANY, repeated=True)
            case "end" | "directory":
                if kind == "end":
                    self.at_end = len(self._takes)
                self._add(_A_SLASH)
            case "name":
                self._add(_NO_SLASH)
                self._add(_NO_SLASH, repeated=True)
            case "star":
                self._add(_NO_SLASH, repeated=True)
            case "bracket":
                self._add(re.compile(token.group()))
            case _:
                self._add(re.compile(re.escape(token["escaped"] or token["plain"])))

    def _add(self, takes: re.Pattern[str], *, repeated: bool = False) -> None:
        if repeated:
            self._skips[len(self._takes)] = len(self._takes) + 1
        self._takes.append((takes, repeated))
