"""Where the stores disagree: the pure half that finds each of ``drift_kinds.KINDS``.

Nothing is judged that cannot be known: what was made before the log was cut, and what the log says was deleted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from covenant.handlers.audit.drift_kinds import KINDS, drift
from covenant.stores.memory.interface import BadRow
from covenant.wire.parts import AuditEvent, Drift
from covenant.wire.types import MemoryRecord, SettlementReceipt, SignedCapability

NIL: Final = "00000000-0000-0000-0000-000000000000"
# Base58 of zeros: 32 bytes are a key, 64 a signature.
ZERO_KEY: Final = "1" * 32
ZERO_SIGNATURE: Final = "1" * 64
# A record's row and receipt come after it, once its vector was made: by how much at most.
_SLACK_MS: Final = 120_000


_NEVER_EMPTY: Final = tuple(
    name.removeprefix("audit_").removesuffix("_empty")
    for name in KINDS
    if name.startswith("audit_") and name.endswith("_empty")
)
_ON_CHAIN: Final = ("chain", "cluster", "tx_sig", "slot", "confirmed_at")


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant, and when it was made. 0: the time was not written."""

    signed: SignedCapability
    granted_at_ms: int


class History:
    """The writes, deletions and purges that the log tells of, in any order. Rows are learnt one at a time, so that none
    is held. ``operator`` is the key whose purge covers all records; a purge by another key covers its own."""

    def __init__(self, operator: str = "") -> None:
        self._operator = operator
        self.learnt = 0
        self.written: set[str] = set()
        self.granted: set[str] = set()
        self.unkept: set[str] = set()
        self._deleted: set[str] = set()
        self._purged_before: dict[str, int] = {}
        self._told_since = 0

    def since(self, moment_ms: int) -> None:
        """Judge nothing that is older."""
        self._told_since = max(self._told_since, moment_ms)

    def learn(self, event: AuditEvent) -> None:
        """Take in one row that tells of an act."""
        self.learnt += 1
        row = event.kind
        match row.get("type"):
            case "intent_dispatched":
                self.written.add(str(row.get("intent_id")))
            case "memory_written":
                self.written.add(str(row.get("memory_id")))
            case "memory_write_ignored":
                self.unkept.add(str(row.get("memory_id")))
            case "intent_failed" if row.get("stage") == "memory":
                self.unkept.add(str(row.get("intent_id")))
            case "capability_granted" | "capability_attenuated":
                self.granted.add(str(row.get("signature_b58")))
            case "memory_repair_applied" if row.get("action") == "delete_record" and row.get("changed"):
                self._deleted.add(str(row.get("memory_id")))
            case "memory_compaction_applied" if row.get("changed"):
                # Version 1 wrote numbers here.
                gone = row.get("deleted")
                self._deleted.update(gone if isinstance(gone, list | tuple) else ())
            case "memory_purged":
                who = event.issuer.pubkey
                self._purged_before[who] = max(self._purged_before.get(who, 0), _int(row.get("before_ms")))
            case "audit_purged":
                self.since(_int(row.get("before_ms")))

    def tells_of(self, moment_ms: int) -> bool:
        """Whether a row about something of that moment would still be there."""
        return moment_ms >= self._told_since

    def deleted(self, record_id: str, owner: str, told_ms: int) -> bool:
        """Whether a record of this owner, told of at that moment, was deleted for all that the log says."""
        before = max(self._purged_before.get(who, 0) for who in (owner, self._operator))
        purged = bool(before) and told_ms - _SLACK_MS < before
        return purged or record_id in self._deleted


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True)
class Window:
    """The newest entries of each store.

    ``records``, ``receipts``, ``grants`` and ``events`` are the newest of each. ``existing`` are the ids among those
    that these name which memory has; ``parents`` maps ids to parents, as far as chains were followed; ``paying`` are
    all receipts that name one of the records or are named by one. ``history`` is what the log tells of acts.
    """

    records: Sequence[MemoryRecord] = ()
    bad: Sequence[BadRow] = ()
    receipts: Sequence[SettlementReceipt] = ()
    grants: Sequence[Granted] = ()
    events: Sequence[AuditEvent] = ()
    existing: frozenset[str] = frozenset()
    parents: Mapping[str, str | None] = field(default_factory=dict)
    paying: Sequence[SettlementReceipt] = ()
    history: History = field(default_factory=History)


