"""Write and compare texts of a manifest: TOML values, distances of names, and texts that say nothing."""

from __future__ import annotations

import tomllib

import pytest
from pydantic_core import PydanticCustomError

from policy.manifest import text


@pytest.mark.parametrize("value", ["", "a", '"\\', "a\x7f\x7fb", "\x00\n\t\u2028", "\u00e9\U0001f600", 1, True, False])
def test_value_is_read_from_toml_as_it_was(value: str | int) -> None:
    read = tomllib.loads(f"a = {text.toml(value)}")["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        ("", "", 0),
        ("a", "", 1),
        ("", "ab", 2),
        ("abc", "abc", 0),
        ("abc", "ABC", 0),
        ("abc", "acb", 1),
        ("abc", "ab", 1),
        ("ab", "abc", 1),
        ("abc", "abd", 1),
        ("ca", "abc", 2),
        ("b", "ab", 1),
        ("bc", "abc", 1),
        ("c", "abc", 2),
        ("kitten", "sitting", 3),
        ("read", "raed", 1),
        ("a", "bcdefgh", 7),
        ("abcdefgh", "x", 8),
    ],
)
def test_distance_counts_changes_and_swaps(a: str, b: str, steps: int) -> None:
    assert text.distance(a, b) == text.distance(b, a) == steps


@pytest.mark.parametrize("value", ["", " ", "  \u00a0"])
def test_text_of_spaces_is_empty(value: str) -> None:
    with pytest.raises(PydanticCustomError):
        text.plain(value)
    assert text.plain("a b") == "a b"
