"""A row's text in one pass is what the long way makes of it, and what the long way refuses has no such text."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import errors
from policy.audit_log import event_text, events


class Word(enum.StrEnum):
    ONE = "one"


class Number(enum.IntEnum):
    ONE = 1


TEXTS = st.text() | st.sampled_from(["", "\ud800", "\\ud800", "é\n", "\U0001f600", "%s", "{}", Word.ONE])
NUMBERS = st.integers(-1, 2**64) | st.sampled_from([True, 1.0, Number.ONE])
SCALARS = TEXTS | NUMBERS | st.none() | st.booleans()
OBJECTS = st.dictionaries(TEXTS | st.integers(), SCALARS | st.lists(st.text(), max_size=1), max_size=3)
DIGESTS = st.sampled_from(["a" * 64, "0" * 63, "A" * 64, "f" * 64 + "\n"])
ANYTHING = (
    SCALARS | DIGESTS | st.lists(SCALARS, max_size=3) | st.tuples(TEXTS) | OBJECTS | st.lists(OBJECTS, max_size=2)
)
LIKELY = {
    "text": TEXTS,
    "int": NUMBERS,
    "bool": st.booleans(),
    "digest": DIGESTS,
    "texts": st.lists(TEXTS, max_size=3),
    "objects": st.lists(OBJECTS, max_size=2),
    "counts": st.dictionaries(TEXTS, NUMBERS, max_size=3),
}


def the_long_way(kind: str, fields: dict[str, Any]) -> str:
    made = events.kind_object(kind, fields)
    return json.dumps(made, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def said(make: Callable[[], str]) -> tuple[str, str]:
    """The text, and what it was refused with."""
    try:
        return make(), ""
    except errors.EventError as e:
        return "", str(e)


@st.composite
def rows(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(sorted(events.KINDS)))
    values = {}
    for name, wanted in events.KINDS[kind].items():
        likely = LIKELY[wanted.removesuffix("?")] | (st.none() if wanted.endswith("?") else st.nothing())
        values[name] = draw(likely if draw(st.integers(0, 15)) else ANYTHING)
    names = draw(st.permutations(sorted(values)))
    dropped = draw(st.sets(st.sampled_from(names), max_size=1)) if not draw(st.integers(0, 7)) else set()
    fields = {name: values[name] for name in names if name not in dropped}
    return kind, fields if draw(st.integers(0, 15)) else {**fields, "more": "x"}


@given(rows())
def test_both_ways_say_same(row: tuple[str, dict[str, Any]]) -> None:
    kind, fields = row
    expected, refused = said(lambda: the_long_way(kind, fields))
    assert said(lambda: events.kind_text(kind, fields)) == (expected, refused)
    if refused:
        assert event_text.RowText(kind, events.KINDS[kind]).text(fields) is None


@given(rows())
def test_of_no_run_is_null_for_both(row: tuple[str, dict[str, Any]]) -> None:
    kind, fields = row
    left_out = {name: value for name, value in fields.items() if name not in ("run_id", "operator")}
    table = events.KINDS[kind]
    whole = {**{name: None for name in ("run_id", "operator") if table.get(name) == "text?"}, **left_out}
    expected, refused = said(lambda: the_long_way(kind, whole))
    found, refused_too = said(lambda: events.kind_text(kind, left_out, of_no_run=True))
    assert (found, bool(refused_too)) == (expected, bool(refused))


@pytest.mark.parametrize("kind", sorted(events.KINDS))
def test_what_every_kind_says_plainly_is_written_in_one_pass(kind: str) -> None:
    plain = {"text": "a\"'\\é", "int": 2**64 - 1, "bool": True, "digest": "0" * 64, "texts": ["a", "b"]}
    plain |= {"objects": [{"a": "b", "c": 1, "d": None, "e": False}, {}], "counts": {"a": 1}}
    for null in (False, True):
        fields = {
            name: None if null and wanted.endswith("?") else plain[wanted.removesuffix("?")]
            for name, wanted in events.KINDS[kind].items()
        }
        assert event_text.RowText(kind, events.KINDS[kind]).text(fields) == the_long_way(kind, fields)
