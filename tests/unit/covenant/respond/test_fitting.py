"""What one answer takes is counted in bytes of the wire."""

from __future__ import annotations

import pytest

from covenant.respond import fitting
from covenant.wire.types import ToolSpec


def row(text: str) -> ToolSpec:
    return ToolSpec(name="tool", description=text, input_schema={})


@pytest.mark.parametrize("letter", ["x", "é", "語", "🚢"])
def test_rows_are_counted_as_a_frame_counts_them(letter: str) -> None:
    one = row(letter * 100)
    size = len(one.model_dump_json().encode())
    assert fitting.that_fit([one] * 3, 2 * size) == (one, one)
    assert fitting.that_fit([one] * 3, 2 * size - 1) == (one,)


def test_one_fits_in_any_case_and_of_none_there_is_none() -> None:
    assert fitting.that_fit([row("first"), row("second")], 0) == (row("first"),)
    assert fitting.that_fit([], 100) == ()


def test_what_comes_after_is_not_looked_at() -> None:
    rows = iter([row("a"), row("b"), row("c")])
    fitting.that_fit(rows, 1)
    assert next(rows) == row("c")
