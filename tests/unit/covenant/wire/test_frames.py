"""Check frames: the bytes give the same frames in any pieces, and a frame that is too long is refused at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.wire import frames
from policy import errors

PAYLOADS = st.lists(st.binary(max_size=50), max_size=20)


@given(PAYLOADS, st.lists(st.integers(1, 40), min_size=1))
def test_frames_come_whole_and_in_order_however_they_are_cut(payloads: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(map(frames.encode, payloads))
    splitter, found, place, turn = frames.Splitter(), [], 0, 0
    while place < len(stream):
        size = sizes[turn % len(sizes)]
        splitter.feed(stream[place : place + size])
        place, turn = place + size, turn + 1
        while (one := splitter.next()) is not None:
            found.append(one)
    assert found == payloads
    assert len(splitter) == 0


def test_wanted_says_how_long_frame_will_be() -> None:
    splitter = frames.Splitter()
    splitter.feed(b"\0\0\0")
    assert (splitter.wanted(), splitter.next()) == (0, None)
    splitter.feed(b"\x05ab")
    assert (splitter.wanted(), splitter.next(), len(splitter)) == (9, None, 6)
    splitter.feed(b"cde")
    assert (splitter.next(), splitter.wanted()) == (b"abcde", 0)


def test_frame_too_long_is_refused_by_its_head() -> None:
    splitter = frames.Splitter(most=10)
    splitter.feed((11).to_bytes(4, "big"))
    with pytest.raises(errors.FrameError, match="11 bytes; 10 is the most"):
        splitter.next()
    splitter.most = 11
    assert splitter.next() is None


def test_longest_frame_is_8_mib() -> None:
    longest = bytes(frames.MAX_BYTES)
    assert frames.length(frames.encode(longest)[:4]) == 8 * 1024 * 1024
    with pytest.raises(errors.FrameError):
        frames.encode(longest + b"x")
    with pytest.raises(errors.FrameError):
        frames.length((frames.MAX_BYTES + 1).to_bytes(4, "big"))
