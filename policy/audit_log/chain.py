"""The audit log as bytes: event lines, their hash chain, and the signed head.

    events.jsonl         one event a line (policy/audit_log/events.py)
    events.chain.jsonl   one anchor a line: {index, event_id, timestamp_ms, event_hash_hex,
                         previous_hash_hex, chain_hash_hex}
    head.json            two slots of 4,096 bytes, one JSON line each, written in turn; where the line says so the rows
                         of the write that it ends stand behind it, and the files may lack them after a power cut

event_hash is the SHA-256 of the exact JSON line without its newline; chain_hash is
SHA-256(previous_hash_hex + "\\n" + event_hash_hex), both as text; genesis is 64 zeros. These are version 1's
hashes, so its log verifies here. What version 1 lacks is the head: index, chain hash and sizes of what was
acknowledged, signed with the log's key and kept outside the log's folder. Without it a cut at the end of
both files leaves no trace.

Nothing here reads a file or a clock. This module makes; ``policy.audit_log.verify.verify`` compares.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct

from policy import errors

GENESIS = "0" * 64
SLOT_BYTES = 4096
HEAD_BYTES = 2 * SLOT_BYTES

# INVARIANT: no other signing door of this project uses this prefix (decisions.md, signing doors).
_DOMAIN = b"covenant.audit.head.v1\n"
_HEX64 = re.compile(r"[0-9a-f]{64}\Z")
_ID_LENGTH = 36
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_ANCHOR_FIELDS = ("index", "event_id", "timestamp_ms", "event_hash_hex", "previous_hash_hex", "chain_hash_hex")


def event_hash(line: bytes) -> str:
    """Hex SHA-256 of the exact JSON line, without its newline."""
    return hashlib.sha256(line).hexdigest()


def chain_hash(previous_hex: str, event_hex: str) -> str:
    """Hex SHA-256 over both hashes as text, joined by a newline."""
    return hashlib.sha256(f"{previous_hex}\n{event_hex}".encode("ascii")).hexdigest()


def fold(event_hashes: Sequence[str]) -> str:
    """The chain hash after the given event hashes, from genesis."""
    value = GENESIS
    for item in event_hashes:
        value = chain_hash(value, item)
    return value


class ChainRow(NamedTuple):
    """An event's exact line, without its newline, and what its anchor repeats of it."""

    line: bytes
    event_id: str
    timestamp_ms: int


class Anchor(Struct, frozen=True):
    """One entry of the chain file."""

    index: int
    event_id: str
    timestamp_ms: int
    event_hash_hex: str
    previous_hash_hex: str
    chain_hash_hex: str

    def line(self) -> bytes:
        """The exact JSON line, without newline."""
        return _dump({name: getattr(self, name) for name in _ANCHOR_FIELDS})

    @classmethod
    def parse(cls, line: bytes) -> Anchor | None:
        """The entry of a line, or None unless the line is byte for byte what ``line`` would write."""
        try:
            value = json.loads(line)
            if set(value) != set(_ANCHOR_FIELDS):
                return None
            anchor = cls(**value)
            numbers = (anchor.index, anchor.timestamp_ms)
            texts = (anchor.event_id, anchor.event_hash_hex, anchor.previous_hash_hex, anchor.chain_hash_hex)
            well_typed = all(type(n) is int for n in numbers) and all(type(t) is str for t in texts)
            well_typed = well_typed and all(_HEX64.match(t) for t in texts[1:])
            return anchor if well_typed and anchor.line() == line else None
        except (ValueError, TypeError, RecursionError):
            return None


class Carried(Struct, frozen=True):
    """The rows of one write as both files are to hold them, out of the slot of the head that they end at, and the chain
    hash that they follow.

    Such a slot is durable by itself, and the files are synced before the next one is written.
    """

    count: int
    previous_hash_hex: str
    events: bytes
    chain: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """How far the log goes: ``count`` records, the last one's chain hash, and both files' sizes in bytes.

    ``marks`` are (count, chain hash) at ``count`` with its low bits cleared one by one (11 -> 11, 10, 8):
    at most one a bit, each kept from the head before, and enough to say up to where a log that was
    rewritten consistently is still the one that was signed. ``carried`` are rows that stand in its slot.
    """

    count: int = 0
    chain_hash_hex: str = GENESIS
    events_bytes: int = 0
    chain_bytes: int = 0
    marks: tuple[tuple[int, str], ...] = ()
    carried: Carried | None = field(default=None, compare=False)

    @property
    def starts(self) -> tuple[int, int]:
        """Where in both files what it carries begins; where it ends, if that is nothing."""
        events, chain = (self.carried.events, self.carried.chain) if self.carried else (b"", b"")
        return self.events_bytes - len(events), self.chain_bytes - len(chain)

    def advance(self, line: bytes, *, event_id: str, timestamp_ms: int) -> tuple[bytes, Head]:
        """The chain line for the next event line, and the head after both (newlines are counted here)."""
        event_hex = event_hash(line)
        after = chain_hash(self.chain_hash_hex, event_hex)
        anchor = Anchor(self.count, event_id, timestamp_ms, event_hex, self.chain_hash_hex, after).line()
        count = self.count + 1
        kept = set(_mark_counts(count))
        marks = ((count, after), *(mark for mark in self.marks if mark[0] in kept))
        return anchor, Head(count, after, self.events_bytes + len(line) + 1, self.chain_bytes + len(anchor) + 1, marks)


