"""What was acknowledged and may not be in the log's files yet: one file, so that one sync acknowledges a group of rows.

    signed head, signed head    where the files stood when they were last synced, and one row before
    signed head, rows           after each group: the head behind it, and its lines
    ...

A record counts when its rows lead from the head before it to its own, whose signature verifies. What follows the last
such record was being written when the writer died, or is left of an earlier use of the file; it was never acknowledged.

Where the line ``rebase`` stands between the first two heads the files were cut: whole new ones lie beside them, and are
to be put in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from policy import ledger

_REBASE = b"rebase"


@dataclass(frozen=True, slots=True)
class Replay:
    """What the file says: the lines of both files between ``base`` and ``head``, and where its last record ends.

    ``signed`` is the line of ``head``; ``rebased`` says that the files are to be replaced.
    """

    base: ledger.Head
    head: ledger.Head
    before: ledger.Head
    events: bytes
    chain: bytes
    end: int
    signed: bytes
    rebased: bool = False


def opening(before: bytes, head: bytes, *, rebased: bool = False) -> bytes:
    """The first record, of two signed heads: the files are synced up to ``head``; ``before`` is one row before it.

    ``rebased``: they are to be replaced by those that lie beside them.
    """
    return b"\n".join([head, *([_REBASE] if rebased else []), before, b""])


def group(head: bytes, rows: Sequence[ledger.Row]) -> bytes:
    """The record of one group of rows that ends at the signed head."""
    return b"\n".join([head, *(row.line for row in rows), b""])


def replay(raw: bytes, public_key: Ed25519PublicKey) -> Replay | None:
    """What the file says, or None when it does not begin with a head that verifies."""
    base, position = _head(raw, 0, public_key)
    rebased = raw.startswith(_REBASE + b"\n", position)
    before, position = _head(raw, position + rebased * (len(_REBASE) + 1), public_key)
    if base is None or before is None:
        return None
    head, events, chain, signed = base, [], [], raw[: raw.find(b"\n")]
    while True:
        following, start = _head(raw, position, public_key)
        if following is None:
            break
        end = start + following.events_bytes - head.events_bytes
        rows = ledger.read_rows(raw[start:end]) if start < end <= len(raw) else None
        if rows is None:
            break
        entries, last_but_one, last = ledger.extend(head, rows)
        if last != following:
            break
        head, before, signed, position = last, last_but_one, raw[position : start - 1], end
        events.append(raw[start:end])
        chain.append(entries)
    return Replay(base, head, before, b"".join(events), b"".join(chain), position, signed, rebased)


def caught_up(events: bytes, chain: bytes, head: bytes, found: Replay) -> tuple[bytes, bytes, bytes]:
    """Both files and ``head.json`` as the next opening will leave them, where they hold nothing else than that.

    For whoever reads the files of a daemon that was killed and cannot mend them.
    """
    if found.rebased:
        return events, chain, head
    whole = []
    for have, base, lines in (
        (events, found.base.events_bytes, found.events),
        (chain, found.base.chain_bytes, found.chain),
    ):
        if len(have) < base or not lines.startswith(have[base : base + len(lines)]):
            return events, chain, head
        whole.append(have[:base] + lines + have[base + len(lines) :])
    if ledger.slot(found.signed) in head:
        return whole[0], whole[1], head
    slots = [ledger.slot(found.signed), b" " * (ledger.SLOT_BYTES - 1) + b"\n"]
    return whole[0], whole[1], b"".join(slots if ledger.slot_offset(found.head) == 0 else slots[::-1])


def _head(raw: bytes, position: int, public_key: Ed25519PublicKey) -> tuple[ledger.Head | None, int]:
    end = raw.find(b"\n", position, position + ledger.SLOT_BYTES)
    if end < 0:
        return None, position
    return ledger.read_signed_head(raw[position:end], public_key), end + 1
