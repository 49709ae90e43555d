"""Check chain, head and verify: each kind of tampering is found and named, in either file and in both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import events, verify

KEY = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}
Lines = list[bytes]


def event(i: int, text: str = "") -> bytes:
    fields = {"run_id": f"r{i}", "agent_id": "a", "operator": None, "state": "s", "reason": text}
    return events.event_line("run_state", fields, event_id=f"e{i}", issuer=ISSUER, now_ms=i)


def chain_of(lines: Lines) -> tuple[Lines, audit_log_chain.Head]:
    """Return the chain that an honest writer, or a forger without the log's key, makes over these events."""
    head, anchors = audit_log_chain.Head(), []
    for line in lines:
        parsed = json.loads(line)
        anchor, head = head.advance(line, event_id=parsed["id"], timestamp_ms=parsed["timestamp_ms"])
        anchors.append(anchor)
    return anchors, head


def honest(count: int = 10) -> tuple[Lines, Lines, bytes]:
    lines = [event(i) for i in range(count)]
    anchors, head = chain_of(lines)
    return lines, anchors, head_file(chain_of(lines[:-1])[1], head)


def head_file(*heads: audit_log_chain.Head) -> bytes:
    """Return the head file after these heads were written, one after the other."""
    slots = [b" " * (audit_log_chain.SLOT_BYTES - 1) + b"\n"] * 2
    for head in heads:
        slots[head.count % 2] = audit_log_chain.sign_head(head, KEY)
    return b"".join(slots)


def check(lines: Lines, anchors: Lines, head: bytes | None) -> verify.Report:
    joined = [b"".join(line + b"\n" for line in part) for part in (lines, anchors)]
    return verify.verify(joined[0], joined[1], head, KEY.public_key())


def named(report: verify.Report) -> set[tuple[str, str | None, int | None]]:
    return {(f.file, f.change, f.index) for f in report.failures if f.change}


def changed(lines: Lines, i: int) -> Lines:
    return [*lines[:i], lines[i].replace(b'"timestamp_ms":', b'"timestamp_ms":7'), *lines[i + 1 :]]


def removed(lines: Lines, i: int) -> Lines:
    return [*lines[:i], *lines[i + 1 :]]


def swapped(lines: Lines, i: int) -> Lines:
    return [*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]]


def inserted(lines: Lines, i: int) -> Lines:
    chain = b"event_hash_hex" in lines[0]
    made = chain_of([event(99, "forged")])[0][0] if chain else event(99, "forged")
    return [*lines[:i], made, *lines[i:]]


def truncated(lines: Lines, i: int) -> Lines:
    return lines[:i]


TAMPER: dict[str, Callable[[Lines, int], Lines]] = {
    "changed": changed,
    "removed": removed,
    "swapped": swapped,
    "inserted": inserted,
    "truncated": truncated,
}


def records(change: str, i: int) -> list[int]:
    return {"swapped": [i, i + 1], "truncated": list(range(i, 10))}.get(change, [i])


def test_honest_log_verifies() -> None:
    report = check(*honest())
    assert report.valid
    assert (report.events, report.anchors, report.failures, report.notes) == (10, 10, (), ())
    assert report.root_hash_hex == json.loads(honest()[1][-1])["chain_hash_hex"]


def test_hashes_are_version_1s() -> None:
    lines, anchors, _ = honest(2)
    first, second = (json.loads(a) for a in anchors)
    assert first["event_hash_hex"] == hashlib.sha256(lines[0]).hexdigest()
    assert first["previous_hash_hex"] == "0" * 64
    joined = f"{first['chain_hash_hex']}\n{second['event_hash_hex']}"
    assert second["chain_hash_hex"] == hashlib.sha256(joined.encode()).hexdigest()
    fields = ["index", "event_id", "timestamp_ms", "event_hash_hex", "previous_hash_hex", "chain_hash_hex"]
    assert list(second) == fields
    assert (second["index"], second["event_id"], second["timestamp_ms"]) == (1, "e1", 1)


