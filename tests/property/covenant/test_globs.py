"""The globs of `.covenantignore` match what Python's `re` and pathspec match, in linear time."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pathspec.patterns.gitignore.base import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from covenant.handlers.state import glob as state_glob
from covenant.handlers.state.glob import Glob
from covenant.handlers.state.ignore_rules import IgnoreSet
from policy import errors

_WORDS = {"*": "[^/]{0,3}", "?": "[^/]"}
_TEXTS = st.text(alphabet="aab/\né", max_size=40)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A star spans three characters."""
    monkeypatch.setattr(state_glob, "NAME", 3)


def _re(piece: str) -> str:
    return "".join(_WORDS.get(char, re.escape(char)) for char in piece)


def _pieces() -> st.SearchStrategy[str]:
    parts = st.text(alphabet="aab/?", max_size=4)
    made = st.lists(parts, min_size=1, max_size=5).map("*".join)
    # As a rule makes them: never two stars together, and never a star alone.
    return made.filter(lambda piece: "**" not in piece and piece != "*")


@given(_pieces().filter(bool), _TEXTS)
@example("a*b*a", "aabbabaab" * 4)
def test_piece_spans_equal_those_of_re(piece: str, text: str) -> None:
    compiled = re.compile(_re(piece))
    raw = text.encode()
    begins = compiled.match(text)
    assert _spans(Glob([piece], anchored=False), text) == [found.span() for found in compiled.finditer(text)]
    assert _spans(Glob([piece], anchored=True), text) == ([begins.span()] if begins else [])
    assert Glob([piece], anchored=True).finds(raw) == (begins is not None)


def _spans(glob: Glob, text: str) -> list[tuple[int, int]]:
    """Spans of characters."""
    raw = text.encode()
    return [(len(raw[:start].decode()), len(raw[:end].decode())) for start, end in glob.spans(raw, 1000)]


@given(st.lists(_pieces(), min_size=1, max_size=4).filter(lambda pieces: bool(pieces[-1])), _TEXTS, st.booleans())
@example(["a*b", "c"], "abcb", False)
def test_glob_finds_what_any_path_finds(pieces: list[str], text: str, anchored: bool) -> None:
    made = Glob(pieces, anchored=anchored)
    whole = re.compile(".*".join(map(_re, pieces)), re.DOTALL)
    found = (whole.match if anchored else whole.search)(text) is not None
    assert made.finds(text.encode()) == found
    spans = _spans(made, text)
    assert bool(spans) == found
    assert all(whole.fullmatch(text, *span) for span in spans)


@given(_pieces().filter(lambda piece: "*" in piece), _pieces().filter(bool), _TEXTS)
@example("a*b*c", "z", "aabbacbczzcz")
def test_place_begins_at_nearest_start(first: str, last: str, text: str) -> None:
    head, tail = re.compile(_re(first)), re.compile(_re(last))
    # For each end of the first piece the last start, found by trying all.
    nearest = {
        end: start for end in range(len(text) + 1) for start in range(end + 1) if head.fullmatch(text, start, end)
    }
    expected = [
        (nearest[max(end for end in nearest if end <= found.start())], found.end())
        for found in tail.finditer(text, min(nearest, default=len(text)))
        if nearest
    ]
    assert _spans(Glob([first, last], anchored=False), text) == expected


_PATTERNS = st.text(alphabet="aab*?/![]^-\\.é", min_size=1, max_size=14)
_PATHS = st.text(alphabet="aab/.é!-^", max_size=24)


@given(_PATTERNS, st.lists(_PATHS, min_size=1, max_size=6))
@example("*/", ["^/", "a"])
@example("a/**/b", ["a//b", "a/b", "a/x/b", "a/x/y/b/c", "a/bb"])
@example("a*b*a*", ["aba", "abba/x", "ab/a", "x/aba"])
@example("*[!a]*b/", ["aab/", "ab/b/", "b/ab/x"])
@example("a*/**", ["a", "aa/", "aa/b"])
@example("[]-]*[^!]*", ["]a", "-", "--b"])
def test_path_matches_as_pathspec_says(pattern: str, paths: list[str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            compiled = GitIgnoreSpecPattern(pattern).regex
    except (GitIgnorePatternError, re.error):
        compiled = None
    try:
        made = state_glob.path_regex(pattern)
    except ValueError as e:
        assert compiled is None or not compiled.pattern.startswith("^"), str(e)  # noqa: PT017 - what else it may be
        return
    assert compiled is not None
    for path in paths:
        assert (made.match(path) is not None) == (compiled.search(path) is not None), path


_RULES = [
    "a*b*a*b*z",
    "ab*ab*ab*z/",
    "q/a*b*a*b*z",
    "a*b**a*b**a*z",
    "/a*b*a*b*z",
    "[!q]*a*[!r]*b*c",
    "a/**/b/**/a/**/z",
]
_LONG = ("ab" * 250_000, "a" * 500_000, ("ab" * 2_000 + ".z_ ") * 20, "a/b/" * 1_000, "a/b/" * 100_000)


@pytest.mark.parametrize("rule", _RULES)
def test_rule_of_many_stars_ends_on_long_text(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine that goes back to each star takes hours for each of these.
    monkeypatch.undo()
    rules = IgnoreSet.of(rule, "!x", rule)
    for text in _LONG:
        rules.match(f"{text} z c q/")


def test_rule_too_large_for_re2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(errors.IgnoreFileError, match="too many stars") as refused:
        IgnoreSet.of("a*" * 2000 + "b")
    assert refused.value.hint == "split it into shorter rules"
    assert IgnoreSet.of(*["a*" * 100 + "b"] * 2).rules
