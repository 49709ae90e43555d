"""Globs that take time by the length of the text: the same matches as `re` and pathspec find, which go back."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pathspec.patterns.gitignore.base import GitIgnorePatternError
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from covenant.respond import globs, ignore
from covenant.respond.globs import PathGlob, Piece
from covenant.respond.ignore import IgnoreSet

_WORDS = {"*": "[^/]{0,3}", "?": "[^/]"}
_TEXTS = st.text(alphabet="aab/\né", max_size=40)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A star spans three characters, and a text is looked at in windows of five."""
    monkeypatch.setattr(globs, "NAME", 3)
    monkeypatch.setattr(globs, "_WINDOW", 5)


def _re(piece: str) -> str:
    return "".join(_WORDS.get(char, re.escape(char)) for char in piece)


def _pieces() -> st.SearchStrategy[str]:
    parts = st.text(alphabet="aab/?", max_size=4)
    made = st.lists(parts, min_size=1, max_size=5).map("*".join)
    # As a rule makes them: never two stars together, and never a star alone.
    return made.filter(lambda piece: "**" not in piece and piece != "*")


@given(_pieces(), _TEXTS, st.integers(0, 10))
@example("a*b*a", "aabbabaab" * 4, 0)
def test_a_piece_spans_what_the_regular_expression_does(piece: str, text: str, at: int) -> None:
    compiled, made = re.compile(_re(piece)), Piece(piece)
    assert list(made.spans(text, at)) == [found.span() for found in compiled.finditer(text, at)]
    begins = compiled.match(text)
    assert list(made.spans(text, anchored=True)) == ([begins.span()] if begins else [])


@given(_pieces().filter(lambda piece: "*" in piece), _TEXTS, st.integers(0, 10))
def test_each_end_of_a_piece_is_told_with_the_last_place_that_it_can_begin_at(piece: str, text: str, at: int) -> None:
    compiled = re.compile(_re(piece))
    ends = {}
    for end in range(len(text) + 1):
        for start in range(at, end + 1):
            if compiled.fullmatch(text, start, end):
                ends[end] = start
    assert list(Piece(piece).by_end(text, at)) == [(start, end) for end, start in ends.items()]
    first = [end for end in range(len(text) + 1) if compiled.fullmatch(text, 0, end)]
    assert list(Piece(piece).by_end(text, anchored=True)) == [(0, end) for end in first]


@given(st.lists(_pieces(), min_size=1, max_size=4), _TEXTS, st.booleans())
@example(["a*b", "c"], "abcb", False)
def test_a_rule_finds_what_any_way_through_it_finds(pieces: list[str], text: str, anchored: bool) -> None:
    said = "**".join(pieces)
    rule = ignore.Rule(said, False, anchored, tuple(map(Piece, pieces)), None, None)
    whole = re.compile(".*".join(map(_re, pieces)), re.DOTALL)
    found = (whole.match if anchored else whole.search)(text) is not None
    assert rule.finds(text) == found
    spans = rule.spans(text)
    assert bool(spans) == found
    assert all(whole.fullmatch(text, *span) for span in spans)


_PATTERNS = st.text(alphabet="aab*?/![]^-\\.é", min_size=1, max_size=14)
_PATHS = st.text(alphabet="aab/.é!-^", max_size=24)


@given(_PATTERNS, st.lists(_PATHS, min_size=1, max_size=6))
@example("a/**/b", ["a//b", "a/b", "a/x/b", "a/x/y/b/c", "a/bb"])
@example("a*b*a*", ["aba", "abba/x", "ab/a", "x/aba"])
@example("*[!a]*b/", ["aab/", "ab/b/", "b/ab/x"])
@example("a*/**", ["a", "aa/", "aa/b"])
@example("[]-]*[^!]*", ["]a", "-", "--b"])
def test_a_path_matches_as_pathspec_says(pattern: str, paths: list[str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            compiled = GitIgnoreSpecPattern(pattern).regex
    except (GitIgnorePatternError, re.error):
        compiled = None
    try:
        made = PathGlob(pattern)
    except ValueError as e:
        assert compiled is None or not compiled.pattern.startswith("^"), str(e)  # noqa: PT017 - what else it may be
        return
    assert compiled is not None
    for path in paths:
        assert made.matches(path) == (compiled.search(path) is not None), path


def test_what_is_remembered_of_a_pattern_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(globs, "_MOST_KNOWN", 3)
    made = PathGlob("*a*b?")
    matched = [path for path in ("xaxbx", "xaxb", "ab/ab", "aabbabb", "abx/y") if made.matches(path)]
    assert matched == ["xaxbx", "aabbabb", "abx/y"]


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
def test_no_rule_takes_longer_than_the_text_is(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Going back to each star takes hours for every one of these; nobody waits for that.
    monkeypatch.undo()
    rules = IgnoreSet.of(rule, "!x", rule)
    for text in _LONG:
        rules.match(f"{text} z c q/")
