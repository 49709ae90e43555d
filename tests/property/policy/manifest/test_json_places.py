"""The places of a JSON document, with Python's own reader as oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policy.manifest import lines
from policy.manifest.lines import Path
from policy.manifest.tools import json_places

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
KEYS = st.text('ab"\\é\n\u2028', max_size=3)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=12)
SPACES = st.text(" \n\t\r", max_size=2)


@st.composite
def documents(draw: Any) -> tuple[str, Any]:
    """A document with space wherever JSON allows it, and its value."""
    value = draw(VALUES)

    def write(value: Any) -> str:
        around = (draw(SPACES), draw(SPACES))
        if isinstance(value, dict):
            spelt = draw(st.booleans())
            pairs = (
                f"{draw(SPACES)}{json.dumps(k, ensure_ascii=spelt)}{draw(SPACES)}:{write(v)}" for k, v in value.items()
            )
            body = f"{{{','.join(pairs)}{draw(SPACES)}}}"
        elif isinstance(value, list):
            body = f"[{','.join(map(write, value))}{draw(SPACES)}]"
        else:
            body = json.dumps(value, ensure_ascii=draw(st.booleans()))
        return f"{around[0]}{body}{around[1]}"

    return write(value), value


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from walk(inner, (*path, key))


@settings(max_examples=400, deadline=None)
@given(documents())
def test_each_value_and_key_stands_there(case: tuple[str, Any]) -> None:
    document, value = case
    assert json.loads(document) == value, "the generator is wrong"
    scan = json_places.scan(document)
    paths = dict(walk(value))
    assert set(scan.values) == set(paths)
    assert set(scan.keys) == {path for path in paths if path and isinstance(path[-1], str)}
    assert scan.duplicates == ()
    for path, inner in paths.items():
        start, end = scan.values[path]
        assert json.loads(document[start:end]) == inner
        assert scan.place(path, key=False) == lines.place_at(document, start)
        if path in scan.keys:
            assert json.JSONDecoder().raw_decode(document, scan.keys[path])[0] == path[-1]


@settings(max_examples=300, deadline=None)
@given(documents(), st.data())
def test_replaced_value_and_nothing_else(case: tuple[str, Any], data: st.DataObject) -> None:
    document, value = case
    scan = json_places.scan(document)
    scalars = [path for path, inner in walk(value) if not isinstance(inner, dict | list)]
    chosen = data.draw(st.lists(st.sampled_from(scalars), unique=True)) if scalars else []
    after = dict(walk(json.loads(scan.replaced({path: json.dumps(f"new {path}") for path in chosen}))))
    for path, inner in walk(value):
        if path in chosen:
            assert after[path] == f"new {path}"
        elif not isinstance(inner, dict | list):
            assert after[path] == inner


@settings(max_examples=300, deadline=None)
@given(st.text('{}[],:"\\ a1\n', max_size=40))
def test_text_no_json_does_not_raise(document: str) -> None:
    scan = json_places.scan(document)
    assert all(0 <= start < end <= len(document) for start, end in scan.values.values())


def test_second_of_two_keys_is_named() -> None:
    scan = json_places.scan('{"a": {"b": 1,\n"\\u0062": 2}}')
    assert scan.duplicates == ((("a", "b"), 15),)
    assert scan.place(("a", "b"), key=True) == (2, 1)
    assert scan.place(("a", "missing"), key=True) == (1, 7)
    assert scan.place((), key=False) == (1, 1)
