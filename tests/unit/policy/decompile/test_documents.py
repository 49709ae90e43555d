"""The JSON artefacts, read closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from policy import errors
from policy.decompile import config, documents
from policy.decompile.network import gates


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", b"{}\n\n", b" {}\n", b"{ }\n", b'{"b":1,"a":2}\n', b'{"a":1,"a":1}\n', b'{"a":1.0}',
        b"nul\n",
        b'{"a":NaN}\n', b'{"a":Infinity}\n', b'{"a":"\xc3\xa9"}\n', b'{"a":"\\u0061"}\n', b"\xef\xbb\xbf{}\n",
        b'{"a":01}\n', b'{"a":1.50}\n',
        b"[" * 100_000 + b"]" * 100_000 + b"\n", b"9" * 5000 + b"\n", b'{"a":1}\n\x00', b"\xff\n", b"[1,]\n",
    ],
)  # fmt: skip
def test_any_other_spelling_is_refused(raw: bytes) -> None:
    with pytest.raises(errors.ArtefactError) as found:
        documents.load({"x.json": raw}, "x.json")
    assert found.value.where == "x.json"


def test_one_spelling_is_read() -> None:
    value = {"a": [1, -2, True, None, "\u00e9\n"], "b": {}}
    assert documents.load({"x.json": documents.dumps(value)}, "x.json") == value


def test_what_is_missing_or_too_large_is_refused() -> None:
    with pytest.raises(errors.ArtefactError, match="is missing"):
        documents.load({}, "x.json")
    with pytest.raises(errors.ArtefactError, match="too large"):
        documents.raw({"x": b"0" * (documents.MAX_BYTES + 1)}, "x")


REFUSED: list[Callable[[], Any]] = [
    lambda: documents.closed([], "x", {}),
    lambda: documents.closed({}, "x", {"a": int}),
    lambda: documents.closed({"a": 1, "b": 1}, "x", {"a": int}),
    lambda: documents.closed({"a": True}, "x", {"a": int}),
    lambda: documents.closed({"a": 1}, "x", {"a": bool}),
    lambda: documents.closed({"a": "1"}, "x", {"a": documents.OPTIONAL_INT}),
    lambda: documents.listed("ab", "x", str),
    lambda: documents.listed([1, True], "x", int),
    lambda: documents.names(["b", "a"], "x"),
    lambda: documents.names(["a", "a"], "x"),
    lambda: documents.names([""], "x"),
    lambda: documents.fixed(1, "x", True),
    lambda: documents.fixed([1.0], "x", [1]),
    lambda: documents.whole(-1, "x"),
    lambda: documents.whole(2**63, "x"),
    lambda: documents.whole(True, "x"),
    lambda: documents.whole("1", "x"),
    lambda: documents.whole(4, "x", most=3),
    lambda: documents.one_of(1, "x", ("1",)),
    lambda: documents.one_of("c", "x", ("a", "b")),
    lambda: config.digest("a" * 63, "x"),
    lambda: config.digest("A" * 64, "x"),
    lambda: config.digest("a" * 31 + "g" + "a" * 32, "x"),
    lambda: gates.ports([], "x"),
    lambda: gates.ports([[80, 80], [81, 90]], "x"),
    lambda: gates.ports([[90, 80]], "x"),
    lambda: gates.ports([[80, 65536]], "x"),
    lambda: gates.ports([[-1, 80]], "x"),
    lambda: gates.ports([[80]], "x"),
    lambda: gates.ports([[80, True]], "x"),
    lambda: gates.ports([80], "x"),
    lambda: gates.pattern_of("*.", "x"),
    lambda: gates.pattern_of("Example.com", "x"),
]


@pytest.mark.parametrize("read", REFUSED)
def test_part_of_another_form_is_refused_with_its_place(read: Callable[[], Any]) -> None:
    with pytest.raises(errors.ArtefactError) as found:
        read()
    assert found.value.where == "x"


def test_part_of_its_form_is_given_back() -> None:
    assert documents.closed({"a": None}, "x", {"a": documents.OPTIONAL_INT}) == {"a": None}
    assert documents.whole(3, "x", least=3, most=3) == 3
    assert documents.names(["a", "b"], "x") == ["a", "b"]
    assert documents.one_of("a", "x", ("a", "b")) == "a"
    assert gates.ports([[0, 0], [2, 65535]], "x") == ((0, 0), (2, 65535))
    assert gates.pattern_of("*", "x") == "*"
    assert config.digest("0f" * 32, "x") == "0f" * 32


def test_what_is_shown_is_printable_short_and_in_one_pair_of_backticks() -> None:
    for value in ("`\x1b[31m\u202e\n", "x" * 1000, {"`": ["`"] * 100}, 10**100, None):
        shown = documents.shown(value)
        assert shown.isprintable()
        assert shown.isascii()
        assert shown[0] == shown[-1] == "`"
        assert shown.count("`") == 2
        assert len(shown) <= 66
