"""Values are counted on the bytes as they are in the document; what is within the bound parses as ever."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import json_bounds
from policy.signing import strict_json

# Texts of what is counted, among others.
TEXT = st.text() | st.text(alphabet='",[]{}:\\ a')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)
WRITTEN = st.tuples(JSON, st.booleans(), st.sampled_from([None, 0, 2]))


def written(value: Any, *, ascii_only: bool, indent: int | None) -> bytes:
    """The document, as one of the ways to write it."""
    return json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")


def values(value: Any) -> int:
    """How many values there are; an empty list or object counts as if it held one."""
    if not isinstance(value, dict | list):
        return 1
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + (sum(map(values, inner)) or 1)


@given(WRITTEN)
def test_bound_is_exact_for_any_document(case: tuple[Any, bool, int | None]) -> None:
    value, ascii_only, indent = case
    raw, count = written(value, ascii_only=ascii_only, indent=indent), values(value)
    assert not json_bounds.exceeds(raw, count)
    assert json_bounds.exceeds(raw, count - 1)


@given(JSON)
def test_document_within_bound_is_read_as_ever(value: Any) -> None:
    raw, count = strict_json.dumps(value), values(value)
    try:
        read = strict_json.loads(raw, max_bytes=len(raw), max_values=10**9)
    except strict_json.MalformedJsonError:
        read = MALFORMED  # a lone surrogate
    if read is MALFORMED:
        with pytest.raises(strict_json.MalformedJsonError):
            strict_json.loads(raw, max_bytes=len(raw), max_values=count)
    else:
        assert strict_json.loads(raw, max_bytes=len(raw), max_values=count) == read == value


MALFORMED = object()


@given(JSON)
def test_document_beyond_bound_is_not_parsed(value: Any) -> None:
    raw, most = strict_json.dumps(value), values(value) - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_DECODER", None)
        with pytest.raises(strict_json.MalformedJsonError, match=f"^made of more than {most} values$"):
            strict_json.loads(raw, max_bytes=len(raw), max_values=most)


@given(st.binary(max_size=300), st.integers(0, 20))
def test_bytes_no_json_are_judged_too(raw: bytes, most: int) -> None:
    assert json_bounds.exceeds(raw, most) in (True, False)


def test_statement_over_largest_package_fits() -> None:
    from policy import package

    subject = [{"name": "a" * 8 + str(n), "digest": {"sha256": "0" * 64}} for n in range(package.MAX_FILES)]
    assert not json_bounds.exceeds(json.dumps({"subject": subject}).encode(), json_bounds.DOCUMENT_VALUES - 10_000)
