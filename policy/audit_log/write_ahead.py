"""The write-ahead file: acknowledged rows that the log's files may lack. One sync acknowledges a group of rows.

    signed head, signed head    where the files stood when they were last synced, and one row before
    signed head, rows           after each group: the head behind it, and its lines
    ...

A record counts when its rows lead from the head before it to its own, and its signature or a later one verifies: the
chain hash of a head covers all rows before it. What follows the last such record was being written when the writer
died, or is left of an earlier use of the file; it was never acknowledged.

Where the line ``rebase`` stands between the first two heads the files were cut: whole new ones lie beside them, and are
to be put in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from policy.audit_log import chain as audit_log_chain

_REBASE = b"rebase"


@dataclass(frozen=True, slots=True)
class Replay:
    """The content of the file: the lines of both files between ``base`` and ``head``, and where its last record ends.

    ``signed`` is the line of ``head``; ``rebased`` says that the files are to be replaced.
    """

    base: audit_log_chain.Head
    head: audit_log_chain.Head
    before: audit_log_chain.Head
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


def group(head: bytes, rows: Sequence[audit_log_chain.Row]) -> bytes:
    """The record of one group of rows that ends at the signed head."""
    return b"\n".join([head, *(row.line for row in rows), b""])


def replay(raw: bytes, public_key: Ed25519PublicKey) -> Replay | None:
    """Read the file. None: it does not begin with a head that verifies."""
    base, position = _head(raw, 0, public_key)
    rebased = raw.startswith(_REBASE + b"\n", position)
    before, position = _head(raw, position + rebased * (len(_REBASE) + 1), public_key)
    if base is None or before is None:
        return None
    found = list(_records(raw, position, base, public_key))
    # A signature costs ten times as much as the rest of a record, and the last one is enough.
    while found and audit_log_chain.read_signed_head(found[-1].signed, public_key) is None:
        found.pop()
    events, chain = (b"".join(parts) for parts in ([one.events for one in found], [one.chain for one in found]))
    last = found[-1] if found else _Record(base, before, raw[: raw.find(b"\n")], b"", b"", position)
    return Replay(base, last.head, last.before, events, chain, last.end, last.signed, rebased)


class _Record(NamedTuple):
    """A group that leads on: its head, the head one row before, its signed line, its lines of both files, its end."""

    head: audit_log_chain.Head
    before: audit_log_chain.Head
    signed: bytes
    events: bytes
    chain: bytes
    end: int


def _records(raw: bytes, position: int, head: audit_log_chain.Head, public_key: Ed25519PublicKey) -> Iterator[_Record]:
    """The groups from a position on whose rows lead from head to head; no signature is looked at."""
    while (line_end := raw.find(b"\n", position, position + audit_log_chain.SLOT_BYTES)) >= 0:
        signed, start = raw[position:line_end], line_end + 1
        following = audit_log_chain.claimed_head(signed, public_key)
        if following is None:
            return
        end = start + following.events_bytes - head.events_bytes
        rows = audit_log_chain.read_rows(raw[start:end]) if start < end <= len(raw) else None
        if rows is None:
            return
        entries, before, last = audit_log_chain.extend(head, rows)
        if last != following:
            return
        yield _Record(last, before, signed, raw[start:end], entries, end)
        head, position = last, end


def caught_up(events: bytes, chain: bytes, head: bytes, found: Replay) -> tuple[bytes, bytes, bytes]:
    """Both files and ``head.json`` as the next opening will leave them, where they hold nothing else than that.

    For a reader of a killed daemon's files that may not repair them.
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
    if audit_log_chain.slot(found.signed) in head:
        return whole[0], whole[1], head
    slots = [audit_log_chain.slot(found.signed), b" " * (audit_log_chain.SLOT_BYTES - 1) + b"\n"]
    return whole[0], whole[1], b"".join(slots if audit_log_chain.slot_offset(found.head) == 0 else slots[::-1])


def _head(raw: bytes, position: int, public_key: Ed25519PublicKey) -> tuple[audit_log_chain.Head | None, int]:
    end = raw.find(b"\n", position, position + audit_log_chain.SLOT_BYTES)
    if end < 0:
        return None, position
    return audit_log_chain.read_signed_head(raw[position:end], public_key), end + 1