def found(window: Window) -> list[Drift]:
    """All drift in the window, in the order of ``KINDS``, then by id."""
    history = window.history
    finders: tuple[Iterator[Drift], ...] = (
        _rows(window),
        _parents(window),
        _memory_audit(window, history),
        _records_receipts(window),
        _receipts_records(window, history),
        _receipts(window),
        _capabilities(window, history),
        _audit_rows(window),
    )
    order = {name: at for at, name in enumerate(KINDS)}
    every = {(one.kind, one.id, one.message): one for finder in finders for one in finder}
    return sorted(every.values(), key=lambda one: (order[one.kind], one.id or "", one.message))


def _rows(window: Window) -> Iterator[Drift]:
    for bad in window.bad:
        nan = any("not finite" in problem for problem in bad.problems)
        kind = "memory_nan_embedding" if nan else "memory_row_invalid"
        yield drift(kind, bad.id, f"row {bad.row} is no record: {'; '.join(bad.problems)[:400]}")
    for record in window.records:
        if not record.text.strip():
            yield drift("memory_empty_text", record.id, "the record has no text")
        if record.id == NIL:
            yield drift("memory_id_nil", record.id, "the record's id is the nil UUID")
        if record.created_at == 0:
            yield drift("memory_created_at_zero", record.id, "the record was made at time 0")
        if record.owner.pubkey == ZERO_KEY:
            yield drift("memory_owner_pubkey_zeroed", record.id, "the owner's key is all zeros")
        if not all(map(math.isfinite, record.embedding)):
            yield drift("memory_nan_embedding", record.id, "the embedding holds a number that is not finite")


def _parents(window: Window) -> Iterator[Drift]:
    for record in window.records:
        if record.parent is None:
            continue
        if record.parent == record.id:
            yield drift("memory_self_parent", record.id, "the record is its own parent")
        elif record.parent not in window.existing:
            yield drift("memory_stale_parent", record.id, f"its parent `{record.parent}` is not there")
        elif _returns(record.id, window.parents):
            yield drift("memory_parent_cycle", record.id, "its parents lead back to it")


def _returns(start: str, parents: Mapping[str, str | None]) -> bool:
    at, seen = parents.get(start), {start}
    while at is not None and at not in seen:
        seen.add(at)
        at = parents.get(at)
    return at == start


def _memory_audit(window: Window, history: History) -> Iterator[Drift]:
    for record in window.records:
        if record.id not in history.written and history.tells_of(record.created_at):
            yield drift("memory_without_audit", record.id, "no row of the log tells of the record")
    told = [e for e in window.events if e.kind.get("type") in ("intent_dispatched", "memory_written")]
    for event in told:
        record_id = str(event.kind.get("intent_id", event.kind.get("memory_id")))
        gone = record_id not in window.existing and record_id not in history.unkept
        kept = event.kind.get("status", "ok") == "ok"
        if gone and kept and not history.deleted(record_id, event.issuer.pubkey, event.timestamp_ms):
            yield drift("audit_without_memory", record_id, f"row `{event.id}` tells of a record that is not there")
    counts = Counter(str(e.kind.get("intent_id")) for e in told if e.kind["type"] == "intent_dispatched")
    for intent_id, count in counts.items():
        if count > 1:
            yield drift("intent_dispatched_duplicate", intent_id, f"{count} rows tell of the same intent")


def _records_receipts(window: Window) -> Iterator[Drift]:
    by_record = Counter(r.memory_record_id for r in window.paying if r.memory_record_id is not None)
    receipts = {receipt.id: receipt for receipt in window.paying}
    for record in window.records:
        named = receipt_of(record)
        paying = receipts.get(named or "")
        if named is None and record.id not in by_record:
            yield drift("memory_without_receipt", record.id, "no receipt names the record")
        elif named is not None and (paying is None or paying.memory_record_id not in (None, record.id)):
            yield drift("memory_receipt_mismatch", record.id, f"it names receipt `{named}`, which is not its own")
        if by_record[record.id] > 1:
            message = f"{by_record[record.id]} receipts name the record"
            yield drift("memory_receipt_duplicate", record.id, message)


def receipt_of(record: MemoryRecord) -> str | None:
    """The receipt that a record's metadata names."""
    named = record.metadata.get("receipt_id") if isinstance(record.metadata, dict) else None
    return named if isinstance(named, str) else None


