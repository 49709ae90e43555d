"""Verify an audit log: which record of which file was changed, removed, swapped, inserted or cut off.

The two files are three witnesses together with the signed head: the events, the chain over them, and what
the head says about the chain's end. Whichever file folds to the head's chain hash is the one that was
signed, record by record, so it is the reference that the other is compared with.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Struct, structs

from policy.audit_log import chain as audit_log_chain
from policy.audit_log import truncation

Change = Literal["changed", "removed", "swapped", "inserted", "truncated"]
File = Literal["events", "chain", "both", "head"]

# Version 1's names of failures. What an event lacks in the chain is a missing entry, what the chain has
# beyond the events is a dangling anchor; seen from the chain file the same changes are the other way round.
_KINDS: dict[tuple[File, Change], str] = {
    ("events", "changed"): "entry_mismatch",
    ("events", "swapped"): "entry_mismatch",
    ("events", "inserted"): "entry_missing",
    ("events", "removed"): "dangling_anchors",
    ("events", "truncated"): "dangling_anchors",
    ("chain", "changed"): "entry_mismatch",
    ("chain", "swapped"): "entry_mismatch",
    ("chain", "inserted"): "dangling_anchors",
    ("chain", "removed"): "entry_missing",
    ("chain", "truncated"): "entry_missing",
    ("both", "changed"): "head_mismatch",
    ("both", "swapped"): "head_mismatch",
    ("both", "inserted"): "head_mismatch",
    ("both", "removed"): "head_mismatch",
    ("both", "truncated"): "head_mismatch",
}


# Indices up to here, and up to this many times the records that are there, are read as records that were lost.
_LOST_AT_LEAST, _LOST_TIMES = 65_536, 10


_TORN_SLOT = "one of the head's two slots does not verify: its write was cut off, or it was overwritten"
# The first head is signed before the first record, and stays in its slot until the second.
_EMPTY = "the log is empty: whether it never had a record, or its only one was taken away, does not show"


# How every line of ours begins. A line that begins otherwise may still be an event; it is looked at more closely.
_OPENING = re.compile(rb'\{"id":"([0-9A-Za-z-]+)","timestamp_ms":(0|[1-9][0-9]{0,19}),"issuer":\{')


class Failure(Struct, frozen=True):
    """One thing that is wrong. ``index`` counts records from 0; None where no single record is meant."""

    kind: str
    file: File
    message: str
    change: Change | None = None
    index: int | None = None
    event_id: str | None = None

    def text(self) -> str:
        """The failure in one line, as version 1 sends it."""
        return f"{self.kind}: {self.message}" + (f" (event {self.event_id})" if self.event_id else "")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of ``verify``. ``notes`` are no failures: a torn tail beyond the head, a torn head slot."""

    events: int
    anchors: int
    valid: bool
    root_hash_hex: str
    failures: tuple[Failure, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as an object."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


class _Log(Struct, frozen=True):
    """Both files, read: one hash a record, and what could be parsed of each."""

    hashes: tuple[str, ...]
    ids: tuple[tuple[str, int] | None, ...]
    anchors: tuple[audit_log_chain.Anchor | None, ...]

    @property
    def anchored(self) -> tuple[str, ...]:
        """The chain file's event hashes; an unreadable entry matches nothing."""
        return tuple(a.event_hash_hex if a else f"unreadable {i}" for i, a in enumerate(self.anchors))


def verify(events: bytes, chain: bytes, head: bytes | None, public_key: Ed25519PublicKey | None) -> Report:
    """Compare the events file, the chain file and the head file with each other.

    (1) Read the files; a last line without newline was never acknowledged unless the head names it.
    (2) The head must verify under the log's key.
    (3) Find the reference: the file whose first ``count`` records fold to the head's chain hash.
    (4) Compare each file with the reference, record by record, and each anchor with its event.
    (5) Without a reference both files were touched: report what the files say against each other, and the
        range in which they left what was signed.
    (6) A record that says what was cut stands at the beginning, and is signed.

    Where the chain that the events make is byte for byte the chain file, and ends in the signed head, (1) to (5) have
    nothing to find: that is tried first, at a fraction of their cost.
    """
    quick = _as_signed(events, chain, head, public_key)
    if quick is not None:
        return quick
    # (1)
    lines, torn_events = _split(events)
    entries, torn_chain = _split(chain)
    log = _Log(
        tuple(audit_log_chain.event_hash(line) for line in lines),
        tuple(_identity(line) for line in lines),
        tuple(audit_log_chain.Anchor.parse(entry) for entry in entries),
    )
    failures = [
        Failure("event_parse_error", "events", f"record {i} is not an event", index=i)
        for i, identity in enumerate(log.ids)
        if identity is None
    ]
    if len(lines) != len(entries):
        failures.append(Failure("length_mismatch", "both", f"{len(lines)} events, {len(entries)} chain entries"))
    # (2)
    signed, problem = _signed_head(head, public_key, empty=not (lines or entries))
    failures += [problem] if problem else []
    # (3)
    reference = _reference(log, signed)
    if reference is not None:
        # (4)
        failures += _against_reference(log, reference)
    else:
        # (5)
        failures += _without_reference(log, signed)
    # (6)
    failures += rebase_failures(lines, public_key)
    notes = tuple(
        f"the {name} file ends in {size} bytes without newline, which the next start sets aside"
        for name, size in (("events", torn_events), ("chain", torn_chain))
        if size
    )
    if head and public_key and signed is not None and not audit_log_chain.head_is_whole(head, public_key):
        notes += (_TORN_SLOT if signed.count else _EMPTY,)
    return Report(
        len(lines), len(entries), not failures, audit_log_chain.fold(log.hashes), tuple(_merged(failures)), notes
    )


def follow(lines: Iterable[bytes], index: int, previous: str) -> tuple[bytes, int, str] | None:
    """The chain lines that the events make from an index and a hash on, with the index and the hash behind them; None
    where a line is not one of ours."""
    entries = []
    sha256, opening = hashlib.sha256, _OPENING.match
    for line in lines:
        found = opening(line)
        if found is None:
            return None
        event = sha256(line).hexdigest()
        after = sha256(f"{previous}\n{event}".encode()).hexdigest()
        entries.append(
            f'{{"index":{index},"event_id":"{found[1].decode()}","timestamp_ms":{found[2].decode()},'
            f'"event_hash_hex":"{event}","previous_hash_hex":"{previous}","chain_hash_hex":"{after}"}}\n'
        )
        previous = after
        index += 1
    return "".join(entries).encode("ascii"), index, previous


def rebase_failures(lines: Sequence[bytes], public_key: Ed25519PublicKey | None) -> list[Failure]:
    """Find faults of re-base records: one may stand, signed, at the beginning, and nowhere else."""
    failures = []
    for index, line in enumerate(lines):
        if truncation.NEEDLE not in line:
            continue
        if index:
            failures.append(
                Failure("rebase_misplaced", "events", f"record {index} says that the log was cut", index=index)
            )
        elif truncation.frontier(line, public_key) is None:
            failures.append(Failure("rebase_invalid", "events", "the record of the cut is not the log key's", index=0))
    return failures


def _as_signed(events: bytes, chain: bytes, head: bytes | None, key: Ed25519PublicKey | None) -> Report | None:
    """The report of a log in which there is nothing to find; None when it has to be looked at more closely."""
    signed = audit_log_chain.read_head(head, key) if head is not None and key is not None else None
    if signed is None or head is None or key is None or not audit_log_chain.head_is_whole(head, key):
        return None
    if (len(events), len(chain)) != (signed.events_bytes, signed.chain_bytes):
        return None
    lines = events.split(b"\n")
    if lines.pop():
        return None
    made = follow(lines, 0, audit_log_chain.GENESIS)
    if made is None or made[0] != chain or made[1:] != (signed.count, signed.chain_hash_hex):
        return None
    cuts = rebase_failures(lines, key) if truncation.NEEDLE in events else []
    return Report(len(lines), len(lines), not cuts, signed.chain_hash_hex, tuple(cuts))


def _signed_head(
    raw: bytes | None, public_key: Ed25519PublicKey | None, *, empty: bool
) -> tuple[audit_log_chain.Head | None, Failure | None]:
    if raw is None or public_key is None:
        # No head, no key and no record is a log that nothing was ever written to; the caller decides what that is.
        # The key is written after the first head, so a key alone is what is left of a log.
        what = "signed head" if raw is None else "public key"
        missing = Failure("head_missing", "head", f"the log has no {what}, so a cut cannot be seen")
        return None, None if empty and raw is None and public_key is None else missing
    head = audit_log_chain.read_head(raw, public_key)
    if head is None:
        return None, Failure("head_invalid", "head", "no head record verifies under the log's key")
    return head, None


def _reference(log: _Log, head: audit_log_chain.Head | None) -> Sequence[str] | None:
    if head is None:
        return None
    for candidate in (log.hashes, log.anchored):
        signed = candidate[: head.count]
        if len(signed) == head.count and audit_log_chain.fold(signed) == head.chain_hash_hex:
            return signed
    return None


def _against_reference(log: _Log, reference: Sequence[str]) -> list[Failure]:
    failures = [_failure("events", *found) for found in differences(log.hashes, reference)]
    chain = differences(log.anchored, reference)
    failures += [_failure("chain", *found) for found in chain]
    named = {index for _, index in chain}
    identities = dict(zip(log.hashes, log.ids, strict=True))
    place = {value: i for i, value in enumerate(reference)}
    after = [audit_log_chain.GENESIS]
    for value in reference:
        after.append(audit_log_chain.chain_hash(after[-1], value))
    for anchor in log.anchors:
        index = place.get(anchor.event_hash_hex) if anchor else None
        if anchor is None or index is None or index in named:
            continue
        identity = identities.get(anchor.event_hash_hex) or (anchor.event_id, anchor.timestamp_ms)
        if anchor != audit_log_chain.Anchor(index, *identity, reference[index], after[index], after[index + 1]):
            failures.append(_failure("chain", "changed", index))
    return [_with_id(failure, log) for failure in failures]


def _without_reference(log: _Log, head: audit_log_chain.Head | None) -> list[Failure]:
    """Neither file is the signed one, or nothing was signed: compare them with each other."""
    failures = [_failure("events", *found) for found in differences(log.hashes, log.anchored)]
    failures += _broken_links(log)
    if head is None:
        return [_with_id(failure, log) for failure in failures]
    # How far both files still are what was signed: the marks are chain hashes at some counts.
    chained = [audit_log_chain.GENESIS]
    for value in log.hashes:
        chained.append(audit_log_chain.chain_hash(chained[-1], value))
    intact, broken = 0, head.count
    for count, value in sorted(head.marks):
        if count >= len(chained) or chained[count] != value:
            broken = count
            break
        intact = count
    records = len(log.hashes)
    change: Change = "changed" if records == head.count else "removed" if records < head.count else "inserted"
    where = f"between records {intact} and {broken - 1}"
    if change == "removed" and broken > records:
        # No mark stands between here and the cut: removed just before the end would look the same.
        change, where = "truncated", f"at the end, after record {intact - 1} at the earliest"
    message = (
        f"the head signs {head.count} records, the files hold {records} and do not end in its hash: "
        f"{change} in both {where}; records below {intact} are as signed"
    )
    named = [f for f in failures if f.file in ("both", "chain") and f.index is not None]
    index = None if named else records if change == "truncated" else intact
    failures.append(Failure("head_mismatch", "both", message, None if named else change, index))
    return [_with_id(failure, log) for failure in failures]


def _broken_links(log: _Log) -> list[Failure]:
    """Find contradictions in the chain file: entries out of order, and links that do not follow."""
    readable = [a for a in log.anchors if a]
    # Beyond that an index is made up, and listing what lies between would only cost memory.
    most = _LOST_AT_LEAST + _LOST_TIMES * (len(log.anchors) + len(log.hashes))
    failures = [_failure("chain", "changed", i) for i, a in enumerate(log.anchors) if a and a.index > most]
    readable = [a for a in readable if a.index <= most]
    if not readable:
        return failures
    # Entries carry their own index, so lines removed or swapped without making the chain anew still show it.
    found = differences([a.index for a in readable], range(max(a.index for a in readable) + 1))
    failures += [_failure("both", *item) for item in found]
    previous: audit_log_chain.Anchor | None = None
    for anchor in readable:
        expected = previous.chain_hash_hex if previous else audit_log_chain.GENESIS
        follows = anchor.index == (previous.index + 1 if previous else 0)
        linked = anchor.previous_hash_hex == expected or not follows
        sound = anchor.chain_hash_hex == audit_log_chain.chain_hash(anchor.previous_hash_hex, anchor.event_hash_hex)
        if not (linked and sound):
            in_events = anchor.event_hash_hex in log.hashes
            failures.append(_failure("both" if in_events else "chain", "changed", anchor.index))
        previous = anchor
    return failures


def differences(have: Sequence[Hashable], want: Sequence[Hashable]) -> list[tuple[Change, int]]:
    """How ``have`` differs from ``want``: (change, index), the index in ``want`` except for an insertion.

    Both are sequences of values that are unique in ``want``. What stands in the same order is kept; of
    the rest, two in each other's place are swapped, others that are known are moved (called swapped), and
    within a gap the unknown are paired with the missing as changed.
    """
    start = 0
    while start < min(len(have), len(want)) and have[start] == want[start]:
        start += 1
    shared = 0
    while shared < min(len(have), len(want)) - start and have[-1 - shared] == want[-1 - shared]:
        shared += 1
    stop_have, stop_want = len(have) - shared, len(want) - shared

    place = {want[q]: q for q in range(start, stop_want)}
    found: dict[int, int] = {}
    for p in range(start, stop_have):
        q = place.pop(have[p], None)
        if q is not None:
            found[p] = q
    crossed = {p for p, q in found.items() if p != q and found.get(q) == p}
    kept = _longest_increasing([(p, q) for p, q in found.items() if p not in crossed])
    moved = sorted(q for p, q in found.items() if p not in kept)
    out: list[tuple[Change, int]] = [("swapped", q) for q in moved]

    # What is missing after the last record that is there was cut off, not taken out.
    last_known = len(want) if shared else max(found.values(), default=start - 1)
    kept_p, kept_q = sorted(kept), sorted(kept.values())
    gaps: dict[int, tuple[list[int], list[int]]] = {}
    for p in range(start, stop_have):
        if p not in found:
            gaps.setdefault(bisect.bisect(kept_p, p), ([], []))[0].append(p)
    for q in sorted(place.values()):
        gaps.setdefault(bisect.bisect(kept_q, q), ([], []))[1].append(q)
    for _, (unknown, missing) in sorted(gaps.items()):
        pairs = min(len(unknown), len(missing))
        out += [("changed", q) for q in missing[:pairs]]
        out += [("inserted", p) for p in unknown[pairs:]]
        out += [("truncated" if q > last_known else "removed", q) for q in missing[pairs:]]
    return out


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The longest subsequence of (p, q), p ascending, whose q ascend: patience sorting, O(n log n)."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for i, (_, q) in enumerate(pairs):
        at = bisect.bisect_left(tails, q)
        before.append(ends[at - 1] if at else -1)
        tails[at : at + 1], ends[at : at + 1] = [q], [i]
    kept = {}
    i = ends[-1] if ends else -1
    while i >= 0:
        kept[pairs[i][0]] = pairs[i][1]
        i = before[i]
    return kept


def _failure(file: File, change: Change, index: int) -> Failure:
    where = {"events": "in the events file", "chain": "in the chain file", "both": "in both files"}[file]
    return Failure(_KINDS[file, change], file, f"record {index} {change} {where}", change, index)


def _merged(failures: Sequence[Failure]) -> list[Failure]:
    """The same change of the same record in both files becomes one failure; doubles go."""
    chain = {(f.change, f.index) for f in failures if f.file == "chain" and f.change}
    events = {(f.change, f.index) for f in failures if f.file == "events" and f.change}
    both = {key for key in chain & events if key[1] is not None}
    out: dict[Failure, None] = {}
    for failure in failures:
        if failure.change and failure.index is not None and (failure.change, failure.index) in both:
            found = _failure("both", failure.change, failure.index)
            out[structs.replace(found, event_id=failure.event_id)] = None
        else:
            out[failure] = None
    return list(out)


def _with_id(failure: Failure, log: _Log) -> Failure:
    """The event id beside a record's number, taken from the file that was not touched where there is one."""
    index = failure.index
    if index is None or failure.event_id is not None:
        return failure
    anchors = {a.index: a.event_id for a in log.anchors if a}
    identity = log.ids[index] if failure.file == "chain" and index < len(log.ids) else None
    found = identity[0] if identity else anchors.get(index)
    return structs.replace(failure, event_id=found)


def _split(raw: bytes) -> tuple[list[bytes], int]:
    """Complete lines without their newline, and how many bytes follow the last newline."""
    *lines, rest = raw.split(b"\n")
    return lines, len(rest)


def _identity(line: bytes) -> tuple[str, int] | None:
    try:
        event = json.loads(line)
        event_id, timestamp = event["id"], event["timestamp_ms"]
        well_formed = isinstance(event["kind"]["type"], str) and "issuer" in event
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (event_id, timestamp) if well_formed and type(event_id) is str and type(timestamp) is int else None
