"""The one door from a string to the text of a ruleset."""

from __future__ import annotations

import pytest

from policy.compile.network import quoting


@pytest.mark.parametrize("word", ["a", "x4", "agent0", "a4_0123456789abcdef", "refused_tcp", "a" * 32])
def test_word_is_itself(word: str) -> None:
    assert quoting.name(word) == word
    assert quoting.quoted(word) == f'"{word}"'


@pytest.mark.parametrize(
    "text", ["", "4a", "_a", "A", "a-b", "a b", 'a"', "a;b", "a\n", "a{", "a\\", "á", "a*", "a" * 33, "٤a", "aſ"]
)
def test_whatever_could_end_word_is_refused(text: str) -> None:
    for door in (quoting.name, quoting.quoted):
        with pytest.raises(ValueError, match="a name of the ruleset"):
            door(text)


def test_digest_is_over_parts_and_where_they_end() -> None:
    assert quoting.digest("a", "b") == quoting.digest("a", "b")
    different = [("a", "b"), ("ab",), ("ab", ""), ("", "ab"), ("b", "a"), ("a", "b", ""), ("a", "1:b"), ("a1:b",)]
    assert len({quoting.digest(*parts) for parts in different}) == len(different)
    assert len(quoting.digest("a")) == 16


@pytest.mark.parametrize(
    ("point", "text"),
    [
        (0, "0.0.0.0"),
        (2**32 - 1, "255.255.255.255"),
        (0x0A000001, "10.0.0.1"),
        (2**33, "::"),
        (2**33 + 1, "::1"),
        (2**33 + 2**128 - 1, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ],
)
def test_address_is_printed_from_its_number(point: int, text: str) -> None:
    assert quoting.address(point) == text
    assert quoting.elements(((point, point),)) == text


def test_spans_and_ports() -> None:
    assert quoting.elements(((1, 2), (4, 4))) == "0.0.0.1-0.0.0.2, 0.0.0.4"
    assert quoting.ports(((80, 80), (8000, 8010))) == "{ 80, 8000-8010 }"
