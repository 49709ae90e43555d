"""Check what is kept of an agent's output for a later reader: the end of a terminal's, the beginning of stderr's."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.shim import live_lines, scrollback
from sandbox.shim.live_lines import LIVE_BYTES, LiveLines
from sandbox.shim.scrollback import SCROLLBACK_BYTES, Scrollback

_PIECES = st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\x00", b"\n")), max_size=40)
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def test_scrollback_keeps_whole_short_output() -> None:
    one = Scrollback()
    one.feed(b"first\n")
    one.feed(b"second")
    assert one.replay() == b"first\nsecond"
    assert one.since(0) == (0, b"first\nsecond")
    assert one.since(6) == (6, b"second")
    assert one.since(99) == (99, b"")


@_ANY
@given(_PIECES, st.integers(0, 2000))
def test_scrollback_is_end_of_output(pieces: list[bytes], offset: int) -> None:
    """With a small bound: what it returns are the bytes of the stream from where it says."""
    whole = b"".join(pieces)
    before = scrollback.SCROLLBACK_BYTES
    scrollback.SCROLLBACK_BYTES = 64  # type: ignore[misc]
    try:
        one = Scrollback()
        for piece in pieces:
            one.feed(piece)
        begins, kept = one.since(offset)
        assert begins == max(offset, len(whole) - 64, 0)
        assert kept == whole[begins:]
        assert whole.endswith(one.replay())
        assert len(one.replay()) <= 64
    finally:
        scrollback.SCROLLBACK_BYTES = before  # type: ignore[misc]


def test_replay_begins_with_whole_line_or_character() -> None:
    one = Scrollback()
    one.feed(b"x" * 100 + b"\n" + b"y" * (SCROLLBACK_BYTES - 60) + b"\n")
    assert one.replay() == b"y" * (SCROLLBACK_BYTES - 60) + b"\n"
    two = Scrollback()
    two.feed("ü".encode() * SCROLLBACK_BYTES + b"!")
    assert two.replay().decode() == "ü" * (SCROLLBACK_BYTES // 2 - 1) + "!"


@_ANY
@given(_PIECES)
def test_live_lines_are_whole_and_beginning(pieces: list[bytes]) -> None:
    told: list[str] = []
    before = live_lines.LIVE_BYTES
    live_lines.LIVE_BYTES = 100  # type: ignore[misc]
    try:
        one = LiveLines(lambda raw: raw.decode("latin-1"), told.append)
        for piece in pieces:
            one.feed(piece)
    finally:
        live_lines.LIVE_BYTES = before  # type: ignore[misc]
    whole, said = b"".join(pieces).decode("latin-1"), "".join(told)
    # All whole lines that fit into the bound, and nothing else.
    assert said == whole[: whole.rfind("\n", 0, 100) + 1]
    assert all(one.endswith("\n") for one in told)


def test_live_lines_stop_for_good_at_long_line() -> None:
    told: list[str] = []
    one = LiveLines(bytes.decode, told.append)
    one.feed(b"a\n" + b"x" * LIVE_BYTES)
    one.feed(b"\nb\n")
    assert told == ["a\n"]
