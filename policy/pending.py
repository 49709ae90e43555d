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

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from policy import ledger

_REBASE = b"rebase"


@dataclass(frozen=True, slots=True)
class Replay:
    """What the file says: the lines of both files between ``base`` and ``head``, and where its last record ends.

    ``rebased`` is the head one row before ``base`` where the files were cut there.
    """

    base: ledger.Head
    head: ledger.Head
    before: ledger.Head
    events: bytes
    chain: bytes
    end: int
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
    head, events, chain = base, [], []
    while True:
        following, start = _head(raw, position, public_key)
        if following is None:
            break
        end = start + following.events_bytes - head.events_bytes
        rows = _rows(raw[start:end]) if start < end <= len(raw) else None
        if rows is None:
            break
        entries, last_but_one, last = ledger.extend(head, rows)
        if last != following:
            break
        head, before, position = last, last_but_one, end
        events.append(raw[start:end])
        chain.append(entries)
    return Replay(base, head, before, b"".join(events), b"".join(chain), position, rebased)


def _head(raw: bytes, position: int, public_key: Ed25519PublicKey) -> tuple[ledger.Head | None, int]:
    end = raw.find(b"\n", position, position + ledger.SLOT_BYTES)
    if end < 0:
        return None, position
    return ledger.read_signed_head(raw[position:end], public_key), end + 1


def _rows(lines: bytes) -> list[ledger.Row] | None:
    if not lines.endswith(b"\n"):
        return None
    rows = []
    for line in lines[:-1].split(b"\n"):
        try:
            event = json.loads(line)
            rows.append(ledger.Row(line, event["id"], event["timestamp_ms"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
    return rows
