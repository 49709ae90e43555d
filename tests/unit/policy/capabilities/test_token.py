"""The canonical bytes of a token, by vectors that were put together by hand from version 1's rule."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import base58
from policy.capabilities.token import MalformedTokenError, Token, canonical_scope, normal_scope, parse

GRANTOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
GRANTOR_KEY = GRANTOR.public_key().public_bytes_raw()
SUBJECT_KEY = Ed25519PrivateKey.from_private_bytes(b"\x2a" * 32).public_key().public_bytes_raw()
GRANTOR_B58 = base58.encode(GRANTOR_KEY)
SUBJECT_B58 = base58.encode(SUBJECT_KEY)

# Over the first vector: Ed25519 has one signature for a key and a message (RFC 8032).
SIGNATURE = "4dgNnUpweaK1hUstPBduZBLNZa8mNNUt2X9KS3bnjw7LdQSCaeK7E8pDykLNMeCijySUYQkLSh27qazxJJpTwuLv"

UNUSUAL = b'{"tiers":["working"],"version":1,"\xe2\x82\xac":1e+21,"\xf0\x9f\x98\x80":"\xc3\xa9\\n"}'


def token(scope: Any = None, *, action: str = "memory.write", expires_at: int | None = None) -> Token:
    return Token(SUBJECT_B58, action, {} if scope is None else scope, GRANTOR_B58, expires_at)


def test_keys_of_vectors() -> None:
    assert GRANTOR_KEY.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert SUBJECT_KEY.hex() == "197f6b23e16c8532c6abc838facd5ea789be0c76b2920334039bfa8b3d368d61"


@pytest.mark.parametrize(
    ("made", "middle", "end"),
    [
        (token(), b"\0\0\0\x0cmemory.write\0\0\0\x02{}", "000000000000000000"),
        (
            token(action="tool.call.echo", expires_at=1_790_000_000_000),
            b"\0\0\0\x0etool.call.echo\0\0\0\x02{}",
            "01000001a0c4506c00",
        ),
        # RFC 8785: keys by UTF-16 units, the shortest number, no escape that is not needed.
        (
            token({"version": 1.0, "\u20ac": 1e21, "\U0001f600": "\u00e9\n", "tiers": ["working"]}),
            b"\0\0\0\x0cmemory.write\0\0\0\x3b" + UNUSUAL,
            "000000000000000000",
        ),
        (token(expires_at=0), b"\0\0\0\x0cmemory.write\0\0\0\x02{}", "010000000000000000"),
        (token(expires_at=2**64 - 1), b"\0\0\0\x0cmemory.write\0\0\0\x02{}", "01ffffffffffffffff"),
    ],
)
def test_bytes_and_their_reading(made: Token, middle: bytes, end: str) -> None:
    expected = SUBJECT_KEY + middle + GRANTOR_KEY + bytes.fromhex(end)
    assert made.message().hex() == expected.hex()
    assert parse(expected) == Token(
        made.subject, made.action, normal_scope(made.scope), made.granted_by, made.expires_at
    )


def test_signature_as_version_1_would_make_it() -> None:
    signature = base58.encode(GRANTOR.sign(token().message()))
    assert signature == SIGNATURE
    assert token().verifies(signature)
    for other in (token(action="memory.read"), token({"version": 1}), token(expires_at=0)):
        assert not other.verifies(signature)
    assert not Token(GRANTOR_B58, "memory.write", {}, GRANTOR_B58, None).verifies(signature)


@pytest.mark.parametrize("signature", ["", "1" * 64, "0", "é", base58.encode(b"\1" * 63), "z" * 200])
def test_what_is_no_signature(signature: str) -> None:
    assert not token().verifies(signature)


@pytest.mark.parametrize(
    "made",
    [
        token(action="memory"),
        token(action="memory."),
        token(action="memory.wríte"),
        token(action="memory.write\n"),
        token(action="memory.\ud800"),
        token(action="memory." + "x" * 600),
        token(expires_at=2**64),
        token(expires_at=-1),
        token(expires_at=True),
        token({"version": float("nan")}),
        token({"version": 2**53}),
        token({"a": "\ud800"}),
        token({"a": "x" * 70_000}),
        Token("11111111111111111111111111111111", "memory.write", {}, GRANTOR_B58, None),
        Token(base58.encode(b"\1" + bytes(31)), "memory.write", {}, GRANTOR_B58, None),
        Token("short", "memory.write", {}, GRANTOR_B58, None),
    ],
)
def test_what_has_no_bytes(made: Token) -> None:
    with pytest.raises(MalformedTokenError):
        made.message()
    assert not made.verifies("1" * 64)


def test_end_is_last_moment() -> None:
    assert not token(expires_at=5).expired(5)
    assert token(expires_at=5).expired(6)
    assert not token().expired(2**64)


@pytest.mark.parametrize("cut", [0, 31, 35, 36, 40, 60, -1])
def test_cut_bytes_are_nobodys(cut: int) -> None:
    assert parse(token().message()[:cut]) is None
    assert parse(token().message() + b"\0") is None


def test_two_unicode_forms_are_two_scopes() -> None:
    assert canonical_scope("\u00e9") != canonical_scope("e\u0301")


def test_deep_scopes_are_refused_and_not_crash() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MalformedTokenError):
        canonical_scope(deep)
    while deep:  # unwound by hand: freeing it at once would recurse as deep
        deep = deep.pop()