@pytest.mark.parametrize("i", [0, 4, 8])
@pytest.mark.parametrize("change", TAMPER)
def test_tampering_with_events_is_named(change: str, i: int) -> None:
    lines, anchors, head = honest()
    report = check(TAMPER[change](lines, i), anchors, head)
    assert not report.valid
    assert named(report) == {("events", change, n) for n in records(change, i)}
    kinds = {"inserted": "entry_missing", "removed": "dangling_anchors", "truncated": "dangling_anchors"}
    assert {f.kind for f in report.failures if f.change} == {kinds.get(change, "entry_mismatch")}
    if change != "inserted":
        assert {f.event_id for f in report.failures if f.change} == {f"e{n}" for n in records(change, i)}


@pytest.mark.parametrize("i", [0, 4, 8])
@pytest.mark.parametrize("change", TAMPER)
def test_tampering_with_chain_is_named(change: str, i: int) -> None:
    lines, anchors, head = honest()
    report = check(lines, TAMPER[change](anchors, i), head)
    assert not report.valid
    assert named(report) == {("chain", change, n) for n in records(change, i)}
    if change != "inserted":
        assert {f.event_id for f in report.failures if f.change} == {f"e{n}" for n in records(change, i)}


@pytest.mark.parametrize("i", [0, 4, 8])
@pytest.mark.parametrize("change", TAMPER)
def test_chain_made_anew_over_tampered_events_is_caught_by_head(change: str, i: int) -> None:
    lines, _, head = honest()
    forged = TAMPER[change](lines, i)
    report = check(forged, chain_of(forged)[0], head)
    assert not report.valid
    (failure,) = [f for f in report.failures if f.change]
    assert (failure.kind, failure.file) == ("head_mismatch", "both")
    # Same count: a hash of the end cannot tell a swap from a change, so verify reports a change. Nor can it
    # tell a record removed after the last mark from one cut off the end.
    told = {("swapped", i): "changed", ("removed", 8): "truncated"}.get((change, i), change)
    assert failure.change == told
    # The head's marks for ten records are at eight and ten.
    cut = len(forged) if told == "truncated" else None
    assert failure.index == (cut if cut is not None else 0 if i < 8 else 8)


def test_tail_cut_from_both_files_is_named_record_by_record_to_where_it_was_signed() -> None:
    lines, anchors, head = honest()
    report = check(lines[:9], anchors[:9], head)
    (failure,) = report.failures
    assert (failure.change, failure.index) == ("truncated", 9)
    assert "10 records" in failure.message


@pytest.mark.parametrize("change", ["removed", "swapped"])
def test_lines_moved_in_both_without_new_chain_are_named_exactly(change: str) -> None:
    lines, anchors, head = honest()
    report = check(TAMPER[change](lines, 4), TAMPER[change](anchors, 4), head)
    assert {("both", change, n) for n in records(change, 4)} <= named(report)


def test_event_and_its_anchor_changed_without_rest_is_named_exactly() -> None:
    lines, anchors, head = honest()
    lines[4] = event(4, "other")
    entry = json.loads(anchors[4])
    entry["event_hash_hex"] = audit_log_chain.event_hash(lines[4])
    anchors[4] = json.dumps(entry, separators=(",", ":")).encode()
    assert ("both", "changed", 4) in named(check(lines, anchors, head))


def test_records_appended_to_both_beyond_head_are_named() -> None:
    lines, _, head = honest()
    lines += [event(10), event(11)]
    report = check(lines, chain_of(lines)[0], head)
    assert named(report) == {("both", "inserted", 10), ("both", "inserted", 11)}


def test_one_field_of_anchor_that_no_hash_covers_is_still_compared() -> None:
    lines, anchors, head = honest()
    anchors[3] = anchors[3].replace(b'"e3"', b'"e4"')
    assert named(check(lines, anchors, head)) == {("chain", "changed", 3)}


def test_anchor_written_in_other_words_is_changed() -> None:
    lines, anchors, head = honest()
    anchors[3] = anchors[3].replace(b":", b": ", 1)
    assert named(check(lines, anchors, head)) == {("chain", "changed", 3)}


@pytest.mark.parametrize("byte", range(0, len(event(4)), 7))
def test_one_flipped_bit_anywhere_in_event_is_found(byte: int) -> None:
    lines, anchors, head = honest()
    line = bytearray(lines[4])
    line[byte] ^= 1
    lines[4] = bytes(line)
    report = check(lines, anchors, head)
    assert ("events", "changed", 4) in named(report)