def _receipts_records(window: Window, history: History) -> Iterator[Drift]:
    for receipt in window.receipts:
        named = receipt.memory_record_id
        if receipt.resource == "memory" and named is None:
            yield drift("receipt_without_memory_record", receipt.id, "the receipt names no record")
        elif (
            named is not None
            and named not in window.existing
            and not history.deleted(named, receipt.payer.pubkey, receipt.settled_at)
        ):
            yield drift("receipt_without_memory_record", receipt.id, f"its record `{named}` is not there")
        if named is not None and receipt.resource != "memory":
            message = f"it names a record and is for `{receipt.resource}`"
            yield drift("memory_receipt_resource_mismatch", receipt.id, message)
    records = {record.id: record for record in window.records}
    for receipt in window.paying:
        paid = records.get(receipt.memory_record_id or "")
        if paid is not None and paid.owner.pubkey != receipt.payer.pubkey:
            yield drift("memory_receipt_owner_mismatch", receipt.id, f"who paid does not own `{paid.id}`")
        if paid is not None and receipt.settled_at < paid.created_at:
            yield drift("memory_receipt_settled_before_created", receipt.id, f"it is older than `{paid.id}`")


_RECEIPT_TESTS: Final[Mapping[str, tuple[Callable[[SettlementReceipt], bool], str]]] = {
    "receipt_id_nil": (lambda r: r.id == NIL, "the receipt's id is the nil UUID"),
    "receipt_settled_at_zero": (lambda r: r.settled_at == 0, "it was settled at time 0"),
    "receipt_confirmed_at_zero": (lambda r: r.confirmed_at == 0, "it was confirmed at time 0"),
    "receipt_payer_pubkey_zeroed": (lambda r: r.payer.pubkey == ZERO_KEY, "the payer's key is all zeros"),
    # A run, or an intent without an agent, may have used nothing. Each other receipt has a cost.
    "receipt_credits_zero": (
        lambda r: r.credits_consumed == 0 and r.resource != "compute",
        "it is for no credits",
    ),
    "receipt_chain_partial": (
        lambda r: 0 < sum(getattr(r, name) is not None for name in _ON_CHAIN) < len(_ON_CHAIN),
        "it has some of what a chain gives, and not all",
    ),
    "receipt_confirmed_without_chain": (
        lambda r: r.confirmed_at is not None and (r.chain is None or r.batch_id is None),
        "it is confirmed, and names no chain or batch",
    ),
    "receipt_tx_sig_onchain_sig_diverged": (
        lambda r: r.onchain_sig is not None and r.onchain_sig != r.tx_sig,
        "tx_sig and onchain_sig, two names of one thing, are two",
    ),
}


def _receipts(window: Window) -> Iterator[Drift]:
    for receipt in window.receipts:
        for kind, (is_wrong, message) in _RECEIPT_TESTS.items():
            if is_wrong(receipt):
                yield drift(kind, receipt.id, message)


def _capabilities(window: Window, history: History) -> Iterator[Drift]:
    for one in window.grants:
        capability, signature = one.signed.capability, one.signed.signature
        dated = one.granted_at_ms > 0 and history.tells_of(one.granted_at_ms)
        if dated and signature not in history.granted:
            yield drift("capability_without_audit", signature, "no row of the log tells of the grant")
        if not capability.action.strip():
            yield drift("capability_action_empty", signature, "the grant is for no action")
        if capability.expires_at == 0:
            yield drift("capability_expires_at_zero", signature, "the grant ended at time 0")
        if signature == ZERO_SIGNATURE:
            yield drift("capability_signature_zeroed", signature, "the signature is all zeros")
        if capability.subject.pubkey == ZERO_KEY:
            yield drift("capability_subject_pubkey_zeroed", signature, "the subject's key is all zeros")
        if capability.granted_by.pubkey == ZERO_KEY:
            yield drift("capability_granted_by_pubkey_zeroed", signature, "the grantor's key is all zeros")


def _audit_rows(window: Window) -> Iterator[Drift]:
    for event in window.events:
        if event.id == NIL:
            yield drift("audit_id_nil", event.id, "the row's id is the nil UUID")
        if event.timestamp_ms == 0:
            yield drift("audit_timestamp_at_zero", event.id, "the row was written at time 0")
        if event.issuer.pubkey == ZERO_KEY:
            yield drift("audit_issuer_pubkey_zeroed", event.id, "the issuer's key is all zeros")
        if event.kind.get("intent_id") == NIL:
            yield drift("audit_intent_id_nil", event.id, "the intent's id is the nil UUID")
        for name in _NEVER_EMPTY:
            if event.kind.get(name) == "":
                yield drift(f"audit_{name}_empty", event.id, f"`{name}` of a row `{event.kind.get('type')}` is empty")
