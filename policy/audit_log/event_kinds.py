"""The kinds of rows that the daemon writes, with their fields: all 41 of Covenant version 1 under its names, and ours
for what version 1 leaves unaudited.

``policy.audit_log.events`` joins them with the kinds of the supervisor's log. Types as there; a `?` after one allows
null. The actor is the issuer of the row. Tokens stand here by their first six characters, texts of tools by their
digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_RUN: Final = {"intent_id": "text", "run_id": "text"}
_REJECTED: Final = {"peer_display": "text", "peer_pubkey_b58": "text"}
_CROSS_HOST: Final = {"recipient_display": "text", "outcome": "text", "reason": "text"}
_SCAN: Final = {"min_lease_age_ms": "int", "max_attempts": "int", "max_requeues": "int", "scan_limit": "int"}
_BACKFILL: Final = {"row_count": "int", "dry_run": "bool"}

# Two more of version 1's 41, capability_check and intent_dispatched, are in both logs: ``supervisor_kinds`` has
# them.
V1: Final[Mapping[str, Mapping[str, str]]] = {
    "hermes_tool_invoked": {**_RUN, "tool": "text", "preview_hash_hex": "digest"},
    "hermes_tool_completed": {**_RUN, "tool": "text", "duration_ms": "int", "error": "bool"},
    "hermes_approval_requested": {**_RUN, "choices": "texts"},
    # `resolved` is how many waiting requests the answer resolved.
    "hermes_approval_resolved": {**_RUN, "choice": "text", "resolved": "int"},
    "hermes_file_written": {**_RUN, "path": "text", "bytes": "int"},
    "capability_granted": {
        "subject_display": "text",
        "action": "text",
        "granted_by_display": "text",
        "signature_b58": "text",
    },
    "capability_grant_rejected": {"subject_display": "text", "action": "text", "reason": "text"},
    "capability_scope_rejected": {"agent_id": "text", "action": "text", "reason": "text"},
    "secret_access_granted": {"agent_id": "text", "secret_name": "text", "signature_b58": "text"},
    "secret_access_denied": {"agent_id": "text", "secret_name": "text", "reason": "text"},
    "intent_ignored": {"intent_id": "text", "intent_text": "text", "matched_pattern": "text"},
    "a2_a_result_rejected": {"task_id": "text", "reason": "text"},
    # `transport` is ipc or http.
    "authentication_failed": {"transport": "text", "reason": "text"},
    "a2_a_sender_mismatch": {"peer_display": "text", "claimed_sender_display": "text"},
    "a2_a_recipient_rejected": {"sender_display": "text", "recipient_display": "text", "action": "text"},
    # `action` is requeue, force_error or auto_requeue.
    "a2_a_repair_applied": {
        "task_id": "text",
        "action": "text",
        "reason": "text",
        "lease_id": "text?",
        "duplicate_risk": "text?",
        "attempt": "int",
    },
    "a2_a_auto_retry_scheduler_scan": {
        "enabled": "bool",
        "considered": "int",
        "requeued": "int",
        "skipped": "int",
        "skipped_by_reason": "counts",
        **_SCAN,
        "error": "text?",
    },
    "cross_host_a2_a_admission": {"sender_pubkey_b58": "text", **_CROSS_HOST},
    "cross_host_a2_a_delivery": {"recipient_pubkey_b58": "text", **_CROSS_HOST},
    "memory_repair_applied": {
        "memory_id": "text",
        "action": "text",
        "mode": "text",
        "changed": "bool",
        "reason": "text",
    },
    "memory_compaction_applied": {
        "mode": "text",
        "changed": "bool",
        "reason": "text",
        "deleted": "texts",
        "stale_marked": "texts",
        "parents_detached": "texts",
    },
    "capability_revoked": {"subject_display": "text", "action": "text", "signature_b58": "text", "removed": "bool"},
    "capability_revoke_rejected": {"signature_b58": "text", "reason": "text"},
    "budget_exhausted": {
        "agent_display": "text",
        "intent_id": "text",
        "intent_text": "text",
        "requested": "int",
        "tokens_remaining": "int",
        "refill_eta_ms": "int",
    },
    # `signal_sent` is SIGTERM, SIGKILL or none.
    "budget_preempted": {
        "agent_display": "text",
        "intent_id": "text",
        "reason": "text",
        "signal_sent": "text",
        "exit_code": "int?",
    },
    "budget_preempt_failed": {"agent_display": "text", "intent_id": "text", "reason": "text", "errno": "int"},
    "budget_unseeded": {"agent_display": "text", "intent_id": "text", "requested": "int"},
    "operator_token_rotated": {"peer_display": "text", "old_token_prefix": "text", "new_token_prefix": "text"},
    # Issued by the daemon, so that who probed does not see in the feed that it was seen.
    "operator_token_rotation_rejected": _REJECTED,
    "operator_peers_list_rejected": _REJECTED,
    "peer_revoked": {**_REJECTED, "token_prefix": "text"},
    "operator_peer_revoke_rejected": _REJECTED,
    "peer_self_revoke_blocked": {**_REJECTED, "token_prefix": "text"},
    "external_payment_settled": {
        "provider": "text",
        "endpoint": "text",
        "network": "text",
        "asset": "text",
        "amount": "int",
        "receipt_id": "text",
    },
    "settlement_receipt_backfill_applied": {"rollback_path": "text?", **_BACKFILL},
    "memory_record_backfill_applied": {"savepoint_name": "text?", **_BACKFILL},
    # `outcome` is ok, error (the tool said so), failed (there was no answer) or withheld (the right to it had ended).
    "tool_call_completed": {
        "tool": "text",
        "arguments_hash_hex": "digest",
        "duration_ms": "int",
        "outcome": "text",
    },
    "tool_call_schema_rejected": {"tool": "text", "arguments_hash_hex": "digest", "reason": "text"},
    "capability_budget_exhausted": {"signature_b58": "text", "action": "text", "max_uses": "int", "used": "int"},
}

# Every kind that a client of version 1 can decode.
VERSION_1: Final = frozenset({*V1, "capability_check", "intent_dispatched"})

# What version 1 did without a row. Each is written after the act succeeded, unless it says otherwise.
OURS: Final[Mapping[str, Mapping[str, str]]] = {
    "daemon_started": {"version": "text", "agents": "int", "recovered": "texts"},
    "daemon_stopped": {"reason": "text"},
    # The session with the package of an entry [[mcp.server]]: `state` is ready, reconnecting or refused, `tools` how
    # many of its tools are listed, `reason` the code of the error.
    "tool_server_changed": {"server": "text", "state": "text", "tools": "int", "reason": "text"},
    # A link to the web console, before it is given out; and the login of a browser by it, before its cookie is set.
    "console_link_made": {"expires_at": "int"},
    "console_entered": {"expires_at": "int"},
    # A page that is attached to the terminal of a session, before anything of it is shown.
    "console_attached": {"run_id": "text"},
    # An approval's answer, before it is posted: an answer that cannot be logged is not given. The number that it
    # resolved is in `hermes_approval_resolved`, written once the API said it.
    "hermes_approval_answered": {**_RUN, "choice": "text"},
    # An intent that ended without a result: `stage` is router, capability, budget, run, memory or receipt.
    "intent_failed": {
        "intent_id": "text",
        "matched_agent": "text?",
        "run_id": "text?",
        "stage": "text",
        "code": "text",
        "message": "text",
    },
    # A tool of the daemon that a run called for the caller of its intent, before it is called; the end is in the
    # supervisor's rows of the run.
    "run_tool_asked": {"intent_id": "text", "agent_id": "text", "tool": "text", "arguments_hash_hex": "digest"},
    "intent_resumed": {"intent_id": "text", "resumed_from": "text"},
    # What the supervisor said about a run of ours, and what is billed for it. What was refused to the run comes with
    # the same answer and is copied as `denied`; the supervisor's own rows are `supervisor_row`. What is null was not
    # counted, and is not among what the credits are for.
    "run_usage": {
        "intent_id": "text",
        "run_id": "text",
        "agent_id": "text",
        "policy_digest": "digest?",
        "backend": "text",
        "status": "text",
        "cpu_ms": "int?",
        "memory_peak_bytes": "int?",
        "wall_ms": "int?",
        "credits": "int",
    },
    # Where the run had others below it: what all of them used together that had ended when it was answered, which the
    # credits are for. `runs` were started, `unended` of them had not ended: their use is not billed. Of
    # `uncounted` that had, something was not counted, and so is not in the sums either.
    "family_usage": {
        "intent_id": "text",
        "run_id": "text?",
        "runs": "int",
        "unended": "int",
        "uncounted": "int",
        "cpu_ms": "int",
        "memory_byte_ms": "int",
        "wall_ms": "int",
    },
    # A row of the supervisor's own log about a run that this intent caused, or about one that descended from it: `line`
    # is its exact bytes, null where it is too long to be copied, `origin` the id of the key of that log, `index` its
    # place in it, and the hashes those of its anchor there. `row_type` and `run_id` are its own.
    "supervisor_row": {
        "intent_id": "text",
        "run_id": "text?",
        "origin": "digest",
        "index": "int",
        "event_id": "text",
        "event_hash_hex": "digest",
        "chain_hash_hex": "digest",
        "row_type": "text?",
        "line": "text?",
    },
    # Rows of the supervisor's log about it that are there and not here, `left_out` of them where that is known.
    "supervisor_rows_missing": {
        "intent_id": "text",
        "run_id": "text?",
        "origin": "digest?",
        "copied": "int",
        "left_out": "int?",
        "reason": "text",
    },
    # `reason` says why a tier was given (intent, client, promotion); the text itself is never here.
    "memory_written": {"memory_id": "text", "tier": "text", "reason": "text", "text_hash_hex": "digest"},
    "memory_promoted": {"memory_id": "text", "from_tier": "text", "to_tier": "text", "reason": "text"},
    # Text that the ignore set kept out of memory.
    "memory_write_ignored": {"memory_id": "text", "matched_pattern": "text"},
    "memory_purged": {"tier": "text?", "before_ms": "int", "purged": "int"},
    "capabilities_purged": {"before_ms": "int", "purged": "int"},
    # A grant by its holder to another peer; `parent_signature_b58` is the grant that it narrows.
    "capability_attenuated": {
        "subject_display": "text",
        "action": "text",
        "granted_by_display": "text",
        "signature_b58": "text",
        "parent_signature_b58": "text",
    },
    "capability_used": {"signature_b58": "text", "action": "text", "max_uses": "int", "used": "int"},
    # The row of the purge in the log that is left; the re-base record says what was cut.
    "audit_purged": {
        "before_ms": "int",
        "purged": "int",
        "root_before_hex": "digest",
        "root_after_hex": "digest",
        "rebase_id": "text?",
    },
    # The first line of a log that was cut, and only there: what stood before, by the hashes that stand for it.
    # `subtrees` are the roots of the complete subtrees over every record that was ever cut, largest first (RFC 6962),
    # `cut` how many records those are; `signature_hex` is made by the log's key.
    "audit_rebased": {
        "cut": "int",
        "cut_now": "int",
        "first_event_id": "text",
        "last_event_id": "text",
        "last_timestamp_ms": "int",
        "root_before_hex": "digest",
        "tree_size_before": "int",
        "tree_root_before_hex": "digest",
        "subtrees": "texts",
        "previous_rebase_hex": "digest?",
        "key_id": "digest",
        "signature_hex": "text",
    },
    "audit_checkpoint": {"origin": "text", "tree_size": "int", "root_hash_hex": "digest"},
    "audit_checkpoint_cosigned": {"origin": "text", "tree_size": "int", "witness": "text", "timestamp_s": "int"},
    "receipts_flushed": {
        "batch_id": "text",
        "merkle_root_hex": "digest",
        "receipt_count": "int",
        "credits": "int",
        "tx_sig": "text?",
        "slot": "int?",
    },
    "receipt_written": {"receipt_id": "text", "resource": "text", "credits": "int", "intent_id": "text?"},
    "budget_capacity_set": {"agent_display": "text", "credits_per_hour": "int"},
    "budget_refunded": {"agent_display": "text", "intent_id": "text", "credits": "int", "paired_receipt": "text"},
    "budget_compacted": {"before_ms": "int", "dropped": "int"},
    "a2_a_task_sent": {
        "task_id": "text",
        "sender_display": "text",
        "recipient_display": "text",
        "task_kind": "text?",
        "intent_hash_hex": "digest",
        "outcome": "text",
    },
    "a2_a_task_leased": {"task_id": "text", "lease_id": "text", "attempt": "int", "lease_expires_at_ms": "int"},
    "a2_a_task_cancelled": {"task_id": "text", "reason": "text"},
    "a2_a_task_expired": {"task_id": "text", "lease_id": "text?", "reason": "text"},
    "a2_a_result_posted": {"task_id": "text", "status": "text", "content_hash_hex": "digest"},
    "a2_a_result_taken": {"task_id": "text", "status": "text"},
    "a2_a_compacted": {"dropped": "int"},
    # A push notification of A2A; `outcome` is delivered, refused (its address is not public), failed or withdrawn.
    "a2_a_push_sent": {"task_id": "text", "state": "text", "url_hash_hex": "digest", "outcome": "text"},
    "peers_purged": {"before_ms": "int", "purged": "int"},
    "peer_enrolled": {
        "peer_display": "text",
        "peer_pubkey_b58": "text",
        "token_prefix": "text",
        "actions": "texts",
        "expires_at_ms": "int?",
    },
    "peer_expired": {"peer_display": "text", "peer_pubkey_b58": "text", "token_prefix": "text"},
    # Of one peer in some time, beside those that have rows of their own; `codes` says how many there were of each (the
    # most frequent, and how many `others`), `code` and `message` are the last one's.
    "refusals_summed": {
        "peer_display": "text",
        "peer_pubkey_b58": "text",
        "count": "int",
        "codes": "counts",
        "since_ms": "int",
        "code": "text",
        "message": "text",
    },
    "identity_signed": {"message_hash_hex": "digest", "timestamp_ms": "int"},
    # Written before the packages that were found take effect; `listed` with an error each for those that do not.
    "agents_reloaded": {
        "cause": "text",
        "added": "texts",
        "changed": "texts",
        "removed": "texts",
        "refused": "objects",
    },
}
