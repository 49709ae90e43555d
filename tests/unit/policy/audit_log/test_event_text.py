"""Each writer of a row's text at its own edges: what is not exactly of its type has no text."""

from __future__ import annotations

import collections
import enum
from typing import Any

import pytest

from policy.audit_log import event_text
from policy.audit_log.event_text import RowText

NO_OBJECTS: tuple[Any, ...] = ({}, {1: {}}, set(), [{"a": []}], [{1: 2}], [{"a": -1}])
DIGEST = "0123456789abcdef" * 4


class Word(enum.StrEnum):
    DIGEST = DIGEST


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        *(("int", number, str(number)) for number in (0, 1, 2**64 - 1)),
        *(("int", other, None) for other in (-1, 2**64, True, 1.0, "1", None)),
        ("int?", None, "null"),
        ("int?", 7, "7"),
        ("int?", -1, None),
        ("bool", True, "true"),
        ("bool", False, "false"),
        ("bool", 0, None),
        ("text", "é\n%s", '"\\u00e9\\n%s"'),
        ("text", 1, None),
        ("text", "\ud800", None),
        ("text", "\U0001f600", None),  # of two surrogates in ASCII: whether it is one is for the long way to say
        ("digest", DIGEST, f'"{DIGEST}"'),
        *(("digest", other, None) for other in (DIGEST[1:], DIGEST.upper(), f"{DIGEST}\n", Word.DIGEST, 7)),
        ("texts", [], "[]"),
        ("texts", (), "[]"),
        ("texts", ["a"], '["a"]'),
        ("texts", ("a", "b"), '["a","b"]'),
        *(("texts", other, None) for other in ("ab", {"a": 1}, {"a"}, [1], None)),
        ("objects", [], "[]"),
        ("objects", ({"a": 1, "b": None}, {"c": "d", "e": True}), '[{"a":1,"b":null},{"c":"d","e":true}]'),
        ("objects", [{}], "[{}]"),
        *(("objects", other, None) for other in NO_OBJECTS),
        ("objects", [collections.OrderedDict(a=1)], None),
        ("counts", {}, "{}"),
        ("counts", {"a": 1, "b": 0}, '{"a":1,"b":0}'),
        *(("counts", other, None) for other in ({"a": -1}, {"a": True}, {1: 1}, [("a", 1)])),
        ("counts", collections.OrderedDict(a=1), None),
    ],
)
def test_value_is_written_as_its_type_says_or_not_at_all(kind: str, value: Any, text: str | None) -> None:
    written = RowText("k", {"a": kind}).text({"a": value})
    assert written == (None if text is None else f'{{"type":"k","a":{text}}}')


def test_every_type_may_be_null_where_its_name_says_so() -> None:
    for name in event_text.WRITERS:
        null = RowText("k", {"a": name}).text({"a": None})
        assert null == ('{"type":"k","a":null}' if name.endswith("?") else None), name


def test_row_has_names_of_its_kind_in_their_order() -> None:
    kind = RowText("k", {"a": "int", "b": "int?", "c": "bool"}, may_lack=("b",))
    for _ in range(2):  # learnt, and known
        assert kind.text({"a": 1, "b": 2, "c": True}) == '{"type":"k","a":1,"b":2,"c":true}'
        assert kind.text({"c": True, "b": None, "a": 1}) == '{"type":"k","a":1,"b":null,"c":true}'
        assert kind.text({"c": False, "a": 1}) == '{"type":"k","a":1,"b":null,"c":false}'
        assert kind.text({"a": 1, "b": 2}) is None
        assert kind.text({"a": 1, "c": True, "d": 1}) is None
        assert kind.text({}) is None
