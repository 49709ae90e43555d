"""Check that a reader of a killed daemon's files sees the log as the daemon's next start will."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policy.audit_log import chain as audit_log_chain
from policy.audit_log import write_ahead
from policy.audit_log.write_ahead import Replay

KEY = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
ROWS = [
    audit_log_chain.ChainRow(b'{"id":"%d","timestamp_ms":%d}' % (number, number), str(number), number)
    for number in range(4)
]
# Two rows were synced; one or two more were only acknowledged.
BASE_CHAIN, _, BASE = audit_log_chain.extend(audit_log_chain.Head(), ROWS[:2])
BASE_EVENTS = b"".join(row.line + b"\n" for row in ROWS[:2])
LATER = b"later\n"


def _found(count: int) -> Replay:
    begun = write_ahead.opening(audit_log_chain.signed_head(BASE, KEY), audit_log_chain.signed_head(BASE, KEY))
    rows = ROWS[2 : 2 + count]
    _, _, head = audit_log_chain.extend(BASE, rows)
    found = write_ahead.replay(
        begun + write_ahead.group(audit_log_chain.signed_head(head, KEY), rows), KEY.public_key()
    )
    assert found is not None
    return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("written", [0, 1, 7, None])
def test_what_was_acknowledged_is_put_behind_what_was_synced(count: int, written: int | None) -> None:
    """This holds for any part of the acknowledged rows that reached the files."""
    found = _found(count)
    events, chain = BASE_EVENTS + found.events[:written], BASE_CHAIN + found.chain[:written]
    caught = write_ahead.caught_up(events, chain, b"", found)
    assert caught[:2] == (BASE_EVENTS + found.events, BASE_CHAIN + found.chain)
    # The head alone is in its own slot; the other slot is blank.
    blank = b" " * (audit_log_chain.SLOT_BYTES - 1) + b"\n"
    slots = [audit_log_chain.slot(found.signed), blank]
    assert caught[2] == b"".join(slots if count == 2 else slots[::-1])
    assert audit_log_chain.read_head(caught[2], KEY.public_key()) == found.head


def test_head_that_has_it_stays_and_so_does_what_came_behind_it() -> None:
    found = _found(2)
    head = b" " * (audit_log_chain.SLOT_BYTES - 1) + b"\n" + audit_log_chain.slot(found.signed)
    events, chain = BASE_EVENTS + found.events + LATER, BASE_CHAIN + found.chain + LATER
    assert write_ahead.caught_up(events, chain, head, found) == (events, chain, head)


@pytest.mark.parametrize("which", ["events", "chain"])
@pytest.mark.parametrize("how", ["short", "other"])
def test_files_that_hold_something_else_stay_beside_newest_head(which: str, how: str) -> None:
    """An older head, put back beside older files, must not make them a sound log."""
    found = _found(2)
    files = {"events": BASE_EVENTS, "chain": BASE_CHAIN}
    files[which] = files[which][:-1] if how == "short" else files[which] + b"?"
    events, chain, head = write_ahead.caught_up(files["events"], files["chain"], b"head", found)
    assert (events, chain) == (files["events"], files["chain"])
    assert audit_log_chain.read_head(head, KEY.public_key()) == found.head


@pytest.mark.parametrize("which", ["events", "chain"])
def test_zeros_of_lost_blocks_become_rows(which: str) -> None:
    found = _found(2)
    whole = {"events": BASE_EVENTS + found.events, "chain": BASE_CHAIN + found.chain}
    base = len({"events": BASE_EVENTS, "chain": BASE_CHAIN}[which])
    for lost in (slice(base, base + 9), slice(base + 9, None), slice(base, None)):
        holed = bytearray(whole[which])
        holed[lost] = bytes(len(holed[lost]))
        files = whole | {which: bytes(holed)}
        assert write_ahead.caught_up(files["events"], files["chain"], b"", found)[:2] == tuple(whole.values())
    changed = whole | {which: whole[which][:-2] + b"?\n"}
    assert write_ahead.caught_up(changed["events"], changed["chain"], b"", found)[:2] == tuple(changed.values())


def test_only_head_of_more_rows_is_ahead() -> None:
    found = _found(1)
    _, before, later = audit_log_chain.extend(BASE, ROWS[2:])
    assert before == found.head
    shown = [None, BASE, found.head, later]
    assert [write_ahead.is_behind(found, head) for head in shown] == [False, False, False, True]


def _cut(*replaced: audit_log_chain.Head) -> Replay | None:
    """The file at a cut to two rows, of a log that had these last heads."""
    signed = audit_log_chain.signed_head(BASE, KEY)
    heads = tuple(audit_log_chain.signed_head(one, KEY) for one in replaced)
    assert len(heads) == 2
    return write_ahead.replay(write_ahead.opening(signed, signed, replaced=heads), KEY.public_key())


def test_cut_is_behind_all_but_replaced_heads() -> None:
    """A crash in a cut leaves the heads of the longer log in head.json. Rows after the cut have another head."""
    _, before, last = audit_log_chain.extend(audit_log_chain.Head(), ROWS)
    found = _cut(last, before)
    assert found is not None
    assert (found.base, found.replaced) == (BASE, (last, before))
    _, _, after = audit_log_chain.extend(BASE, ROWS[:1])
    shown = [None, BASE, last, before, after]
    assert [write_ahead.is_behind(found, head) for head in shown] == [False, False, False, False, True]


def test_cut_without_replaced_heads_is_none() -> None:
    signed = audit_log_chain.signed_head(BASE, KEY)
    raw = write_ahead.opening(signed, signed, replaced=(signed, signed))
    assert write_ahead.replay(raw, KEY.public_key()) is not None
    assert write_ahead.replay(raw.replace(b"rebase\n" + signed, b"rebase\n" + signed[:-1]), KEY.public_key()) is None
    assert write_ahead.replay(signed + b"\nrebase\n" + signed + b"\n", KEY.public_key()) is None


def test_new_files_of_cut_get_its_head() -> None:
    _, before, last = audit_log_chain.extend(audit_log_chain.Head(), ROWS)
    found = _cut(last, before)
    assert found is not None
    slots = [audit_log_chain.slot(audit_log_chain.signed_head(one, KEY)) for one in (last, BASE)]
    # A power cut in the middle of its last step leaves one of both.
    for shown in (slots[0] * 2, b"".join(slots), b"".join(slots[::-1])):
        events, chain, head = write_ahead.caught_up(BASE_EVENTS, BASE_CHAIN, shown, found)
        assert (events, chain) == (BASE_EVENTS, BASE_CHAIN)
        assert audit_log_chain.read_head(head, KEY.public_key()) == BASE


@pytest.mark.parametrize(
    "line", [b"no JSON", b"[]", b'{"id":7,"timestamp_ms":2}', b'{"id":"2","timestamp_ms":true}', b'{"id":"2"}', b""]
)
def test_group_that_holds_no_events_ends_what_counts(line: bytes) -> None:
    """Also if its signature verifies: the log's key signs sizes and hashes, not JSON."""
    wrong = audit_log_chain.ChainRow(line, "2", 2)
    _, _, head = audit_log_chain.extend(BASE, [ROWS[2], wrong])
    begun = write_ahead.opening(audit_log_chain.signed_head(BASE, KEY), audit_log_chain.signed_head(BASE, KEY))
    _, _, good = audit_log_chain.extend(BASE, ROWS[2:3])
    one = write_ahead.group(audit_log_chain.signed_head(good, KEY), ROWS[2:3])
    found = write_ahead.replay(
        begun + write_ahead.group(audit_log_chain.signed_head(head, KEY), [ROWS[2], wrong]), KEY.public_key()
    )
    assert found is not None
    assert found.head == BASE
    found = write_ahead.replay(begun + one, KEY.public_key())
    assert found is not None
    assert found.head == good


