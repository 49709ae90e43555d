"""Check that no edited log verifies, and that the refusal always names the difference."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from policy.audit_log import chain, events, verify

KEY = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}


def log(count: int, tag: str = "") -> tuple[bytes, bytes, bytes]:
    lines, anchors, head = [], [], chain.Head()
    for i in range(count):
        fields = {"run_id": f"r{i}", "agent_id": "a", "operator": None, "state": tag, "reason": ""}
        line = events.event_line("run_state", fields, event_id=f"e{i}{tag}", issuer=ISSUER, now_ms=i)
        anchor, head = head.advance(line, event_id=f"e{i}{tag}", timestamp_ms=i)
        lines.append(line + b"\n")
        anchors.append(anchor + b"\n")
    return (
        b"".join(lines),
        b"".join(anchors),
        chain.sign_head(head, KEY).rjust(chain.slot_offset(head) + chain.SLOT_BYTES),
    )


WHOLE = log(7)
FORGED = log(7, "forged")
LINES = [[line + b"\n" for line in part.splitlines()] for part in WHOLE[:2]]


@st.composite
def orders(draw: st.DrawFn, part: int) -> bytes:
    """Draw the file's lines in any order, some of them missing, repeated or forged."""
    pool = LINES[part] + [line + b"\n" for line in FORGED[part].splitlines()]
    return b"".join(draw(st.lists(st.sampled_from(pool), max_size=10)))


@given(orders(0) | st.just(WHOLE[0]), orders(1) | st.just(WHOLE[1]))
def test_only_log_that_was_signed_verifies(events_file: bytes, chain_file: bytes) -> None:
    report = verify.verify(events_file, chain_file, WHOLE[2], KEY.public_key())
    assert report.valid == ((events_file, chain_file) == WHOLE[:2])
    assert report.valid == (not report.failures)


@given(st.integers(0, 2), st.integers(0, 10_000), st.integers(1, 255))
def test_no_flipped_bits_in_line_verify(which: int, at: int, mask: int) -> None:
    files = [bytearray(part) for part in WHOLE]
    used = len(files[which]) if which < 2 else len(WHOLE[2].rstrip())
    at = used - 1 - at % used if which == 2 else at % used
    if which == 2 and WHOLE[2][at : at + 1] == b" ":
        return
    files[which][at] ^= mask
    report = verify.verify(bytes(files[0]), bytes(files[1]), bytes(files[2]), KEY.public_key())
    assert not report.valid


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(0, 8))
def test_differences_are_none_exactly_when_equal_and_name_real_places(have: list[int], size: int) -> None:
    want = list(range(size))
    found = verify.differences(have, want)
    assert (found == []) == (have == want)
    for change, index in found:
        assert 0 <= index < (len(have) if change == "inserted" else len(want))
    lost = {index for change, index in found if change in ("removed", "truncated", "changed")}
    assert lost == {value for value in want if value not in have}


@given(st.integers(0, 200))
def test_marks_stay_few_and_are_counts_with_low_bits_cleared(count: int) -> None:
    head = chain.Head()
    for i in range(count):
        _, head = head.advance(b"%d" % i, event_id="e", timestamp_ms=0)
    counts = [mark[0] for mark in head.marks]
    assert len(counts) == count.bit_count()
    assert counts == sorted(counts, reverse=True)
    assert all(mark[1] == chain.fold([chain.event_hash(b"%d" % i) for i in range(mark[0])]) for mark in head.marks)