def extend(head: Head, rows: Sequence[ChainRow]) -> tuple[bytes, Head, Head]:
    """As ``Head.advance`` for many rows at once: the chain lines with their newlines, the last head but one, and the
    last. For no rows both are ``head``."""
    sha256 = hashlib.sha256
    if not rows:
        return b"", head, head
    first = head.count
    event_hashes = [sha256(row[0]).hexdigest() for row in rows]
    hashes, entries = _linked(first, head.chain_hash_hex, event_hashes, [row[1:] for row in rows])
    chain = "".join(entries).encode()
    kept = dict(head.marks)

    def at(count: int, events: int, chain: int) -> Head:
        marks = tuple((n, hashes[n - first] if n > first else kept[n]) for n in _mark_counts(count))
        return Head(count, hashes[count - first], events, chain, marks)

    events_bytes = head.events_bytes + sum([len(row[0]) for row in rows]) + len(rows)
    last = at(first + len(event_hashes), events_bytes, head.chain_bytes + len(chain))
    before = at(last.count - 1, events_bytes - len(rows[-1].line) - 1, last.chain_bytes - len(entries[-1]))
    return chain, before, last


def _linked(
    first: int, previous: str, event_hashes: Sequence[str], anchors: Iterable[tuple[str, int]]
) -> tuple[list[str], list[str]]:
    """The chain hashes from ``previous`` on, and the lines of the chain file, of records that begin at ``first``."""
    # Passes with little in each: every row of every log goes through here.
    sha256, quoted = hashlib.sha256, json.encoder.encode_basestring_ascii
    hashes = [previous]
    for event_hex in event_hashes:
        previous = sha256(f"{previous}\n{event_hex}".encode()).hexdigest()
        hashes.append(previous)
    entries = [
        f'{{"index":{index},"event_id":{quoted(event_id)},"timestamp_ms":{timestamp_ms},'
        f'"event_hash_hex":"{event_hex}","previous_hash_hex":"{before_hex}","chain_hash_hex":"{after_hex}"}}\n'
        for index, (event_id, timestamp_ms), event_hex, before_hex, after_hex in zip(
            itertools.count(first), anchors, event_hashes, hashes, hashes[1:], strict=False
        )
    ]
    return hashes, entries


