"""Check that the size of an answer is counted in wire bytes."""

from __future__ import annotations

import pytest

from covenant.handlers import paging
from covenant.wire import frames, responses
from covenant.wire.types import ToolSpec


def row(text: str) -> ToolSpec:
    return ToolSpec(name="tool", description=text, input_schema={})


@pytest.mark.parametrize("letter", ["x", "é", "語", "🚢"])
def test_rows_are_counted_as_frame_counts_them(letter: str) -> None:
    one = row(letter * 100)
    size = len(one.model_dump_json(by_alias=True).encode())
    assert paging.that_fit([one] * 3, 2 * size + 2) == (one, one)
    assert paging.that_fit([one] * 3, 2 * size + 1) == (one,)


def test_one_fits_in_any_case_and_of_none_there_is_none() -> None:
    assert paging.that_fit([row("first"), row("second")], 0) == (row("first"),)
    assert paging.that_fit([], 100) == ()


@pytest.mark.parametrize("letter", ["x", "é", "\x01", '"'])
def test_as_many_rows_as_there_are_fit_frame_with_what_stands_around_them(letter: str) -> None:
    for length in (0, 10, 1000, 1_000_000):
        shown = paging.that_fit([row(letter * length)] * 100_000)
        frames.encode(responses.ToolList(tools=shown).to_bytes())
        assert paging.size_of(shown) <= paging.ROOM + 2


def test_one_that_no_frame_could_carry_keeps_no_other_away() -> None:
    giant = row("x" * frames.MAX_BYTES)
    assert paging.that_fit([giant, row("a"), giant, row("b")]) == (row("a"), row("b"))
    assert paging.cut([giant]) == ((), False)
    assert paging.cut([row("a"), giant, row("b")], 1) == ((row("a"),), True)


def test_field_counts_under_name_that_it_has_on_wire() -> None:
    assert paging.size_of(row("")) == len(row("").model_dump_json(by_alias=True))


def test_what_comes_after_is_not_looked_at() -> None:
    rows = iter([row("a"), row("b"), row("c")])
    paging.that_fit(rows, 1)
    assert next(rows) == row("c")
