"""The words of a filter."""

from __future__ import annotations

import pytest

from covenant.tui import filters

HEADS = ("AGENT", "STATE")
ROW = ("Librarian [x]", "running")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", True),
        ("libr", True),
        ("LIBR RUN", True),
        ("libr suspended", False),
        ("-suspended", True),
        ("-running", False),
        ("state:run", True),
        ("agent:run", False),
        ("-agent:libr", False),
        ("colour:run", False),
        ("[x]", True),
        (".*", False),
        ("-", False),
    ],
)
def test_filter_of_words(text: str, found: bool) -> None:
    assert filters.matches(filters.parse(text, HEADS), HEADS, ROW) is found