def read_rows(lines: bytes) -> list[ChainRow] | None:
    """The rows of event lines, each with its newline; None where one of them is no event."""
    rows = []
    *whole, rest = lines.split(b"\n")
    for line in whole:
        try:
            event = json.loads(line)
            row = ChainRow(line, event["id"], event["timestamp_ms"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if type(row.event_id) is not str or type(row.timestamp_ms) is not int:
            return None
        rows.append(row)
    return None if rest else rows


def following_id(first: str, position: int) -> str:
    """The event id of the record that was written at ``position`` of one write whose first record has ``first``.

    So what a crash left beyond the head shows whether it was one write. It is a UUID of version 8 (RFC 9562, 5.8).
    """
    value = hashlib.sha256(f"{first}/{position}".encode("ascii")).hexdigest()
    return f"{value[:8]}-{value[8:12]}-8{value[13:16]}-8{value[17:20]}-{value[20:32]}"


def is_one_write(tail: bytes, openings: Sequence[str]) -> bool:
    """Whether lines beyond the head are what one write left, the last maybe in part.

    ``openings`` are how each line begins up to its event id, as many as a write may have lines: the id of the first is
    anything, each of the others follows from it. A power cut leaves zeros for blocks that were not on the disk yet, and
    no line of ours has any: what follows the first of them says nothing of how many writes there were.
    """
    *lines, rest = tail.partition(b"\0")[0].split(b"\n")
    lines += [rest] if rest else []
    if len(lines) < 2:
        return True
    first = lines[0].removeprefix(openings[0].encode())[:_ID_LENGTH].decode("ascii", "replace")
    if len(lines) > len(openings) or not _ID.match(first):
        return False
    expected = (f'{opening}{following_id(first, i)}"'.encode() for i, opening in enumerate(openings[1:], 1))
    return all(line[: len(start)] == start[: len(line)] for line, start in zip(lines[1:], expected, strict=False))


def key_id(public_key: Ed25519PublicKey) -> str:
    """Hex SHA-256 of the raw public key."""
    return hashlib.sha256(public_key.public_bytes_raw()).hexdigest()


def sign_head(head: Head, key: Ed25519PrivateKey) -> bytes:
    """One slot: the signed head as a JSON line, padded with spaces to ``SLOT_BYTES``.

    ``index`` is the last record's index as in the chain file, -1 for an empty log. The signature covers the
    domain tag and the compact JSON of everything but itself.
    """
    return slot(signed_head(head, key))


def signed_head(head: Head, key: Ed25519PrivateKey, *, signer: str | None = None) -> bytes:
    """The line in a slot, without what fills it. ``signer`` is the key's id, for a caller that signs often."""
    return _signed(_head_body(head, signer or key_id(key.public_key())), key)


def _signed(document: dict[str, Any], key: Ed25519PrivateKey) -> bytes:
    body = _dump(document)
    return body[:-1] + f',"signature_hex":"{key.sign(_DOMAIN + body).hex()}"}}'.encode("ascii")


def slot(signed: bytes) -> bytes:
    """A signed head as it stands in its slot."""
    return signed.ljust(SLOT_BYTES - 1) + b"\n"


def carrying_slot(
    before: Head, head: Head, lines: bytes, key: Ed25519PrivateKey, *, signer: str | None = None
) -> bytes | None:
    """The slot of ``head`` with the event ``lines`` that lead from ``before`` to it; None where they find no room.

    The signed line says how many bytes of them there are and what the chain hash before them is, so that a slot of
    which a power cut left a part is none, and a whole one needs nothing else.
    """
    carried = {"previous_hash_hex": before.chain_hash_hex, "events_bytes": len(lines)}
    made = _signed(_head_body(head, signer or key_id(key.public_key())) | {"carried": carried}, key) + b"\n" + lines
    return slot(made) if len(made) < SLOT_BYTES else None


def completed(events: bytes, chain: bytes, head: Head | None) -> tuple[bytes, bytes]:
    """Both files as the next opening will leave them, with what the head's slot carries in its place; as they are where
    they do not reach there, or another record stands there than it follows."""
    carried = None if head is None else head.carried
    if head is None or carried is None:
        return events, chain
    starts = head.starts
    if len(events) < starts[0] or len(chain) < starts[1]:
        return events, chain
    last = _last_line(events, starts[0]), _last_line(chain, starts[1])
    if not is_last(*last, carried.previous_hash_hex, head.count - carried.count):
        return events, chain
    return (
        events[: starts[0]] + carried.events + events[head.events_bytes :],
        chain[: starts[1]] + carried.chain + chain[head.chain_bytes :],
    )


def is_last(event: bytes, entry: bytes, chain_hash_hex: str, count: int) -> bool:
    """Whether these lines of both files are the last of ``count`` records that lead to that chain hash."""
    anchor = Anchor.parse(entry)
    said = (chain_hash_hex, event_hash(event), count - 1)
    return not count or (anchor is not None and (anchor.chain_hash_hex, anchor.event_hash_hex, anchor.index) == said)


def _last_line(raw: bytes, end: int) -> bytes:
    return raw[raw.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end].removesuffix(b"\n")


def slot_offset(head: Head) -> int:
    """Return the slot of a head in a file that is written whole; the head before it is in the other slot.

    A writer of one slot takes the slot without the newest head (``newest_head``): a torn write spares that.
    """
    return (head.count % 2) * SLOT_BYTES


def read_head(raw: bytes, public_key: Ed25519PublicKey) -> Head | None:
    """The newest head of the file whose signature verifies, or None when there is none.

    A slot that does not verify counts as torn while it was written, so its record was never acknowledged.
    """
    found = newest_head(raw, public_key)
    return None if found is None else found[0]


def newest_head(raw: bytes, public_key: Ed25519PublicKey) -> tuple[Head, int] | None:
    """``read_head``, with where its slot begins: the next head goes into the other.

    The slot that says that it is the newer is verified first, and most often alone.
    """
    starts = range(0, min(len(raw), HEAD_BYTES), SLOT_BYTES)
    for start in sorted(starts, key=lambda at: _said_index(raw[at : at + SLOT_BYTES]), reverse=True):
        head = read_signed_head(raw[start : start + SLOT_BYTES], public_key)
        if head is not None:
            return head, start
    return None


def _said_index(slot: bytes) -> int:
    """Return the last record of a slot, unverified."""
    try:
        index = json.loads(slot.partition(b"\n")[0])["index"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return -2
    return index if isinstance(index, int) else -2


def read_heads(raw: bytes, public_key: Ed25519PublicKey) -> list[Head]:
    """The heads of the file whose signatures verify, the newest first."""
    return sorted(_slots(raw, public_key), key=lambda head: head.count, reverse=True)


def head_is_whole(raw: bytes, public_key: Ed25519PublicKey) -> bool:
    """Whether both slots hold what the last two writes left: the newest head and the one before it, or before what it
    carries.

    After a write that was cut off they do not, until the next one; nor after the newest was blanked. The slots of a
    log without a record do not either: they may be the remains of a log that had one.
    """
    heads = read_heads(raw, public_key)
    if len(raw) != HEAD_BYTES or len(heads) != 2:
        return False
    newest, before = heads
    return newest.count - before.count in (1, newest.carried.count if newest.carried else 1)


def _slots(raw: bytes, public_key: Ed25519PublicKey) -> list[Head]:
    found = []
    for start in range(0, min(len(raw), HEAD_BYTES), SLOT_BYTES):
        head = read_signed_head(raw[start : start + SLOT_BYTES], public_key)
        if head is not None:
            found.append(head)
    return found


def public_key_file(public_key: Ed25519PublicKey) -> bytes:
    """``ledger.pub``: the raw public key as one line of hex, readable so that verify needs no secret."""
    return public_key.public_bytes_raw().hex().encode("ascii") + b"\n"


def read_public_key(raw: bytes) -> Ed25519PublicKey:
    """The key of ``ledger.pub``.

    Raises:
        errors.LedgerError: it is not one line with 64 hex digits.
    """
    try:
        text = raw.decode("ascii").strip()
        if len(text) != 2 * 32:  # bytes.fromhex passes over blanks within
            raise ValueError(text)
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    except ValueError as e:
        raise errors.LedgerError("the log's public key file is not one line of 64 hex digits") from e


def read_signed_head(slot: bytes, public_key: Ed25519PublicKey) -> Head | None:
    """The head of one slot or line, or None when its signature does not verify or it does not carry what it says."""
    claimed = _claimed(slot, key_id(public_key))
    if claimed is None:
        return None
    try:
        public_key.verify(claimed.signature, _DOMAIN + claimed.body)
    except InvalidSignature:
        return None
    carried, rest = claimed.carried, claimed.rest
    size = carried["events_bytes"] if carried else 0
    if rest[size:].strip(b" \n"):
        return None
    return _with_carried(claimed.head, carried["previous_hash_hex"], rest[:size]) if carried else claimed.head


def claimed_head(line: bytes, public_key: Ed25519PublicKey) -> Head | None:
    """Return the head of a line without a look at its signature. Verify a later head that its rows lead to."""
    claimed = _claimed(line, key_id(public_key))
    return claimed.head if claimed is not None else None


class _Claimed(NamedTuple):
    """Read a signed line, and the rows behind it in its slot."""

    head: Head
    body: bytes
    signature: bytes
    carried: dict[str, Any] | None
    rest: bytes


def _claimed(slot: bytes, signer: str) -> _Claimed | None:
    line, _, rest = slot.partition(b"\n")
    try:
        document = json.loads(line)
        signature = bytes.fromhex(document.pop("signature_hex"))
        head = Head(
            document["index"] + 1,
            document["chain_hash_hex"],
            document["events_bytes"],
            document["chain_bytes"],
            tuple((count, value) for count, value in document["marks"]),
        )
        body = _head_body(head, signer)
        if carries := document.get("carried"):
            body["carried"] = {name: carries[name] for name in ("previous_hash_hex", "events_bytes")}
        # Closed: only what sign_head writes is read, so no field can stand beside the signature.
        if body != document or [m[0] for m in head.marks] != _mark_counts(head.count):
            return None
        return _Claimed(head, _dump(body), signature, body.get("carried"), rest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _with_carried(head: Head, previous: str, events: bytes) -> Head | None:
    """The head with these event lines, where they lead from the chain hash before them to its own."""
    rows = read_rows(events)
    if not rows or len(rows) > head.count:
        return None
    event_hashes = [event_hash(row.line) for row in rows]
    hashes, entries = _linked(head.count - len(rows), previous, event_hashes, [row[1:] for row in rows])
    chain = "".join(entries).encode()
    if hashes[-1] != head.chain_hash_hex or len(events) > head.events_bytes or len(chain) > head.chain_bytes:
        return None
    return replace(head, carried=Carried(len(rows), previous, events, chain))


def _head_body(head: Head, signer: str) -> dict[str, Any]:
    return {
        "index": head.count - 1,
        "chain_hash_hex": head.chain_hash_hex,
        "events_bytes": head.events_bytes,
        "chain_bytes": head.chain_bytes,
        "marks": [list(mark) for mark in head.marks],
        "key_id": signer,
    }


def _mark_counts(count: int) -> list[int]:
    counts = []
    while count > 0:
        counts.append(count)
        count &= count - 1
    return counts


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
