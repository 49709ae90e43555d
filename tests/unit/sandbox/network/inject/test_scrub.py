"""Secrets and tokens taken out of answers, in parts of any size."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.network.inject import scrub

SECRET = b'pl/ant+ed"secret-0123'


def passed(reader: scrub.Scrubber | scrub.TokenReader, data: bytes, sizes: list[int]) -> bytes:
    """All that is passed on of data in parts of these sizes."""
    out, at = b"", 0
    for size in sizes:
        out += reader.feed(data[at : at + size])
        at += size
    return out + reader.feed(data[at:]) + reader.end()


@given(st.lists(st.integers(1, 9), max_size=40), st.integers(0, 5), st.binary(max_size=12))
def test_each_form_is_hidden_in_any_parts(sizes: list[int], count: int, around: bytes) -> None:
    data = around + b"".join(form + b";" for form in scrub.forms(SECRET)) * count + around
    out = passed(scrub.Scrubber(scrub.forms(SECRET)), data, sizes)
    assert len(out) == len(data)
    assert not any(form in out for form in scrub.forms(SECRET))


@pytest.mark.parametrize(
    "written",
    [
        r"p\u002Ba/s\u0026t\u0027l\u003Cd\u003E-0123",  # System.Text.Json
        r"p+a/s\u0026t'l\u003cd\u003e-0123",  # Go, Rails
        r"p+a\/s&t'l<d>-0123",  # PHP
        r"p+a\/s\u0026t\u0027l\u003Cd\u003E-0123",  # PHP with JSON_HEX_TAG and the others
        "p+a/s&amp;t&#39;l&lt;d&gt;-0123",
        "p+a/s&amp;t&#x27;l&lt;d&gt;-0123",
        "p%2ba%2fs%26t%27l%3cd%3e-0123",
    ],
)
def test_secret_that_a_host_escapes_is_hidden(written: str) -> None:
    """A host that shows a request's header in its answer writes it as its language does."""
    data = f'{{"Authorization": "{written}"}}'
    out = passed(scrub.Scrubber(scrub.forms(b"p+a/s&t'l<d>-0123")), data.encode(), [9])
    assert out.decode() == f'{{"Authorization": "{"*" * len(written)}"}}'


@given(st.binary(max_size=5), st.binary(max_size=5))
def test_base64_around_a_secret_is_hidden(before: bytes, after: bytes) -> None:
    data = base64.b64encode(before + SECRET + after)
    out = passed(scrub.Scrubber(scrub.forms(SECRET)), data, [7])
    # At most the characters that the neighbours share with it are left: not one whole byte more of each end.
    assert out.count(b"*") >= len(SECRET) * 8 // 6 - 2


@given(st.lists(st.integers(1, 9), max_size=60), st.sampled_from(["access_token", "refresh_token", "id_token"]))
def test_json_token_is_behind_a_placeholder(sizes: list[int], key: str) -> None:
    token = "gho_0123456789abcdefghijklmnopqrstuvwxyz"
    tokens = scrub.TokenPlaceholders()
    data = json.dumps({"x": [1, "y"], key: token, "other_token": "kept", "z": '"access_token"'}).encode()
    out = passed(scrub.TokenReader(lambda one, size: tokens.hide("s", one, size), form=False), data, sizes)
    placeholder = json.loads(out)[key]
    assert len(out) == len(data)
    assert token.encode() not in out
    assert json.loads(out)["other_token"] == "kept"
    assert tokens.exchange("s", f"Bearer {placeholder}") == f"Bearer {token}"
    assert tokens.exchange("t", f"Bearer {placeholder}") == f"Bearer {placeholder}"


@given(st.lists(st.integers(1, 9), max_size=60))
def test_form_token_is_behind_a_placeholder(sizes: list[int]) -> None:
    token = "gho_0123456789abcdefghijklmnopqrstuvwxyz"
    tokens = scrub.TokenPlaceholders()
    data = f"scope=a&access_token={token}&token_type=bearer&refresh_token={token[::-1]}".encode()
    out = passed(scrub.TokenReader(lambda one, size: tokens.hide("s", one, size), form=True), data, sizes)
    assert len(out) == len(data)
    assert token.encode() not in out
    assert token[::-1].encode() not in out
    assert out.startswith(b"scope=a&access_token=covenant-")


def test_short_token_is_hidden_for_good() -> None:
    tokens = scrub.TokenPlaceholders()
    assert tokens.hide("s", "0123456789", 10) == "*" * 10
    assert tokens.known("s") == {}


def test_oldest_placeholder_is_forgotten() -> None:
    tokens = scrub.TokenPlaceholders()
    first = tokens.hide("s", "a" * 40, 40)
    for _ in range(scrub.MOST):
        tokens.hide("s", "b" * 40, 40)
    assert first not in tokens.known("s")
    assert len(tokens.known("s")) == scrub.MOST
