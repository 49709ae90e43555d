"""The write-ahead file: acknowledged rows that the log's files may lack. One sync acknowledges a group of rows.

    signed head, signed head    where the files stood when they were last synced, and one row before
    signed head, rows           after each group: the head behind it, and its lines
    ...

A record counts when its rows lead from the head before it to its own, and its signature or a later one verifies: the
chain hash of a head covers all rows before it. What follows the last such record was being written when the writer
died, or is left of an earlier use of the file; it was never acknowledged.

Where the line ``rebase`` follows the first head, the files were cut: whole new ones lie beside them (``NEW``), and are
to be put in their place. Behind it are the two signed heads of the log before the cut, which ``head.json`` still has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Struct

from policy.audit_log import chain as audit_log_chain

BEHIND: Final = "the head names rows that `pending` does not hold"
# Behind the name of a whole new file.
NEW: Final = ".new"
_REBASE = b"rebase\n"


class Replay(Struct, frozen=True):
    """The content of the file: the lines of both files between ``base`` and ``head``, and where its last record ends.

    ``signed`` is the line of ``head``. ``replaced`` are the heads of the log whose files are to be replaced.
    """

    base: audit_log_chain.Head
    head: audit_log_chain.Head
    before: audit_log_chain.Head
    events: bytes
    chain: bytes
    end: int
    signed: bytes
    replaced: tuple[audit_log_chain.Head, ...] = ()


def opening(before: bytes, head: bytes, *, replaced: tuple[bytes, bytes] | None = None) -> bytes:
    """The first record, of two signed heads: the files are synced up to ``head``; ``before`` is one row before it.

    ``replaced`` are the signed heads of the present files, which those that lie beside them are to replace.
    """
    cut = b"" if replaced is None else _REBASE + b"".join(one + b"\n" for one in replaced)
    return b"".join([head, b"\n", cut, before, b"\n"])


def group(head: bytes, rows: Sequence[audit_log_chain.ChainRow]) -> bytes:
    """The record of one group of rows that ends at the signed head."""
    return b"\n".join([head, *(row.line for row in rows), b""])


def replay(raw: bytes, public_key: Ed25519PublicKey) -> Replay | None:
    """Read the file. None: it does not begin with a head that verifies."""
    base, position = _head(raw, 0, public_key)
    replaced = list[audit_log_chain.Head]()
    if raw.startswith(_REBASE, position):
        position += len(_REBASE)
        for _ in range(2):
            one, position = _head(raw, position, public_key)
            if one is None:
                return None
            replaced.append(one)
    before, position = _head(raw, position, public_key)
    if base is None or before is None:
        return None
    found = list(_records(raw, position, base, public_key))
    # A signature costs ten times as much as the rest of a record, and the last one is enough.
    while found and audit_log_chain.read_signed_head(found[-1].signed, public_key) is None:
        found.pop()
    events, chain = (b"".join(parts) for parts in ([one.events for one in found], [one.chain for one in found]))
    last = found[-1] if found else _Record(base, before, raw[: raw.find(b"\n")], b"", b"", position)
    return Replay(base, last.head, last.before, events, chain, last.end, last.signed, tuple(replaced))


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


def is_behind(found: Replay, shown: audit_log_chain.Head | None) -> bool:
    """Whether ``head.json``, whose newest head is ``shown``, names rows that the write-ahead file lacks.

    It is written after the file is synced, so no crash leaves this: one of the two was replaced by another copy. Only a
    crash in the middle of a cut leaves there a head of the log that is replaced.
    """
    return shown is not None and shown.count > found.head.count and shown not in found.replaced


def caught_up(events: bytes, chain: bytes, head: bytes, found: Replay) -> tuple[bytes, bytes, bytes]:
    """Both files and ``head.json`` as the next opening will leave them, for a reader that may not repair them.

    Files that hold other rows than the acknowledged ones, or fewer than were synced, are returned as they are. The head
    is that of the write-ahead file even then, so that a verification finds the difference. Of a log that is replaced
    the files are the new ones.
    """
    whole = []
    for have, base, lines in (
        (events, found.base.events_bytes, found.events),
        (chain, found.base.chain_bytes, found.chain),
    ):
        there = have[base : base + len(lines)]
        if len(have) >= base and _is_left_of(there, lines):
            # Most often nothing is lacking; a long log is not copied then.
            whole.append(have if there == lines else have[:base] + lines + have[base + len(lines) :])
    if len(whole) == 2:
        events, chain = whole
    if audit_log_chain.slot(found.signed) in head and not found.replaced:
        return events, chain, head
    slots = [audit_log_chain.slot(found.signed), b" " * (audit_log_chain.SLOT_BYTES - 1) + b"\n"]
    return events, chain, b"".join(slots if audit_log_chain.slot_offset(found.head) == 0 else slots[::-1])


def _is_left_of(there: bytes, lines: bytes) -> bool:
    """Whether a power cut can leave ``there`` of ``lines``: a part of them, with zeros for blocks that it took."""
    # No line has a zero byte.
    return lines.startswith(there) or all(have in (0, line) for have, line in zip(there, lines, strict=False))


def _head(raw: bytes, position: int, public_key: Ed25519PublicKey) -> tuple[audit_log_chain.Head | None, int]:
    end = raw.find(b"\n", position, position + audit_log_chain.SLOT_BYTES)
    if end < 0:
        return None, position
    return audit_log_chain.read_signed_head(raw[position:end], public_key), end + 1
