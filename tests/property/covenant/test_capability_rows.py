"""A plain line of a grant is read without reading it as JSON, and says the same: nothing more, nothing else."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from covenant.stores.capabilities import rows
from covenant.stores.capabilities.interface import Grant
from policy.capabilities.token import Token

KEY = "3wpYnGqceZ8DzN3guiTd9rrYkWTwTHCChBSuo6cvkXTG"
SIGNATURE = "4c8YE8hLZwfhA3x9fuNFRNgaNyuCQipDDiDfAcaXZKPhab54xsczRLTtNfLWhQDL7iMcWqTrsxS2wVwsgz1bxQBJ"
TEXTS = st.sampled_from(
    [KEY, SIGNATURE, "a@b", "tool.call.echo", "", "é", 'a"b', "a\\b", "\x00", "\x7f", " "]
) | st.text(max_size=6)
NUMBERS = st.sampled_from([0, 1, 2**53, 2**64 - 1, 2**64, -1, 10**19, 10**25]) | st.integers(0, 2**64 - 1)
ANYTHING = st.none() | st.booleans() | st.floats() | NUMBERS | TEXTS
SCOPES: st.SearchStrategy[Any] = st.sampled_from(
    [
        {},
        {"version": 1, "max_uses": 3},
        {"version": 1, "parent_b58": SIGNATURE},
        [],
        None,
        1.5,
        {"granted_by": {"display": "a@b", "pubkey": KEY}, "expires_at": None},
        {"a": "x" * 600},
    ]
) | st.recursive(ANYTHING, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


def told(grant: Grant) -> tuple[Any, ...]:
    token = grant.token
    # JSON tells 1 from 1.0 and from true, which Python's equality does not.
    return (
        *(token.subject, token.action, json.dumps(token.scope), token.granted_by, token.expires_at),
        *(grant.signature, grant.subject_display, grant.granted_by_display, grant.granted_at_ms, grant.generation),
        *(grant.parent, grant.max_uses),
    )


def agrees(line: bytes) -> bool:
    """Whether both ways of reading a line say the same; what that is."""
    try:
        slow = rows._read_any(line)
    except rows.UnreadableError:
        slow = None
    try:
        fast = rows.read_granted(line)
    except rows.UnreadableError:
        fast = None
    assert (slow is None) == (fast is None), line
    assert slow is None or fast is None or told(slow) == told(fast)
    return fast is not None


GRANTS = st.builds(
    lambda subject, action, scope, by, ends, *rest: Grant(Token(subject, action, scope, by, ends), *rest),
    *(TEXTS, TEXTS, SCOPES, TEXTS, st.none() | NUMBERS, TEXTS, TEXTS, TEXTS, NUMBERS, st.just(0) | NUMBERS),
)


@given(GRANTS)
def test_line_as_it_is_written_is_read_alike(grant: Grant) -> None:
    try:
        line = rows.granted(grant)
    except ValueError:  # a scope with NaN, or half a character, has no line
        return
    agrees(line)


def test_plain_grant_is_read_without_its_json() -> None:
    grant = Grant(Token(KEY, "memory.read", {"version": 1}, KEY, 7), SIGNATURE, "a@b", "c@d", 5, 2)
    line = rows.granted(grant)
    assert rows._PLAIN.fullmatch(line)
    assert told(rows.read_granted(line)) == told(grant)


# Pieces of a line, so that keys stand twice, in another order, where none belong, or half.
PIECES = st.sampled_from(
    [
        b'{"capability":{"subject":{"display":"a@b","pubkey":"k"}',
        b'{"capability":{"action":"x","subject":{"display":"a@b","pubkey":"k"}',
        b',"action":"x"',
        b',"scope":{}',
        b',"scope":{},"scope":{"version":1}',
        b',"scope": {} ',
        b',"scope":{"a":1,"a":2}',
        b',"scope":{"n":1e999}',
        b',"scope":NaN',
        b',"scope":"\xff"',
        b',"scope":{},"note":1',
        b',"scope":' + b"[" * 31 + b"]" * 31,
        b',"scope":' + b"[" * 63 + b"]" * 63,
        b',"granted_by":{"display":"a@b","pubkey":"k"}',
        b',"granted_by":{"display":"a@b","pubkey":"k","pubkey":"other"}',
        b',"expires_at":null},"signature":"s"',
        b',"expires_at":007},"signature":"s"',
        b',"expires_at":18446744073709551616},"signature":"s"',
        b',"expires_at":null},"granted_by":{"display":"a@b","pubkey":"k"},"expires_at":null},"signature":"s"',
        b',"granted_at":0',
        b',"generation":1',
        b',"generation":1,"generation":2',
        b"}",
        b"} ",
        b"}}",
        b"",
        b"\\",
    ]
)
WHOLE = st.tuples(
    *(
        st.sampled_from([piece, *others])
        for piece, *others in (
            (
                b'{"capability":{"subject":{"display":"a@b","pubkey":"k"}',
                b'{"capability":{"subject":{"display":"a","x":1',
            ),
            (b',"action":"x"', b',"action":"\\u0078"', b',"action":"x","action":"y"'),
        )
    ),
    PIECES,
    st.just(b',"granted_by":{"display":"a@b","pubkey":"k"}') | PIECES,
    st.just(b',"expires_at":null},"signature":"s"') | PIECES,
    st.just(b',"granted_at":0') | PIECES,
    st.just(b"") | PIECES,
    st.just(b"}") | PIECES,
)


@settings(max_examples=500)
@given(WHOLE | st.lists(PIECES, max_size=9).map(tuple))
def test_no_line_says_more_to_one_reader_than_to_other(pieces: tuple[bytes, ...]) -> None:
    agrees(b"".join(pieces))


def test_pieces_do_make_grants() -> None:
    ends = b',"granted_by":{"display":"a@b","pubkey":"k"},"expires_at":null},"signature":"s","granted_at":0}'
    start = b'{"capability":{"subject":{"display":"a@b","pubkey":"k"},"action":"x","scope":'
    assert agrees(start + b"{}" + ends)
    assert agrees(start + b'{},"note":1' + ends)
    assert agrees(start + b" [1] " + ends)
    assert agrees(start + b"[" * 31 + b"]" * 31 + ends)
    assert not agrees(start + b"[" * 63 + b"]" * 63 + ends)
    assert not agrees(start + b'{"a":1,"a":2}' + ends)
    assert not agrees(start + b'{},"scope":[]' + ends)
