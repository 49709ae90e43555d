"""Check that a reader of a killed daemon's files sees the log as the daemon's next start will."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policy.audit_log import chain as audit_log_chain
from policy.audit_log import write_ahead
from policy.audit_log.write_ahead import Replay

KEY = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
ROWS = [
    audit_log_chain.Row(b'{"id":"%d","timestamp_ms":%d}' % (number, number), str(number), number) for number in range(4)
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


def test_a_head_that_has_it_stays_and_so_does_what_came_behind_it() -> None:
    found = _found(2)
    head = b" " * (audit_log_chain.SLOT_BYTES - 1) + b"\n" + audit_log_chain.slot(found.signed)
    events, chain = BASE_EVENTS + found.events + LATER, BASE_CHAIN + found.chain + LATER
    assert write_ahead.caught_up(events, chain, head, found) == (events, chain, head)


@pytest.mark.parametrize("which", ["events", "chain"])
@pytest.mark.parametrize("how", ["short", "other"])
def test_files_that_hold_something_else_are_shown_as_they_are(which: str, how: str) -> None:
    found = _found(2)
    files = {"events": BASE_EVENTS, "chain": BASE_CHAIN}
    files[which] = files[which][:-1] if how == "short" else files[which] + b"?"
    assert write_ahead.caught_up(files["events"], files["chain"], b"head", found) == (
        files["events"],
        files["chain"],
        b"head",
    )


def test_files_that_are_to_be_replaced_are_shown_as_they_are() -> None:
    signed = audit_log_chain.signed_head(BASE, KEY)
    found = write_ahead.replay(write_ahead.opening(signed, signed, rebased=True), KEY.public_key())
    assert found is not None
    assert found.rebased
    assert write_ahead.caught_up(b"any", b"thing", b"head", found) == (b"any", b"thing", b"head")


@pytest.mark.parametrize(
    "line", [b"no JSON", b"[]", b'{"id":7,"timestamp_ms":2}', b'{"id":"2","timestamp_ms":true}', b'{"id":"2"}', b""]
)
def test_a_group_that_holds_no_events_ends_what_counts(line: bytes) -> None:
    """Also if its signature verifies: the log's key signs sizes and hashes, not JSON."""
    wrong = audit_log_chain.Row(line, "2", 2)
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
        row = audit_log_chain.Row(b'{"id":"%d","timestamp_ms":%d}' % (number, number), str(number), number)
        heads.append(audit_log_chain.extend(heads[-1], [row])[2])
        raw += (
            write_ahead.group(audit_log_chain.signed_head(heads[-1], KEY), [row])
            if key is KEY
            else _forged(heads[-1], row)
        )
    return raw, heads


def _forged(head: audit_log_chain.Head, row: audit_log_chain.Row) -> bytes:
    """Return a group that claims our key but is signed by another."""
    signed = audit_log_chain.signed_head(head, OTHER, signer=audit_log_chain.key_id(KEY.public_key()))
    return write_ahead.group(signed, [row])


@pytest.mark.parametrize("forged", range(6))
def test_groups_count_up_to_the_last_verified_head(forged: int) -> None:
    raw, heads = _groups([KEY] * (5 - forged) + [OTHER] * forged)
    found = write_ahead.replay(raw, KEY.public_key())
    assert found is not None
    assert (found.head, found.before) == (heads[5 - forged], heads[max(0, 4 - forged)])
    assert raw[: found.end] == _groups([KEY] * (5 - forged))[0]
    assert found.events.count(b"\n") == found.chain.count(b"\n") == 5 - forged


def test_a_verified_head_covers_the_groups_before_it() -> None:
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


def test_a_file_of_many_groups_costs_three_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
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
