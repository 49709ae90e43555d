"""Decoders as a client of version 1 has them: required fields with their types, closed sets of words, unknown fields
ignored. A field that may be null may be missing too. ``covenant-v1.md`` names the fields, sections 4, 6 and 10."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from policy import base58

Decoder = Callable[[Any], None]
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_DISPLAY = re.compile(r"[A-Za-z0-9_.-]+@[A-Za-z0-9_.-]+")


def text(value: Any) -> None:
    assert type(value) is str, value


def number(value: Any) -> None:
    assert type(value) is int, value
    assert 0 <= value < 2**64, value


def signed(value: Any) -> None:
    assert type(value) is int, value
    assert -(2**31) <= value < 2**31, value


def real(value: Any) -> None:
    assert type(value) in (int, float), value


def flag(value: Any) -> None:
    assert type(value) is bool, value


def anything(value: Any) -> None:
    pass


def uuid(value: Any) -> None:
    assert type(value) is str, value
    assert _UUID.fullmatch(value), value


def display(value: Any) -> None:
    assert type(value) is str, value
    assert _DISPLAY.fullmatch(value), value


def key(value: Any) -> None:
    base58.decode(value, length=32)


def one_of(*words: str) -> Decoder:
    def decode(value: Any) -> None:
        assert value in words, f"unknown variant `{value}`"

    return decode


def listed(of: Decoder) -> Decoder:
    def decode(value: Any) -> None:
        assert type(value) is list, value
        for item in value:
            of(item)

    return decode


def counts(value: Any) -> None:
    assert type(value) is dict, value
    for count in value.values():
        number(count)


def maybe(of: Decoder) -> Decoder:
    def decode(value: Any) -> None:
        if value is not None:
            of(value)

    decode.optional = True  # type: ignore[attr-defined]
    return decode


def null_or(of: Decoder) -> Decoder:
    """Decode null or ``of``, where the name must be there."""

    def decode(value: Any) -> None:
        if value is not None:
            of(value)

    return decode


def struct(**fields: Decoder) -> Decoder:
    def decode(value: Any) -> None:
        assert type(value) is dict, value
        for name, of in fields.items():
            assert name in value or getattr(of, "optional", False), f"missing field `{name}` of {value}"
            of(value.get(name))

    return decode


def tagged(tag: str, **kinds: Decoder) -> Decoder:
    def decode(value: Any) -> None:
        assert value[tag] in kinds, f"unknown variant `{value[tag]}`"
        kinds[value[tag]](value)

    return decode


AGENT = struct(display=display, pubkey=key)
TIER = one_of("working", "episodic", "longterm")
MODE = one_of("dry_run", "apply")
CONTENT = tagged("type", text=struct(text=text), json=struct(value=anything))
RECORD = struct(
    id=uuid,
    tier=TIER,
    owner=AGENT,
    text=text,
    embedding=listed(real),
    metadata=anything,
    created_at=number,
    parent=maybe(uuid),
)
RECEIPT = struct(
    id=uuid,
    payer=AGENT,
    resource=one_of("compute", "memory", "tool", "message", "registration"),
    memory_record_id=maybe(uuid),
    credits_consumed=number,
    settled_at=number,
    **dict.fromkeys(("chain", "cluster", "batch_id", "merkle_root", "tx_sig", "onchain_sig"), maybe(text)),
    slot=maybe(number),
    confirmed_at=maybe(number),
)
CAPABILITY = struct(
    capability=struct(subject=AGENT, action=text, scope=anything, granted_by=AGENT, expires_at=maybe(number)),
    signature=text,
)
_IDEMPOTENCY = struct(duplicate_safety=one_of("unsafe", "idempotent"), key=text)
TASK = struct(
    id=uuid,
    sender=AGENT,
    recipient=AGENT,
    intent_text=text,
    task_kind=maybe(text),
    parent=maybe(uuid),
    deadline_ms=maybe(number),
    idempotency=maybe(_IDEMPOTENCY),
)
RESULT = struct(
    task_id=uuid, status=one_of("ok", "error", "partial"), content=listed(CONTENT), error_message=maybe(text)
)
QUEUED = struct(
    state=one_of("queued", "in_flight"),
    task=TASK,
    lease_id=maybe(uuid),
    leased_to=maybe(AGENT),
    leased_at_ms=maybe(number),
    attempt=number,
)
BATCH = struct(batch_id=text, merkle_root=text, receipt_count=number, tx_sig=maybe(text), slot=maybe(number))
REPORT = struct(events=number, anchors=number, valid=flag, root_hash_hex=text, failures=listed(text))
COMPACTION = struct(
    mode=MODE,
    would_change=flag,
    changed=flag,
    deleted=listed(uuid),
    stale_marked=listed(uuid),
    parents_detached=listed(uuid),
)
_OUTCOME = struct(
    task_id=uuid,
    action=one_of("requeued", "forced_error"),
    state=one_of("queued", "in_flight", "result_pending", "resolved"),
    attempt=number,
    result=maybe(RESULT),
)
SKIPPED = one_of(
    "disabled",
    "not_in_flight",
    "missing_lease",
    "lease_too_young",
    "missing_idempotency",
    "unsafe_duplicate_safety",
    "max_attempts_reached",
    "limit_reached",
    "capability_scope_mismatch",
)
RETRIED = struct(
    policy=struct(enabled=flag, min_lease_age_ms=number, max_attempts=number, max_requeues=number, scan_limit=number),
    considered=number,
    requeued=listed(struct(task_id=uuid, lease_id=uuid, attempt=number, idempotency_key=text)),
    skipped=listed(struct(task_id=uuid, reason=SKIPPED, attempt=number, lease_age_ms=maybe(number))),
)
PEER = struct(agent_id=AGENT, token_prefix=text, registered_at=number, revoked_at=maybe(number))
REVOKED = tagged(
    "type",
    revoked=PEER,
    already_revoked=PEER,
    self_revoke_forbidden=PEER,
    not_found=struct(),
    ambiguous=struct(matches=listed(PEER), truncated=flag),
)
STATUS = struct(
    chain=text,
    cluster=text,
    **dict.fromkeys(("rpc_url", "ws_url", "program_id", "covnt_mint"), null_or(text)),
    ready=flag,
    missing=listed(text),
)
TOOL = struct(name=text, description=text, inputSchema=struct())
CHECK = struct(name=text, passed=flag, message=text)
DRIFT = struct(kind=text, id=maybe(text), message=text, repair=text)
ACTION = struct(
    event_id=uuid,
    timestamp_ms=number,
    kind=text,
    actor=text,
    action=text,
    approver=maybe(text),
    rule=maybe(text),
    outcome=text,
)

_RUN = {"intent_id": uuid, "run_id": text}
_PROBED = struct(peer_display=text, peer_pubkey_b58=text)
_PEER_TOKEN = struct(peer_display=text, peer_pubkey_b58=text, token_prefix=text)
_GRANTED = struct(action=text, granted_by_display=text, signature_b58=text)
_BACKFILLED = {"row_count": number, "dry_run": flag}
# Section 10's 41 kinds. A row of any other kind fails the whole answer.
KINDS: dict[str, Decoder] = {
    "intent_dispatched": struct(
        intent_id=uuid, intent_text=text, matched_agent=null_or(text), result_hash_hex=text, status=text
    ),
    "hermes_tool_invoked": struct(**_RUN, tool=text, preview_hash_hex=text),
    "hermes_tool_completed": struct(**_RUN, tool=text, duration_ms=number, error=flag),
    "hermes_approval_requested": struct(**_RUN, choices=listed(text)),
    "hermes_approval_resolved": struct(**_RUN, choice=text, resolved=number),
    "hermes_file_written": struct(**_RUN, path=text, bytes=number),
    "capability_check": struct(
        agent_id=text,
        required_actions=listed(text),
        missing_actions=listed(text),
        passed=flag,
        authorized_by=listed(_GRANTED),
    ),
    "capability_granted": struct(subject_display=text, action=text, granted_by_display=text, signature_b58=text),
    "capability_grant_rejected": struct(subject_display=text, action=text, reason=text),
    "capability_scope_rejected": struct(agent_id=text, action=text, reason=text),
    "secret_access_granted": struct(agent_id=text, secret_name=text, signature_b58=text),
    "secret_access_denied": struct(agent_id=text, secret_name=text, reason=text),
    "intent_ignored": struct(intent_id=uuid, intent_text=text, matched_pattern=text),
    "a2_a_result_rejected": struct(task_id=uuid, reason=text),
    "authentication_failed": struct(transport=one_of("ipc", "http"), reason=text),
    "a2_a_sender_mismatch": struct(peer_display=text, claimed_sender_display=text),
    "a2_a_recipient_rejected": struct(sender_display=text, recipient_display=text, action=text),
    "a2_a_repair_applied": struct(
        task_id=uuid,
        action=one_of("requeue", "force_error", "auto_requeue"),
        reason=text,
        lease_id=null_or(uuid),
        duplicate_risk=null_or(text),
        attempt=number,
    ),
    "a2_a_auto_retry_scheduler_scan": struct(
        enabled=flag,
        skipped_by_reason=counts,
        error=null_or(text),
        **dict.fromkeys(("considered", "requeued", "skipped", "min_lease_age_ms"), number),
        **dict.fromkeys(("max_attempts", "max_requeues", "scan_limit"), number),
    ),
    "cross_host_a2_a_admission": struct(sender_pubkey_b58=text, recipient_display=text, outcome=text, reason=text),
    "cross_host_a2_a_delivery": struct(recipient_pubkey_b58=text, recipient_display=text, outcome=text, reason=text),
    "memory_repair_applied": struct(memory_id=uuid, action=text, mode=MODE, changed=flag, reason=text),
    "memory_compaction_applied": struct(
        mode=MODE,
        changed=flag,
        reason=text,
        deleted=listed(uuid),
        stale_marked=listed(uuid),
        parents_detached=listed(uuid),
    ),
    "capability_revoked": struct(subject_display=text, action=text, signature_b58=text, removed=flag),
    "capability_revoke_rejected": struct(signature_b58=text, reason=text),
    "budget_exhausted": struct(
        agent_display=text,
        intent_id=uuid,
        intent_text=text,
        requested=number,
        tokens_remaining=number,
        refill_eta_ms=number,
    ),
    "budget_preempted": struct(
        agent_display=text, intent_id=uuid, reason=text, signal_sent=text, exit_code=null_or(signed)
    ),
    "budget_preempt_failed": struct(agent_display=text, intent_id=uuid, reason=text, errno=signed),
    "budget_unseeded": struct(agent_display=text, intent_id=uuid, requested=number),
    "operator_token_rotated": struct(peer_display=text, old_token_prefix=text, new_token_prefix=text),
    "operator_token_rotation_rejected": _PROBED,
    "operator_peers_list_rejected": _PROBED,
    "peer_revoked": _PEER_TOKEN,
    "operator_peer_revoke_rejected": _PROBED,
    "peer_self_revoke_blocked": _PEER_TOKEN,
    "external_payment_settled": struct(
        provider=text, endpoint=text, network=text, asset=text, amount=anything, receipt_id=text
    ),
    "settlement_receipt_backfill_applied": struct(rollback_path=null_or(text), **_BACKFILLED),
    "memory_record_backfill_applied": struct(savepoint_name=text, **_BACKFILLED),
    "tool_call_completed": struct(tool=text, arguments_hash_hex=text, duration_ms=number, outcome=text),
    "tool_call_schema_rejected": struct(tool=text, arguments_hash_hex=text, reason=text),
    "capability_budget_exhausted": struct(signature_b58=text, action=text, max_uses=number, used=number),
}
EVENT = struct(id=uuid, timestamp_ms=number, issuer=AGENT, kind=tagged("type", **KINDS))
PROTOCOL = struct(protocol=text, version=number, min_supported=number, max_supported=number)
STREAM = tagged(
    "kind",
    stream_begin=struct(stream_id=uuid, response_kind=text),
    stream_chunk=struct(stream_id=uuid, sequence=number, chunk=anything),
    stream_end=struct(stream_id=uuid, summary=maybe(struct(intent_id=uuid, status=text, settlement=maybe(RECEIPT)))),
    stream_error=struct(stream_id=uuid, message=text),
)
_INTENT = struct(intent_id=uuid, status=text, text=text, sources=listed(text), settlement=maybe(RECEIPT))
# Section 4, with the types that section 1 of covenant-v1-differences.md adds.
RESPONSES: dict[str, Decoder] = {
    "pong": struct(),
    "protocol_info": struct(info=PROTOCOL),
    "authenticated": struct(display=text),
    "authentication_failed": struct(reason=text),
    "intent_result": _INTENT,
    "memories": struct(records=listed(RECORD)),
    "memory_purged": struct(purged=number),
    "memory_repaired": struct(
        outcome=struct(
            id=uuid,
            action=one_of("detach_parent", "delete_record", "backfill_provenance"),
            mode=MODE,
            would_change=flag,
            changed=flag,
            before=maybe(RECORD),
            after=maybe(RECORD),
        )
    ),
    "memory_compacted": struct(outcome=COMPACTION),
    "receipts": struct(receipts=listed(RECEIPT)),
    "chain_status": struct(status=STATUS),
    "receipt_batch_flushed": struct(batch=BATCH, receipts_updated=number),
    "receipt_batches": struct(batches=listed(BATCH)),
    "settlement_receipts_backfilled": struct(row_count=number, rollback_path=maybe(text), dry_run=flag),
    "memory_records_backfilled": struct(row_count=number, savepoint_name=text, dry_run=flag),
    "verify_report": struct(window=number, checks=listed(CHECK), drift=listed(DRIFT), orphans_total=number),
    "capabilities": struct(capabilities=listed(CAPABILITY)),
    "capability_granted": struct(signature_b58=text, subject_display=text, action=text),
    "capability_revoked": struct(signature_b58=text, removed=flag),
    "capability_usage": struct(
        grants=listed(
            struct(
                signature_b58=text,
                action=text,
                expires_at=maybe(number),
                revoked=flag,
                effective=one_of("live", "revoked", "expired", "exhausted"),
                budget=maybe(struct(max_uses=number, used=number, remaining=number)),
            )
        )
    ),
    "identity_attestation": struct(signature_b58=text, pubkey_b58=text, ts=number),
    "ignore_report": struct(ignored=flag, matched_pattern=maybe(text), rules_loaded=number),
    "tool_list": struct(tools=listed(TOOL)),
    "tool_result": struct(content=listed(CONTENT), is_error=flag),
    "secret": struct(name=text, value=text),
    "audit_events": struct(events=listed(EVENT)),
    "audit_integrity": struct(report=REPORT),
    "audit_purged": struct(purged=number),
    "audit_inclusion": struct(
        proof=maybe(struct(leaf_index=number, suffix_event_hashes_hex=listed(text), root_hash_hex=text))
    ),
    "capabilities_purged": struct(purged=number),
    "a2_a_task_queued": struct(task_id=uuid),
    "a2_a_task_opt": struct(task=maybe(TASK)),
    "a2_a_result_posted": struct(task_id=uuid),
    "a2_a_result_opt": struct(result=maybe(RESULT)),
    "a2_a_tasks": struct(tasks=listed(TASK)),
    "a2_a_results": struct(results=listed(RESULT)),
    "a2_a_queue": struct(tasks=listed(QUEUED), results=listed(RESULT)),
    "a2_a_compacted": struct(dropped=number),
    "a2_a_repaired": struct(outcome=_OUTCOME),
    "a2_a_auto_retried": struct(report=RETRIED),
    "peers_purged": struct(purged=number),
    "peer_list": struct(peers=listed(PEER), operator_pubkey_b58=text, truncated=flag),
    "peer_revoked": struct(outcome=REVOKED),
    "peer_enrolled": struct(token_b58=text, pubkey_b58=text, display=text, granted=listed(text)),
    "operator_token_rotated": struct(token_b58=text),
    "debits": struct(debits=listed(struct(agent=AGENT, credits=number, paired_receipt=uuid, at_ms=number))),
    "provenance_actions": struct(integrity=REPORT, actions=listed(ACTION), scanned=number),
    "error": struct(message=text),
}
RESPONSE = tagged("kind", **RESPONSES)
# `GET /intents/{id}/events`: one such object in each unnamed server-sent event. An approval is a tool `approval`.
AGENT_EVENT = tagged(
    "type",
    reasoning=struct(),
    tool_call=struct(tool=text),
    tool_result=struct(tool=text),
    file_write=struct(path=text, bytes=number),
)

_PURGED = struct(purged=number, before_ms=number)
_UNMATCHED_RECEIPT = struct(receipt_id=uuid, payer_display=text, payer_pubkey=text, credits_consumed=number)
_UNMATCHED_RECORD = struct(memory_record_id=uuid, owner_display=text, owner_pubkey=text, tier=TIER)
_PAIR = struct(
    receipt_id=uuid,
    memory_record_id=uuid,
    credits_consumed=number,
    status=one_of("candidate"),
    reason=text,
    **dict.fromkeys(("payer_display", "payer_pubkey", "memory_owner_display", "memory_owner_pubkey"), text),
)
# The envelopes of the command's --json (section 5), by `kind` or `schema`. Names of ours beside these are ignored.
CLI: dict[str, Decoder] = {
    "daemon_ping": struct(status=one_of("ok")),
    "intent_result": _INTENT,
    "bootstrap_result": struct(granted=listed(struct(action=text, signature_b58=text)), already_granted=listed(text)),
    "memory_read": struct(
        mode=one_of("recent", "search"),
        records=listed(RECORD),
        tier=null_or(TIER),
        limit=number,
        query=null_or(text),
        min_relevance=null_or(real),
    ),
    "memory_purged": struct(purged=number, before_ms=number, tier=null_or(TIER)),
    "memory_compacted": struct(outcome=COMPACTION),
    "memory_compaction_plan": struct(
        outcome=COMPACTION,
        expected_receipt_changes=struct(mode=one_of("none"), records=listed(anything), reason=text),
    ),
    "memory_receipt_backfill_plan": struct(
        mode=one_of("dry_run"),
        limit=number,
        mutation_supported=flag,
        records=listed(_PAIR),
        unmatched_legacy_receipts=listed(_UNMATCHED_RECEIPT),
        unmatched_memory_records=listed(_UNMATCHED_RECORD),
        refusal=struct(apply_supported=flag, reason=text),
    ),
    "capabilities_purged": _PURGED,
    "peers_purged": _PURGED,
    "audit_purged": _PURGED,
    "capability_list": struct(capabilities=listed(CAPABILITY), limit=number),
    "capability_granted": struct(
        signature_b58=text, subject_display=text, action=text, scope=null_or(struct()), expires_at=null_or(number)
    ),
    "capability_revoked": struct(signature_b58=text, removed=flag),
    "receipt_list": struct(receipts=listed(RECEIPT), limit=number, since_ms=null_or(number)),
    "receipt_batch_flushed": struct(batch=BATCH, receipts_updated=number, limit=number),
    "receipt_batch_list": struct(batches=listed(BATCH), limit=number),
    "chain_status": struct(status=STATUS),
    "verify_report": RESPONSES["verify_report"],
    "ignore_report": struct(ignored=flag, matched_pattern=null_or(text), rules_loaded=number),
    "tool_list": struct(tools=listed(TOOL)),
    "tool_result": struct(name=text, content=listed(CONTENT), is_error=flag),
    "audit_recent": struct(events=listed(EVENT), limit=number, since_ms=null_or(number)),
    "audit_integrity": struct(report=REPORT),
    "debit_list": struct(debits=listed(struct(agent=AGENT, credits=number, paired_receipt=uuid, at_ms=number))),
    "a2a_status": struct(
        tasks=listed(QUEUED),
        results=listed(RESULT),
        limit=number,
        min_lease_age_ms=null_or(number),
        deadline_within_ms=null_or(number),
        state_filter=null_or(one_of("queued", "in_flight")),
    ),
    "a2a_auto_retry": struct(report=RETRIED),
    "a2a_compacted": struct(dropped=number),
    "peer_list": struct(
        peers=listed(PEER),
        operator_pubkey_b58=text,
        truncated=flag,
        limit=number,
        filter_pubkey_prefix=null_or(text),
        matched_count=number,
    ),
    "peer_revoke": struct(outcome=REVOKED),
    "peer_token_rotated": struct(token_b58=text),
    "intents_resume": struct(ok=flag, mode=one_of("latest", "explicit"), intent_id=null_or(text)),
    "covenant.settlement.backfill.v1": struct(row_count=number, rollback_path=null_or(text), dry_run=flag),
    "covenant.memory.backfill.v1": struct(row_count=number, savepoint_name=text, dry_run=flag),
}
