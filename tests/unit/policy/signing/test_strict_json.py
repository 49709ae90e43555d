"""The strict JSON reader: a corpus of what other readers let pass."""

from __future__ import annotations

import json

import pydantic
import pytest

from policy.signing import strict_json

REFUSED = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b'{"a":1,}', "not JSON"),
    (b"{'a':1}", "not JSON"),
    (b'{"a":1} x', "not JSON"),
    (b'{"a":1}{"a":1}', "not JSON"),
    (b'\xef\xbb\xbf{"a":1}', "not JSON"),
    (b'{"a":"\x01"}', "not JSON"),
    (b"// c\n{}", "not JSON"),
    (b'{"a":"\xff"}', "not UTF-8"),
    (b'{"a":"\xed\xa0\x80"}', "not UTF-8"),
    ('{"a":1}'.encode("utf-16"), "not UTF-8"),
    (b'{"a":1,"a":2}', "stands twice"),
    (b'{"a":1,"\\u0061":2}', "stands twice"),
    (b'[{"x":{"a":1,"b":2,"a":1}}]', "stands twice"),
    (b'{"a":1.0}', "not an integer"),
    (b'{"a":1e3}', "not an integer"),
    (b'{"a":NaN}', "not an integer"),
    (b'{"a":-Infinity}', "not an integer"),
    (b"9" * 5000, "too long"),
    (b"[" * 60_000, "nested too deeply"),
    (b"[" * 100_000, "made of more than 65536 values"),
    (b"{" + b",".join(b'"%d":0' % n for n in range(70_000)) + b"}", "made of more than 65536 values"),
    (b'{"a":' * 50_000, "nested too deeply"),
    (b'"' + b"x" * 200_000 + b'"', "larger than"),
]


@pytest.mark.parametrize(("raw", "says"), REFUSED, ids=range(len(REFUSED)))
def test_malformed_document_is_refused(raw: bytes, says: str) -> None:
    limit = 100_000 if says == "larger than" else 1_000_000
    with pytest.raises(strict_json.MalformedJsonError) as caught:
        strict_json.loads(raw, max_bytes=limit)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [{}, {"a": [1, None, True, "é"]}, [], "x", -3])
def test_what_is_written_is_read_back(value: object) -> None:
    assert strict_json.loads(strict_json.dumps(value), max_bytes=1000) == value


def test_tolerant_reader_would_have_taken_last_of_two_keys() -> None:
    assert json.loads(b'{"a":1,"a":2}') == {"a": 2}


def test_model_names_place_of_fault() -> None:
    class Inner(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid", strict=True)
        n: int

    class Outer(pydantic.BaseModel):
        inner: Inner

    with pytest.raises(strict_json.MalformedJsonError, match=r"^`inner\.n`: input should be a valid integer$"):
        strict_json.validate(Outer, {"inner": {"n": "1"}})
    with pytest.raises(strict_json.MalformedJsonError, match=r"`inner\.m`"):
        strict_json.validate(Outer, {"inner": {"n": 1, "m": 2}})


def test_first_of_several_faults_is_told_and_fault_of_whole_is_documents() -> None:
    class Pair(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid", strict=True)
        a: int
        b: int

        @pydantic.model_validator(mode="after")
        def _different(self) -> Pair:
            if self.a == self.b:
                raise ValueError("both are one")
            return self

    with pytest.raises(strict_json.MalformedJsonError, match=r"^`a`: "):
        strict_json.validate(Pair, {"a": "x", "b": "y"})
    with pytest.raises(strict_json.MalformedJsonError, match=r"^`document`: value error, both are one$"):
        strict_json.validate(Pair, {"a": 1, "b": 1})


def test_what_json_has_no_word_for_is_not_written() -> None:
    assert strict_json.dumps({"b": "é", "a": 1}) == b'{"a":1,"b":"\\u00e9"}'
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            strict_json.dumps(value)