@pytest.mark.parametrize(
    ("events_text", "chain_text"), [(b"", None), (None, b""), (b"", b"")], ids=["events", "chain", "both"]
)
def test_emptied_log_is_red(events_text: bytes | None, chain_text: bytes | None) -> None:
    lines, anchors, head = honest(3)
    report = check(lines if events_text is None else [], anchors if chain_text is None else [], head)
    assert not report.valid
    assert any(f.change == "truncated" for f in report.failures)


def test_without_head_log_is_not_green_and_files_are_still_compared() -> None:
    lines, anchors, _ = honest()
    assert [f.kind for f in check(lines, anchors, None).failures] == ["head_missing"]
    report = check(changed(lines, 4), anchors, None)
    assert {f.kind for f in report.failures} == {"head_missing", "entry_mismatch"}


def test_head_of_another_key_is_refused() -> None:
    lines, anchors, _ = honest()
    other = Ed25519PrivateKey.from_private_bytes(b"\x08" * 32)
    report = check(lines, anchors, audit_log_chain.sign_head(chain_of(lines)[1], other))
    assert [f.kind for f in report.failures] == ["head_invalid"]


@pytest.mark.parametrize("field", ["index", "chain_hash_hex", "events_bytes", "chain_bytes", "marks", "key_id"])
def test_every_field_of_head_is_signed(field: str) -> None:
    _, head = chain_of([event(0), event(1)])
    slot = audit_log_chain.sign_head(head, KEY)
    assert audit_log_chain.read_head(slot, KEY.public_key()) == head
    document = json.loads(slot)
    value = document[field]
    document[field] = value + 2 if isinstance(value, int) else [] if isinstance(value, list) else "f" * 64
    raw = json.dumps(document, separators=(",", ":")).encode()
    assert audit_log_chain.read_head(raw, KEY.public_key()) is None
    assert audit_log_chain.read_head(json.dumps({**json.loads(slot), "more": 1}).encode(), KEY.public_key()) is None


def test_newer_slot_counts_and_torn_one_gives_one_before() -> None:
    heads = [chain_of([event(i) for i in range(n)])[1] for n in (4, 5)]
    slots = [audit_log_chain.sign_head(head, KEY) for head in heads]
    assert audit_log_chain.read_head(slots[0] + slots[1], KEY.public_key()) == heads[1]
    torn = slots[1][:100].ljust(audit_log_chain.SLOT_BYTES)
    assert audit_log_chain.read_head(slots[0] + torn, KEY.public_key()) == heads[0]


@pytest.mark.parametrize("said", [10**6, True, None, "5", -7, [], 1e300])
def test_what_slot_says_of_itself_decides_nothing(said: object) -> None:
    """Neither a slot that claims to be newer but does not verify, nor a slot that claims nothing."""
    head = chain_of([event(i) for i in range(4)])[1]
    good, bad = (
        audit_log_chain.sign_head(head, KEY),
        json.dumps({"index": said}).encode().ljust(audit_log_chain.SLOT_BYTES),
    )
    assert audit_log_chain.newest_head(good + bad, KEY.public_key()) == (head, 0)
    assert audit_log_chain.newest_head(bad + good, KEY.public_key()) == (head, audit_log_chain.SLOT_BYTES)
    assert audit_log_chain.newest_head(bad + bad, KEY.public_key()) is None
    # A signed slot that was changed to claim that it is the older.
    newer = audit_log_chain.sign_head(chain_of([event(i) for i in range(5)])[1], KEY)
    lying = newer.replace(b'"index":4', b'"index":2')
    assert lying != newer
    assert audit_log_chain.newest_head(lying + good, KEY.public_key()) == (head, audit_log_chain.SLOT_BYTES)


def test_slot_holds_head_of_any_log_that_fits_disk() -> None:
    head = audit_log_chain.Head(2**40 - 1, "a" * 64, 2**60, 2**60, tuple((2**40 - 1, "a" * 64) for _ in range(40)))
    assert len(audit_log_chain.sign_head(head, KEY)) == audit_log_chain.SLOT_BYTES


