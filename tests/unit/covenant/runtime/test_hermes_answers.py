"""Answers of a Hermes API: what is no object, or too many values, is an error and is not parsed."""

from __future__ import annotations

import json

import pytest

from covenant.runtime import hermes_api
from policy import errors, json_bounds

MOST = json_bounds.DOCUMENT_VALUES


def listed(count: int) -> bytes:
    """An object with so many values, itself and its list counted."""
    return b'{"a":[' + b",".join([b"0"] * (count - 2)) + b"]}"


def test_answer_of_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(hermes_api.json_object(listed(MOST))["a"]) == MOST - 2, "control"
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(errors.HermesError, match=f"more than {MOST} values"):
        hermes_api.json_object(listed(MOST + 1))


def test_text_of_brackets_is_one_value() -> None:
    text = "[{," * MOST
    assert hermes_api.json_object(json.dumps({"text": text}).encode()) == {"text": text}


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"a":"\\ud800"}'])
def test_answer_no_object_is_error(raw: bytes) -> None:
    with pytest.raises(errors.HermesError, match="no JSON object"):
        hermes_api.json_object(raw)
