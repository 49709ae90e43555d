"""The earliest clock wins and is named; base58 is the one that version 1 writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import base58
from policy.clocks import Deadline, effective_deadline

NOW = 1_000_000


@pytest.mark.parametrize(
    ("clocks", "expected"),
    [
        ({}, Deadline(30_000, "cpu_ms_per_task")),
        ({"timeout_ms": 5}, Deadline(5, "timeout")),
        ({"timeout_ms": 30_000}, Deadline(30_000, "timeout")),
        ({"ttl_seconds": 2}, Deadline(2_000, "ttl_seconds", 2_000)),
        ({"ttl_seconds": 2, "suspends": True}, Deadline(4_000, "ttl_seconds", 4_000)),
        ({"parent_deadline_ms": NOW + 7}, Deadline(7, "parent")),
        ({"expires_at_ms": NOW + 9, "ttl_seconds": 60}, Deadline(9, "expires_at", 60_000, NOW + 9)),
        ({"expires_at_ms": NOW - 9}, Deadline(0, "expires_at", None, NOW - 9)),
    ],
)
def test_earliest_clock_is_deadline(clocks: dict[str, Any], expected: Deadline) -> None:
    assert effective_deadline(now_ms=NOW, cpu_ms_per_task=30_000, **clocks) == expected


def test_base58_vectors() -> None:
    # draft-msporny-base58-03, section 5
    assert base58.encode(b"Hello World!") == "2NEpo7TZRRrLZSi2U"
    assert base58.encode(bytes.fromhex("0000287fb4cd")) == "11233QC4"


@given(st.binary(min_size=32, max_size=32))
def test_base58_round_trip(data: bytes) -> None:
    assert base58.decode(base58.encode(data), length=32) == data


@pytest.mark.parametrize("text", ["0", "O", "", "1" * 31, "1" * 33, "z" * 44, "z" * 10_000])
def test_base58_refuses_what_is_not_32_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=r"base58|substring"):
        base58.decode(text, length=32)