def test_torn_tail_is_note_unless_head_names_it() -> None:
    lines, anchors, head = honest()
    joined = [b"".join(line + b"\n" for line in part) for part in (lines, anchors)]
    report = verify.verify(joined[0] + b'{"id":', joined[1], head, KEY.public_key())
    assert report.valid
    assert "6 bytes without newline" in report.notes[0]
    loss = verify.verify(joined[0][:-5], joined[1], head, KEY.public_key())
    assert named(loss) == {("events", "truncated", 9)}


def test_line_no_event_is_named_even_when_it_was_signed() -> None:
    head, anchors = audit_log_chain.Head(), []
    for line in (event(0), b"not json"):
        anchor, head = head.advance(line, event_id="x", timestamp_ms=1)
        anchors.append(anchor)
    raw = audit_log_chain.sign_head(head, KEY)
    report = check([event(0), b"not json"], anchors, raw)
    assert ("event_parse_error", 1) in {(f.kind, f.index) for f in report.failures}


@pytest.mark.parametrize("junk", [b"[" * 100_000, b'{"a":1}', b"[]", b"null", b"\xff\xfe", b'{"index":1e400}'])
def test_hostile_lines_do_not_end_verify(junk: bytes) -> None:
    lines, anchors, head = honest(3)
    report = check([lines[0], junk, lines[2]], [anchors[0], junk, anchors[2]], head)
    assert not report.valid
    assert not check(lines, anchors, junk).valid


def test_public_key_file_round_trips_and_refuses_junk() -> None:
    raw = audit_log_chain.public_key_file(KEY.public_key())
    assert audit_log_chain.read_public_key(raw).public_bytes_raw() == KEY.public_key().public_bytes_raw()
    for junk in (b"", b"zz", b"\xff", raw[:20]):
        with pytest.raises(errors.LedgerError):
            audit_log_chain.read_public_key(junk)


def test_newest_head_that_was_blanked_leaves_note() -> None:
    # Cutting the last record off both files and blanking its slot equals a torn write: valid, with a note.
    lines, anchors, _ = honest()
    two_back, one_back, newest = (chain_of(lines[:n])[1] for n in (8, 9, 10))
    older = chain_of(lines[:7])[1]
    for heads, whole in (
        ((one_back, newest), True),
        ((two_back, one_back), True),
        ((one_back,), False),
        ((older, newest), False),
    ):
        count = heads[-1].count
        report = check(lines[:count], anchors[:count], head_file(*heads))
        assert report.valid
        assert (report.notes == ()) is whole, heads
    # With one record the other slot is that of an empty log, so an empty log leaves the same files.
    assert check([], [], head_file(audit_log_chain.Head())).notes == (
        "the log is empty: whether it never had a record, or its only one was taken away, does not show",
    )
    assert check(lines[:1], anchors[:1], head_file(audit_log_chain.Head(), chain_of(lines[:1])[1])).notes == ()


def carried(before: audit_log_chain.Head, lines: Lines) -> tuple[bytes, audit_log_chain.Head, audit_log_chain.Head]:
    """Return the slot that carries these lines, its head and the head before it."""
    rows = [audit_log_chain.ChainRow(line, json.loads(line)["id"], json.loads(line)["timestamp_ms"]) for line in lines]
    _, last_but_one, head = audit_log_chain.extend(before, rows)
    made = audit_log_chain.carrying_slot(before, head, b"".join(line + b"\n" for line in lines), KEY)
    assert made is not None
    return made, head, last_but_one


