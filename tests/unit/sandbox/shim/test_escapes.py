"""Check the filter of escape sequences: what is taken out, what passes, across any cut into chunks."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.shim.escapes import EscapeFilter

CAN = b"\x18"
DROPPED = [
    b"\x1b]52;c;aGk=\x07",
    b"\x1b]52;c;?\x07",
    b"\x1b]52\x07",
    b"\x1b]0052;;eA==\x07",
    b"\x1b]5\x002;c;eA==\x07",
    b"\x1b]5522;type=read\x07",
    b"\x9d52;c;eA==\x9c",
    b"\xc2\x9d52;c;eA==\x07",
    b"\x1b[21t",
    b"\x1b[20t",
    b"\x1b[0021;5t",
    b"\x1b[2\x001t",
    b"\x9b21t",
    b"\xc2\x9b21t",
    b"\x1b\x00[21t",
    b"\x1b\x7f]52;c;eA==\x07",
    b"\x1b\x7f[21t",
    b"\x1b[" + b"0" * 600 + b"21t",
    b"\x1b]" + b"0" * 600 + b"52;c;eA==\x07",
    b"\x1b]4294967348;c;eA==\x07",  # 2**32 + 52, which tmux 3.3a reads as 52
    b"\x1b[4294967317t",
    b"\x1b] 52;c;eA==\x07",  # atoi(3) reads over a space or a sign
    b"\x1b]+52;c;eA==\x07",
    b"\x1b]-4294967244;c;eA==\x07",
    b"\x1b]1337;CopyToClipboard=;eA==\x07",
    b"\x1b]50;CopyToClipboard=\x07",
    b'\x1b]51;["call","Tapi_x",[]]\x07',
]
PASSING = [
    b"",
    b"plain text\r\n",
    "gr\u00fc\u00dfe \u775d \u26a0\ufe0f \U0001f4dd \u009b".encode()[:-2],
    b"\x1b]0;a title\x07",
    b"\x1b]2;a title\x1b\\",
    b"\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\",
    b"\x1b]521;x\x07",
    b"\x1b]5;2;x\x07",
    b"\x1b[31mred\x1b[0m\x1b[2J\x1b[10;20H",
    b"\x1b[14t\x1b[18t\x1b[22;0t\x1b[23;0t\x1b[>21t\x1b[8;21;20t",
    b"\x1b[?1049h\x1b[?2004h\x1b(B\x1b=\x1b>",
    b"\x1bP1$r0m\x1b\\",
    b"\x1bP0;1;0q#0;2;0;0;0~-\x1b\\\x1bP+q544e\x1b\\\x1bP$qm\x1b\\\x1bP=1s\x1b\\",
    b"\x1b]104\x1b\\\x1b]112\x07\x1b]l title\x1b\\\x1b%G",
    b"52;c;eA==\x07 [21t ]52;",
    b"\xff\xfe\xc3\x28\xe2\x82",
]
PIECES = st.one_of(
    st.sampled_from(
        [*DROPPED, *PASSING, b"\x1b", b"]", b"[", b"52", b";", b"21", b"t", b"\x07", b"\x9d", b"\xc2", CAN]
    ),
    st.binary(max_size=6),
)
QUICK = settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])


def filtered(*chunks: bytes) -> bytes:
    one = EscapeFilter()
    return b"".join([*map(one.feed, chunks), one.flush()])


@pytest.mark.parametrize("sequence", DROPPED)
def test_sequence_is_taken_out_alone(sequence: bytes) -> None:
    assert filtered(b"before" + sequence + b"after") == b"before" + CAN + b"after"
    assert filtered(*(bytes([byte]) for byte in b"before" + sequence + b"after")) == b"before" + CAN + b"after"


def test_clipboard_that_ends_with_st_leaves_st() -> None:
    assert filtered(b"a\x1b]52;c;eA==\x1b\\b") == b"a" + CAN + b"\x1b\\b"


@pytest.mark.parametrize("sequence", [b"\x9d52;c;eA==\x07", b"\x9b21t"])
def test_one_byte_introducer_after_esc_counts(sequence: bytes) -> None:
    """An introducer of one byte begins a sequence in every state of a terminal (vt100.net's parser)."""
    assert filtered(b"\x1b" + sequence + b"after") == CAN + CAN + b"after"


def test_esc_with_many_controls_is_taken_out() -> None:
    assert b"\x1b" not in filtered(b"\x1b" + b"\0" * 600 + b"]52;c;eA==\x07")


@pytest.mark.parametrize("text", ["\u00dd52;c;eA==\a", "\u00db21t", "[\u00b2\u00b1t", "[21\u00f4"])
def test_upper_half_is_no_part_of_a_sequence(text: str) -> None:
    """In a sequence xterm and vt100.net's parser read A0 to FF as 20 to 7F."""
    shown = filtered(b"\x1b" + text.encode())
    assert b"\x1b" not in shown
    assert shown.startswith(CAN)


@pytest.mark.parametrize("held", [b"\x1b", b"\x1b]", b"\x1b]52", b"\x1b[2", b"\x9d5", b"\xc2\x9b2"])
def test_sequence_cut_by_the_end_is_taken_out(held: bytes) -> None:
    """The next output on the terminal, of another session or of stderr, would finish it."""
    assert filtered(b"shown" + held) == b"shown" + CAN


def test_clipboard_through_multiplexer_is_taken_out() -> None:
    shown = filtered(b"\x1bPtmux;\x1b\x1b]52;c;eA==\x07\x1b\\")
    assert b"52" not in shown


@pytest.mark.parametrize("data", PASSING)
def test_everything_else_passes(data: bytes) -> None:
    assert filtered(data) == data
    assert filtered(*(bytes([byte]) for byte in data)) == data


def test_taken_out_sequence_joins_nothing() -> None:
    """Without the CAN the bytes around the dropped title report would be a clipboard sequence."""
    shown = filtered(b"\x1b]5\x1b[21t2;c;eA==\x07")
    assert shown == CAN + CAN + b"2;c;eA==\x07"


@pytest.mark.parametrize(
    "begun",
    [
        b"\x1bP\x1b\x1b\\\x1bP",  # GNU screen hands each DCS on as it is: an ESC alone, then the rest
        b"\x1bPtmux;\x1b\x1b\x1b\\\x1bPtmux;",
        b"\x1bPq\x1b\x1b\\",
        b"\x1b]0;x\x1b\x1b\\",
        b"\x1bPq\x1b]5\x1b\\",
        b"\x1b]2;\x1b]5\x1b\x1b\\",
        b"\x1b]2;\x1b[2\x18",
        b"\x90q\x1b\x00\x1b\\",
    ],
)
def test_string_hands_no_half_sequence_on(begun: bytes) -> None:
    """A multiplexer hands no beginning of a sequence to the terminal around it, which the text behind could finish."""
    shown = filtered(begun + b"]52;c;eA==\x07")
    strings = re.findall(rb"\x1b[P\]](.*?)(?:\x07|\x1b\\|\x18|$)", shown, re.DOTALL)
    assert not any(b"\x1b" in one for one in strings), shown
    assert b"\x1b\x1b" not in shown
    assert not re.search(rb"\x1bP(?!q)", shown)


@pytest.mark.parametrize(
    "sequence",
    [
        b"\x1bP1;1|17/6c73\x1b\\",  # DECUDK: F6 types ls
        b"\x1bP@kitty-cmd{}\x1b\\",
        b"\xc2\x90tmux;x\x1b\\",
        b"\x1b%@\xe1\x80\x9d52;c;eA==\x07",  # the last byte of the character is OSC in ISO 8859-1
        b"\xe0\x82\x9d52;c;eA==\x07",  # U+009D, longer than it has to be
    ],
)
def test_other_ways_out_are_taken_out(sequence: bytes) -> None:
    shown = filtered(b"before" + sequence + b"after")
    assert not re.search(rb"\x1b[P%]|\x90|\xe0\x82\x9d", shown), shown
    assert shown.startswith(b"before")
    assert shown.endswith(b"after")


def test_unfinished_clipboard_takes_constant_memory() -> None:
    one = EscapeFilter()
    assert one.feed(b"\x1b]52;c;") == CAN
    for _ in range(64):
        assert one.feed(b"A" * 65536) == b""
    assert one.feed(b"\x07shown") == b"shown"


@QUICK
@given(st.lists(PIECES, max_size=12))
def test_cut_into_chunks_changes_nothing(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert filtered(*pieces) == filtered(whole)
    assert filtered(*(bytes([byte]) for byte in whole)) == filtered(whole)


@QUICK
@given(st.lists(PIECES, max_size=12))
def test_output_is_shorter_and_harmless(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    shown = filtered(whole)
    assert len(shown) <= len(whole)
    assert filtered(shown) == shown, "nothing is left to take out"
    assert not re.search(rb"\x1b\](?:0*52|0*5522)[;\x07]", shown)
    assert b"\x1b\x1b" not in shown
    assert not re.search(rb"\x1b\[0*2[01](?:;[0-9;]*)?t", shown)


@QUICK
@given(st.binary(max_size=300).filter(lambda data: not re.search(rb"[\x1b\x90\x9b\x9d]", data)))
def test_output_without_introducers_passes_whole(data: bytes) -> None:
    assert filtered(data) == data
