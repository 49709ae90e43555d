"""Requests of the wire, parsed: what no request is has one of two refusals."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.wire import requests
from policy import errors

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def test_refusal_names_field_and_shows_no_control_characters() -> None:
    with pytest.raises(errors.MalformedRequestError) as caught:
        requests.parse(b'{"kind":"recent_memory","limit":"ten"}')
    assert (caught.value.message, caught.value.where) == ("`limit`: input should be a valid integer", "recent_memory")
    with pytest.raises(errors.UnknownKindError) as unknown:
        requests.parse(b'{"kind":"a\\u001b[2J"}')
    assert unknown.value.message == "no request has the kind `a\\x1b[2J`"


@given(st.binary(max_size=200) | JSON.map(lambda v: json.dumps(v).encode("utf-8", "surrogatepass")))
def test_whatever_comes_is_request_or_one_of_two_refusals(raw: bytes) -> None:
    refusal = ""
    try:
        assert requests.parse(raw).kind in requests.KINDS
    except errors.MalformedRequestError as e:
        refusal = e.message
    assert refusal.isprintable()