def test_slot_carries_rows_of_its_head_and_files_are_read_with_them() -> None:
    lines = [event(i) for i in range(7)]
    _, base = chain_of(lines[:4])
    anchors, _ = chain_of(lines)
    slot, head, _ = carried(base, lines[4:])
    assert len(slot) == audit_log_chain.SLOT_BYTES
    found = audit_log_chain.read_signed_head(slot, KEY.public_key())
    assert found == head
    assert found is not None
    rows = (b"".join(line + b"\n" for line in part[4:]) for part in (lines, anchors))
    assert found.carried == audit_log_chain.Carried(3, base.chain_hash_hex, *rows)
    # The carried lines are signed too: a head without them states the same log, but its slot differs.
    assert audit_log_chain.read_signed_head(audit_log_chain.sign_head(head, KEY), KEY.public_key()) == found
    raw = audit_log_chain.sign_head(base, KEY) + slot
    assert audit_log_chain.head_is_whole(raw, KEY.public_key())
    events, chain = (b"".join(line + b"\n" for line in part) for part in (lines, anchors))
    starts = base.events_bytes, base.chain_bytes
    for cut in (0, 1, 50, len(events) - starts[0]):
        left = events[: len(events) - cut], chain[: max(starts[1], len(chain) - cut)]
        assert audit_log_chain.completed(*left, found) == (events, chain)
        zeros = events[: len(events) - cut].ljust(len(events), b"\0"), chain
        assert audit_log_chain.completed(*zeros, found) == (events, chain)
        assert verify.verify(*audit_log_chain.completed(*left, found), raw, KEY.public_key()) == verify.verify(
            events, chain, raw, KEY.public_key()
        )
    # Later bytes stay, and a file that is too short is not filled up.
    assert audit_log_chain.completed(events + b"tail", chain, found) == (events + b"tail", chain)
    short = events[: starts[0] - 1], chain
    assert audit_log_chain.completed(*short, found) == short
    assert not verify.verify(*short, raw, KEY.public_key()).valid
    # Nor is a row appended to a row that it does not follow: the next opening refuses that.
    for which in (0, 1):
        at = starts[which] - 5
        files = [events[: starts[0]], chain[: starts[1]]]
        files[which] = files[which][:at] + bytes([files[which][at] ^ 1]) + files[which][at + 1 :]
        assert audit_log_chain.completed(files[0], files[1], found) == tuple(files)


def test_slot_carries_no_more_than_it_has_room_for() -> None:
    """One more byte would be the first of the other slot."""
    base = chain_of([event(0)])[1]
    sizes = []
    for size in range(2500, audit_log_chain.SLOT_BYTES):
        line = b'{"id":"b","timestamp_ms":1,"x":"' + b"x" * size + b'"}'
        _, head = base.advance(line, event_id="b", timestamp_ms=1)
        slot = audit_log_chain.carrying_slot(base, head, line + b"\n", KEY)
        if slot is None:
            break
        assert audit_log_chain.read_signed_head(slot, KEY.public_key()) == head
        sizes.append(len(slot))
    assert len(sizes) > 100
    assert set(sizes) == {audit_log_chain.SLOT_BYTES}


def test_slot_of_which_anything_is_another_is_none() -> None:
    lines = [event(i) for i in range(4)]
    _, base = chain_of(lines[:2])
    slot, head, _ = carried(base, lines[2:])
    used = len(slot.rstrip(b" \n"))
    for at in [*range(used), used + 2, audit_log_chain.SLOT_BYTES - 1]:
        for bit in (1, 0x80):
            torn = slot[:at] + bytes([slot[at] ^ bit]) + slot[at + 1 :]
            assert audit_log_chain.read_signed_head(torn, KEY.public_key()) is None, at
    for size in range(0, used, 7):
        assert audit_log_chain.read_signed_head(slot[:size].ljust(audit_log_chain.SLOT_BYTES), KEY.public_key()) is None
        # The rest is an earlier head's, as after a write that a power cut stopped halfway.
        earlier = audit_log_chain.sign_head(base, KEY)
        assert audit_log_chain.read_signed_head(slot[:size] + earlier[size:], KEY.public_key()) in (None, base)
    # Signed, but impossible for our log: rows that lead to another head, or past the end.
    body = b"".join(line + b"\n" for line in lines[2:])
    other = chain_of(lines[:1])[1]
    for wrong in (
        audit_log_chain.carrying_slot(other, head, body, KEY),
        audit_log_chain.carrying_slot(base, head, b"", KEY),
        audit_log_chain.carrying_slot(base, head, body[:-1], KEY),
        audit_log_chain.carrying_slot(base, head, b"[]\n" + body, KEY),
        audit_log_chain.carrying_slot(base, replace(head, count=1, marks=head.marks[-1:]), body, KEY),
    ):
        assert wrong is not None
        assert audit_log_chain.read_signed_head(wrong, KEY.public_key()) is None
    assert audit_log_chain.carrying_slot(base, head, bytes(audit_log_chain.SLOT_BYTES), KEY) is None
