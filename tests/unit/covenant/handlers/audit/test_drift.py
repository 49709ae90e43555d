"""Every kind of drift, provoked by the least that makes it; and what looks like drift and is none."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from covenant.handlers.audit import drift, drift_kinds
from covenant.handlers.audit.drift import NIL, ZERO_KEY, ZERO_SIGNATURE, Granted, History, Window
from covenant.stores.memory.interface import BadRow
from covenant.wire.parts import AuditEvent
from covenant.wire.types import AgentId, Capability, SettlementReceipt, SignedCapability, Tier
from tests.memory_kit import ALICE, BOB, name, receipt, record

ZERO = AgentId(display="zero@local", pubkey=ZERO_KEY)
NOW = 10**9


def event(kind: str, *, number: int = 1, at: int = NOW, issuer: AgentId = ALICE, **fields: Any) -> AuditEvent:
    return AuditEvent(id=name(5000 + number), timestamp_ms=at, issuer=issuer, kind={"type": kind, **fields})


def wrote(number: int, **other: Any) -> AuditEvent:
    return event("memory_written", number=number, memory_id=name(number), **other)


def dispatched(number: int, **other: Any) -> AuditEvent:
    return event("intent_dispatched", intent_id=name(number), status="ok", **other)


def grant(
    *, action: str = "memory.read", signature: str = "9" * 80, expires_at: int | None = None, **who: AgentId
) -> Granted:
    capability = Capability(
        subject=who.get("subject", ALICE),
        action=action,
        scope={},
        granted_by=who.get("granted_by", BOB),
        expires_at=expires_at,
    )
    return Granted(SignedCapability(capability=capability, signature=signature), NOW)


def tells(*log: AuditEvent, since_ms: int = 0) -> History:
    history = History()
    history.since(since_ms)
    for one in log:
        history.learn(one)
    return history


def sound(*records: Any, **other: Any) -> Window:
    """A window in which each record has its row and its receipt."""
    receipts = other.pop(
        "paying", [receipt(i, memory=r.created_at, payer=r.owner, settled_at=NOW) for i, r in enumerate(records)]
    )
    existing = {r.id for r in records} | set(other.pop("existing", ()))
    return Window(
        records=records,
        receipts=other.pop("receipts", receipts),
        paying=receipts,
        existing=frozenset(existing),
        parents=other.pop("parents", {r.id: r.parent for r in records}),
        history=tells(*(wrote(r.created_at) for r in records), *other.pop("log", ())),
        **other,
    )


def changed(one: SettlementReceipt, **changes: Any) -> Window:
    made = one.model_copy(update=changes)
    return Window(receipts=[made], existing=frozenset({name(1)}))


def granted(one: Granted) -> Window:
    return Window(grants=[one], history=tells(event("capability_granted", signature_b58=one.signed.signature)))


def row(**fields: Any) -> Window:
    return Window(events=[event("capability_check", **fields)])


PAID = receipt(1, memory=1, settled_at=NOW)
FULL = {"chain": "solana", "cluster": "devnet", "tx_sig": "s", "slot": 1, "confirmed_at": 1, "batch_id": "b"}

PROVOKED: dict[str, Window] = {
    "memory_row_invalid": Window(bad=[BadRow(3, name(1), ("metadata is no JSON",))]),
    "memory_nan_embedding": Window(bad=[BadRow(3, name(1), ("embedding holds a number that is not finite",))]),
    "memory_empty_text": sound(record(1, " ")),
    "memory_id_nil": Window(
        records=[record(1).model_copy(update={"id": NIL})],
        history=tells(event("memory_written", memory_id=NIL)),
        paying=[PAID.model_copy(update={"memory_record_id": NIL})],
    ),
    "memory_created_at_zero": sound(record(0)),
    "memory_owner_pubkey_zeroed": sound(record(1, owner=ZERO), receipts=[]),
    "memory_stale_parent": sound(record(1, parent=name(9))),
    "memory_self_parent": sound(record(1, parent=name(1))),
    "memory_parent_cycle": sound(
        record(1, parent=name(2)), existing=[name(2)], parents={name(1): name(2), name(2): name(1)}
    ),
    "memory_without_audit": Window(records=[record(1)], paying=[PAID], existing=frozenset({name(1)})),
    "audit_without_memory": Window(events=[wrote(1)], history=tells(wrote(1))),
    "intent_dispatched_duplicate": Window(events=[dispatched(1), dispatched(1)], existing=frozenset({name(1)})),
    "memory_without_receipt": sound(record(1), paying=[]),
    "memory_receipt_mismatch": sound(record(1, metadata={"receipt_id": "gone"})),
    "receipt_without_memory_record": Window(receipts=[receipt(1, memory=1, settled_at=NOW)]),
    "memory_receipt_duplicate": sound(record(1), paying=[PAID, receipt(2, memory=1, settled_at=NOW)]),
    "memory_receipt_owner_mismatch": sound(record(1), paying=[receipt(1, memory=1, payer=BOB, settled_at=NOW)]),
    "memory_receipt_resource_mismatch": changed(PAID, resource="compute"),
    "memory_receipt_settled_before_created": sound(
        record(1, created_at=1), paying=[receipt(1, memory=1, settled_at=0)], receipts=[]
    ),
    "receipt_id_nil": changed(PAID, id=NIL),
    "receipt_settled_at_zero": changed(PAID, settled_at=0),
    "receipt_confirmed_at_zero": changed(PAID, **{**FULL, "confirmed_at": 0}),
    "receipt_payer_pubkey_zeroed": changed(PAID, payer=ZERO),
    "receipt_credits_zero": changed(PAID, credits_consumed=0),
    "receipt_chain_partial": changed(PAID, chain="solana", cluster="devnet", batch_id="b"),
    "receipt_confirmed_without_chain": changed(PAID, **{**FULL, "batch_id": None}),
    "receipt_tx_sig_onchain_sig_diverged": changed(PAID, **FULL, onchain_sig="other"),
    "capability_without_audit": Window(grants=[grant()]),
    "capability_action_empty": granted(grant(action="")),
    "capability_expires_at_zero": granted(grant(expires_at=0)),
    "capability_signature_zeroed": granted(grant(signature=ZERO_SIGNATURE)),
    "capability_subject_pubkey_zeroed": granted(grant(subject=ZERO)),
    "capability_granted_by_pubkey_zeroed": granted(grant(granted_by=ZERO)),
    "audit_id_nil": Window(events=[event("daemon_stopped").model_copy(update={"id": NIL})]),
    "audit_timestamp_at_zero": Window(events=[event("daemon_stopped", at=0)]),
    "audit_issuer_pubkey_zeroed": Window(events=[event("daemon_stopped", issuer=ZERO)]),
    "audit_intent_id_nil": row(intent_id=NIL),
    **{
        f"audit_{field}_empty": row(**{field: ""})
        for field in (
            "intent_id",
            "status",
            "result_hash_hex",
            "agent_id",
            "action",
            "signature_b58",
            "subject_display",
            "memory_id",
            "matched_pattern",
            "reason",
            "task_id",
            "tool",
        )
    },
}


def test_every_kind_is_provoked() -> None:
    assert set(PROVOKED) == set(drift_kinds.KINDS)


@pytest.mark.parametrize("kind", drift_kinds.KINDS)
def test_least_that_makes_kind_makes_it_alone(kind: str) -> None:
    (one,) = drift.found(PROVOKED[kind])
    assert one.kind == kind
    assert one.message
    assert one.repair
    assert one.id
    # The mend names the thing, and never a placeholder for it.
    assert "<id>" not in one.repair


def test_what_is_sound_has_no_drift() -> None:
    window = sound(
        record(1),
        record(2, parent=name(1), owner=BOB, tier=Tier.LONGTERM),
        record(3, parent=name(2), metadata={"receipt_id": receipt(2, settled_at=0).id}),
        grants=[grant()],
        events=[wrote(1), dispatched(2)],
        log=[event("capability_granted", signature_b58=grant().signed.signature)],
    )
    assert drift.found(window) == []
    assert drift.found(Window()) == []
    whole = {**FULL, "onchain_sig": "s", "merkle_root": "r"}
    assert drift.found(changed(PAID, **whole)) == []
    assert drift.found(changed(PAID, batch_id="b", merkle_root="r")) == []
    # A run may have used nothing, and what no agent did costs nothing.
    free = receipt(4, settled_at=NOW).model_copy(update={"resource": "compute", "credits_consumed": 0})
    assert drift.found(Window(receipts=[free])) == []


@pytest.mark.parametrize(
    "told",
    [
        event("memory_purged", tier=None, before_ms=NOW + 1),
        event("memory_repair_applied", memory_id=name(1), action="delete_record", changed=True),
        event("memory_compaction_applied", changed=True, deleted=[name(1)]),
        event("memory_write_ignored", memory_id=name(1)),
        event("intent_failed", intent_id=name(1), stage="memory"),
    ],
    ids=lambda e: e.kind["type"],
)
def test_what_log_says_was_deleted_or_never_kept_is_not_missed(told: AuditEvent) -> None:
    rows = [dispatched(1), told]
    assert drift.found(Window(events=rows[:1], history=tells(*rows))) == []


@pytest.mark.parametrize(
    "told",
    [
        event("memory_purged", tier=None, before_ms=NOW - 10**6),
        event("memory_repair_applied", memory_id=name(1), action="delete_record", changed=False),
        event("memory_repair_applied", memory_id=name(1), action="detach_parent", changed=True),
        event("memory_compaction_applied", changed=False, deleted=[name(1)]),
        event("memory_compaction_applied", changed=True, deleted=1),
        event("intent_failed", intent_id=name(1), stage="run"),
    ],
    ids=lambda e: str(e.kind),
)
def test_what_deleted_nothing_excuses_nothing(told: AuditEvent) -> None:
    rows = [dispatched(1), told]
    (one,) = drift.found(Window(events=rows[:1], history=tells(*rows)))
    assert one.kind == "audit_without_memory"


def test_what_is_older_than_log_is_not_judged() -> None:
    unjudged = Window(records=[record(1)], paying=[PAID], existing=frozenset({name(1)}), grants=[grant()])
    assert len(drift.found(unjudged)) == 2
    for one in (
        Window(records=unjudged.records, paying=[PAID], grants=[grant()], history=tells(since_ms=NOW + 1)),
        Window(
            records=unjudged.records,
            paying=[PAID],
            grants=[grant()],
            history=tells(event("audit_purged", before_ms=NOW + 1)),
        ),
    ):
        assert drift.found(one) == []
    undated = Granted(grant().signed, 0)
    assert drift.found(Window(grants=[undated])) == []


def test_same_drift_is_told_once_and_in_order_of_table() -> None:
    window = Window(
        records=[record(2, " "), record(1, " ")], events=[dispatched(5), dispatched(5)], existing=frozenset({name(5)})
    )
    kinds = [one.kind for one in drift.found(window)]
    assert kinds == sorted(kinds, key=list(drift_kinds.KINDS).index)
    assert [one.id for one in drift.found(window)][:2] == [name(1), name(2)]
    assert kinds.count("intent_dispatched_duplicate") == 1


def test_page_shows_table(clone: pathlib.Path) -> None:
    page = (clone / "docs/drift.md").read_text().splitlines()
    shown = [line for line in page if line.startswith(tuple(f"| {check} |" for check in drift_kinds.CHECKS))]
    mends = [f"| {k.check} | {name} | {k.repair.replace('<id>', 'ID')} |" for name, k in drift_kinds.KINDS.items()]
    assert shown == mends
