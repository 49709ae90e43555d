"""Code that every audit log shares: turn entries into text, and select the rows of a query."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from covenant.stores.audit import interface, rows
from covenant.wire import parts
from covenant.wire.types import AgentId
from policy.audit_log import events, note

# A row may be as long as an intent, and any client may cause thousands: bounds the bytes of rows held at once.
MOST_HELD_BYTES: Final = 128 * 1024 * 1024

# The bits of a UUID that say its version and its variant (RFC 9562, 4).
_VERSION: Final = bytes(0x40 | byte & 0x0F for byte in range(256))
_VARIANT: Final = bytes(0x80 | byte & 0x3F for byte in range(256))

# The positions of the digits in the text of a UUID.
_ID_LENGTH: Final = 36
_DIGITS: Final = [place for place in range(_ID_LENGTH) if place not in (8, 13, 18, 23)]


def event_ids(count: int) -> list[str]:
    """Return ``count`` random UUIDs of version 4, as str(uuid.uuid4()) formats them, from one read of the kernel's
    randomness."""
    raw = bytearray(os.urandom(16 * count))
    raw[6::16] = raw[6::16].translate(_VERSION)
    raw[8::16] = raw[8::16].translate(_VARIANT)
    digits = raw.hex().encode()
    # Writes one digit of all ids at a time.
    whole = bytearray(b"-" * (_ID_LENGTH * count))
    for place, digit in zip(_DIGITS, range(32), strict=True):
        whole[place::_ID_LENGTH] = digits[digit::32]
    text = whole.decode()
    return [text[at : at + _ID_LENGTH] for at in range(0, len(text), _ID_LENGTH)]


@functools.lru_cache(maxsize=4096)
def issuer_text(display: str, pubkey: str) -> str:
    """Return the issuer in the format of a line."""
    return events.issuer_text({"display": display, "pubkey": pubkey})


def body_text(kind: str, fields: Mapping[str, Any], issuer: AgentId) -> str:
    """Return the text of a line after its id and its time."""
    text = events.kind_text(kind, fields, of_no_run=True)
    return events.body_text(issuer_text(issuer.display, issuer.pubkey), text)


def newest(lines: Iterator[bytes], limit: int, since_ms: int | None) -> Iterator[parts.AuditEvent]:
    """Yield the first ``limit`` rows of lines in newest-first order. Stops at a row older than ``since_ms``, and after
    ``MOST_HELD_BYTES``."""
    room = MOST_HELD_BYTES
    for line in lines:
        if limit <= 0 or room <= 0:
            return
        row = rows.event(line)
        if row is None:
            continue
        if since_ms is not None and row.timestamp_ms < since_ms:
            return
        yield row
        limit -= 1
        room -= len(line)


def scanned(
    lines: Iterator[bytes], wanted: Callable[[parts.AuditEvent], bool], limit: int, since_ms: int | None
) -> interface.Scan:
    """Return the first ``limit`` wanted rows of lines in newest-first order."""
    found: list[parts.AuditEvent] = []
    looked, room = 0, MOST_HELD_BYTES
    for line in lines:
        if room <= 0:
            break
        row = rows.event(line)
        if len(found) >= limit or (row and since_ms is not None and row.timestamp_ms < since_ms):
            break
        looked += 1
        if row is not None and wanted(row):
            found.append(row)
            room -= len(line)
    return interface.Scan(tuple(found), looked, cut=room <= 0)


def checkpoint_fields(checkpoint: note.Checkpoint) -> dict[str, Any]:
    """Return the fields of ``audit_checkpoint``."""
    return {"origin": checkpoint.origin, "tree_size": checkpoint.size, "root_hash_hex": checkpoint.root.hex()}


def cosigned_entry(checkpoint: note.Checkpoint, one: note.Verified) -> interface.AuditEntry:
    """Return the entry for a cosignature."""
    about = {"origin": checkpoint.origin, "tree_size": checkpoint.size, "timestamp_s": one.time_s or 0}
    return interface.AuditEntry("audit_checkpoint_cosigned", {**about, "witness": one.verifier.text})
