"""Any text becomes lines that fit and steer nothing."""

from __future__ import annotations

import unicodedata

import hypothesis
import pytest
from hypothesis import strategies
from rich.cells import cell_len

from covenant.tui import safe_text
from tests.tui_data import HOSTILE

TEXTS = strategies.text(strategies.characters(), max_size=200)
STEERING = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def steers(text: str) -> list[str]:
    """Return the characters of a text that a terminal could obey."""
    return [ch for ch in text if unicodedata.category(ch) in STEERING]


def test_control_is_that_hostile_text_steers() -> None:
    assert {"\x1b", "\x07", "\x9b", "\u202e", "\n"} <= set(steers(HOSTILE))


@hypothesis.given(TEXTS, strategies.integers(0, 90))
def test_cell_of_any_text_fits_and_steers_nothing(text: str, width: int) -> None:
    shown = safe_text.fitted(text, width)
    assert cell_len(shown) == width
    assert steers(shown) == []


@hypothesis.given(TEXTS, strategies.integers(1, 90))
def test_lines_of_any_text_fit_and_steer_nothing(text: str, width: int) -> None:
    for line in safe_text.wrapped(text, width):
        assert cell_len(line) <= width
        assert steers(line) == []


@hypothesis.given(TEXTS, strategies.integers(4, 90))
def test_pieces_of_a_quote_keep_its_mark(text: str, width: int) -> None:
    for line in safe_text.hanging(safe_text.QUOTE + text, width):
        assert line.startswith("| ")
        assert cell_len(line) <= width
        assert steers(line) == []


@hypothesis.given(TEXTS, strategies.integers(4, 90))
def test_pieces_after_the_first_are_indented(text: str, width: int) -> None:
    first, *others = safe_text.hanging(f"name: {text}", width)
    assert all(line.startswith("  ") for line in others)
    assert max(map(cell_len, [first, *others])) <= width


@hypothesis.given(strategies.text(strategies.characters(codec="ascii", categories=["L", "N", "P"]), max_size=300))
def test_wrapped_text_keeps_every_character(text: str) -> None:
    assert "".join(safe_text.wrapped(text, 7)) == text


@pytest.mark.parametrize("text", ["[red]x[/red]", "[@click=app.quit]x[/]", "[link=http://x]y[/link]", "$primary"])
def test_markup_is_drawn_as_it_is(text: str) -> None:
    strip = safe_text.line(text, 40)
    assert strip.text == text.ljust(40)
    assert {segment.style for segment in strip} == {safe_text.PLAIN}
    assert all(segment.style is None or (not segment.style.link and not segment.style.meta) for segment in strip)


def test_hidden_characters_are_written_out() -> None:
    assert safe_text.clean("a\x1b]52;c;x\x07\u202eb\n") == r"a\x1b]52;c;x\x07\u202eb\n"


def test_stacked_marks_are_dropped() -> None:
    assert safe_text.clean("e" + "\u0301" * 50 + "f") == "e\u0301\u0301f"


@pytest.mark.parametrize("doubtful", ["\ufe0f", "\U0001f3fd", "\U0001f1e9", "\U000e0041"])
def test_doubtful_widths_are_written_out(doubtful: str) -> None:
    assert safe_text.clean(doubtful).startswith("\\")


def test_long_text_is_cut_with_an_ellipsis() -> None:
    assert safe_text.cut("x" * 10**6, 5) == "xxxx…"
    assert safe_text.cut("xxxxx", 5) == "xxxxx"
    assert safe_text.cut("字字字", 5) == "字字…"


def test_line_end_in_a_line_is_written_out() -> None:
    assert list(safe_text.wrapped("a\n! b\r\nc", 40)) == ["a\\n! b\\r\\nc"]


def test_very_long_text_says_what_is_missing() -> None:
    lines = list(safe_text.wrapped("y" * (safe_text.MOST_CHARACTERS + 7), 1000))
    assert lines[-1] == "[cut: 7 more characters]"
