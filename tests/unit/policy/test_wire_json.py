"""JSON of the wire: what two readers could read in two ways is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import errors, wire_json
from policy.signing import strict_json

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_what_python_writes_is_read_as_it_was(value: Any) -> None:
    assert wire_json.read(json.dumps(value).encode("utf-8", "surrogatepass")) == value


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not JSON at line 1 column 1"),
        (b"{} {}", "not JSON at line 1 column 4"),
        (b"\xff", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON at line 1 column 1"),
        (b'{"a":1,"a":1}', "the key `a` stands twice in one object"),
        (b'{"x":{"\\u0061":1,"a":2}}', "the key `a` stands twice in one object"),
        (b"[NaN]", "`NaN` is no number of JSON"),
        (b"[-Infinity]", "`-Infinity` is no number of JSON"),
        (b"[1e999]", "the number `1e999` is too large"),
        (b"9" * 5000, "a number that is too long"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64 levels"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper than 64 levels"),
        (b"[" * 30_000, "nested deeper than 64 levels"),
    ],
)
def test_what_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(errors.MalformedRequestError) as caught:
        wire_json.read(raw)
    assert caught.value.message == why


MOST = wire_json.MAX_VALUES
TOO_MANY = f"more than {MOST} values in one document"


@pytest.mark.parametrize(
    "raw",
    [
        b"[" + b"[]," * (MOST - 1) + b"[]]",
        b"[" + b"0," * (MOST - 1) + b"0]",
        b"{" + b",".join(b'"%d":0' % n for n in range(MOST)) + b"}",
        b"[" + b'"",' * (MOST - 1) + b'""]',
        b"[" + b'"\\\\",' * (MOST - 1) + b'"\\""]',
        b'{"text":"' + b"," * MOST + b'","list":[' + b"0," * MOST + b"0]}",
    ],
    ids=["lists", "numbers", "keys", "texts", "escaped", "after a text"],
)
def test_more_values_than_document_may_have_are_not_even_read(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(wire_json, "DECODER", None)
        with pytest.raises(errors.MalformedRequestError) as caught:
            wire_json.read(raw)
    assert caught.value.message == TOO_MANY


@pytest.mark.parametrize(
    "value",
    [
        [0] * (MOST - 1),
        {str(n): "" for n in range(MOST - 1)},
        ["\\" if n % 2 else '"' for n in range(MOST - 1)],
        {"text": ',[{"\\' * MOST, "list": [",[{"] * 100},
    ],
    ids=["numbers", "keys", "escaped", "a text of nothing else"],
)
def test_as_many_as_it_may_have_and_texts_of_any_kind_are_read(value: Any) -> None:
    assert wire_json.read(json.dumps(value).encode()) == value


@given(JSON)
def test_no_value_is_counted_more_than_once_or_for_what_stands_in_text(value: Any) -> None:
    raw = json.dumps(value).encode("utf-8", "surrogatepass")
    assert wire_json.read(raw, 1 + _inside(value)) == value


def _inside(value: Any) -> int:
    """How many values stand in this one; an empty list or object counts as if it held one."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(inner)) + sum(map(_inside, inner))


class _Key(str):
    """A key that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        _Key.compared += 1
        return str.__eq__(self, other)


def test_key_that_stands_twice_is_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Key, "compared", 0)
    pairs = [(_Key(n), 0) for n in range(2000)] + [(_Key(1999), 1)]
    with pytest.raises(strict_json.MalformedJsonError, match="the key `1999` stands twice"):
        wire_json.DECODER.object_pairs_hook(list(pairs))
    assert _Key.compared < 10 * len(pairs)


@pytest.mark.parametrize(
    "raw", [b"[" * 64 + b"]" * 64, b'{"a":' * 63 + b"[1]" + b"}" * 63, b"[" + b"[]," * 500 + b"[]]"]
)
def test_depth_counts_what_stands_in_each_other(raw: bytes) -> None:
    assert wire_json.read(raw) == json.loads(raw)