OTHER = Ed25519PrivateKey.from_private_bytes(b"b" * 32)


def _groups(keys: list[Ed25519PrivateKey]) -> tuple[bytes, list[audit_log_chain.Head]]:
    """Return a file with one row in each group, signed by these keys, and the heads."""
    raw, heads = (
        write_ahead.opening(audit_log_chain.signed_head(BASE, KEY), audit_log_chain.signed_head(BASE, KEY)),
        [BASE],
    )
    for number, key in enumerate(keys, 2):
        row = audit_log_chain.ChainRow(b'{"id":"%d","timestamp_ms":%d}' % (number, number), str(number), number)
        heads.append(audit_log_chain.extend(heads[-1], [row])[2])
        raw += (
            write_ahead.group(audit_log_chain.signed_head(heads[-1], KEY), [row])
            if key is KEY
            else _forged(heads[-1], row)
        )
    return raw, heads


def _forged(head: audit_log_chain.Head, row: audit_log_chain.ChainRow) -> bytes:
    """Return a group that claims our key but is signed by another."""
    signed = audit_log_chain.signed_head(head, OTHER, signer=audit_log_chain.key_id(KEY.public_key()))
    return write_ahead.group(signed, [row])


@pytest.mark.parametrize("forged", range(6))
def test_groups_count_up_to_last_verified_head(forged: int) -> None:
    raw, heads = _groups([KEY] * (5 - forged) + [OTHER] * forged)
    found = write_ahead.replay(raw, KEY.public_key())
    assert found is not None
    assert (found.head, found.before) == (heads[5 - forged], heads[max(0, 4 - forged)])
    assert raw[: found.end] == _groups([KEY] * (5 - forged))[0]
    assert found.events.count(b"\n") == found.chain.count(b"\n") == 5 - forged


def test_verified_head_covers_groups_before_it() -> None:
    raw, heads = _groups([KEY, OTHER, KEY])
    found = write_ahead.replay(raw, KEY.public_key())
    assert found is not None
    assert found.head == heads[-1]
    # Nor may any of their rows be changed.
    changed = write_ahead.replay(
        raw.replace(b'{"id":"3","timestamp_ms":3}', b'{"id":"3","timestamp_ms":4}'), KEY.public_key()
    )
    assert changed is not None
    assert changed.head == heads[1]


def test_file_of_many_groups_costs_three_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[bytes] = []
    real = audit_log_chain.read_signed_head

    def counted(line: bytes, key: Ed25519PublicKey) -> audit_log_chain.Head | None:
        verified.append(line)
        return real(line, key)

    raw, heads = _groups([KEY] * 50)
    monkeypatch.setattr(audit_log_chain, "read_signed_head", counted)
    found = write_ahead.replay(raw, KEY.public_key())
    assert found is not None
    assert found.head == heads[-1]
    assert len(verified) == 3
