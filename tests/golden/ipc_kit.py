"""One sample of every kind, with every field that covenant-v1.md (section 4) names for it."""

from __future__ import annotations

from typing import Any

ME = {"display": "user@local", "pubkey": "4zvwRjXUKGfvwnParsHAS3HuSVzV5cA4McphgmoCtajS"}
AGENT = {"display": "researcher@agent", "pubkey": "8qbHbw2BbbTHBW1sbeqakYXVKRQM8Ne7pLK7m6CVfeR"}
TOKEN = "7jZ5bqWDDCFkJJLU1zYLsV9VHDMbWQ4s9pWwHDTqkqkB"
SIGNATURE = "5" * 88
UUID = "7f3d1f0e-6d0a-4a9a-9b43-0c7c0a1f6a11"
OTHER = "0b9f4a5e-2f1f-4a4e-8a57-3f0d8a2f9d22"
HEX = "ab" * 32
AT = 1_790_000_000_000

RECORD = {
    "id": UUID,
    "tier": "working",
    "owner": ME,
    "text": "three papers on lattices",
    "embedding": [0.25, -0.5, 1.0],
    "metadata": {"intent_text": "find papers", "agent_id": "researcher", "status": "ok"},
    "created_at": AT,
    "parent": None,
}
RECEIPT = {
    "id": OTHER,
    "payer": ME,
    "resource": "memory",
    "memory_record_id": UUID,
    "credits_consumed": 1,
    "settled_at": AT,
    "chain": None,
    "cluster": None,
    "batch_id": None,
    "merkle_root": None,
    "tx_sig": None,
    "slot": None,
    "confirmed_at": None,
    "onchain_sig": None,
}
CAPABILITY = {
    "capability": {
        "subject": ME,
        "action": "memory.read",
        "scope": {"version": 1, "tiers": ["working"]},
        "granted_by": ME,
        "expires_at": None,
    },
    "signature": SIGNATURE,
}
TASK = {
    "id": UUID,
    "sender": ME,
    "recipient": AGENT,
    "intent_text": "find papers",
    "task_kind": "research",
    "parent": OTHER,
    "deadline_ms": AT + 60_000,
    "idempotency": {"duplicate_safety": "idempotent", "key": "papers-1"},
}
RESULT = {"task_id": UUID, "status": "ok", "content": [{"type": "text", "text": "three"}]}
FAILED = {"task_id": OTHER, "status": "error", "content": [], "error_message": "no network"}
PEER = {"agent_id": AGENT, "token_prefix": "7jZ5bq", "registered_at": AT, "revoked_at": None}
EVENT = {
    "id": OTHER,
    "timestamp_ms": AT,
    "issuer": ME,
    "kind": {"type": "authentication_failed", "transport": "ipc", "reason": "unknown token"},
}
BATCH = {"batch_id": HEX, "merkle_root": HEX, "receipt_count": 2, "tx_sig": None, "slot": None}
REPORT = {"events": 2, "anchors": 2, "valid": True, "root_hash_hex": HEX, "failures": []}
TOOL = {"name": "echo", "description": "says it again", "inputSchema": {"type": "object", "required": ["text"]}}

_ROOT = "q83vASNFZ4mrze8BI0VniavN7wEjRWeJq83vASNFZ4k="
NOTE = f"covenant.example/log\n2\n{_ROOT}\n\n\u2014 covenant.example/log 5d5e1a2b{_ROOT}\n"
WITNESS = f"witness.example/w1+5d5e1a2b+BKvN{_ROOT}"

REQUESTS: dict[str, dict[str, Any]] = {
    "set_clock": {},
    "open_console": {},
    "ping": {},
    "protocol_info": {},
    "authenticate": {"token_b58": TOKEN},
    "submit_intent": {"text": "find papers", "prefer_stream": True},
    "resume_intent": {"intent_id": UUID},
    "recent_debits": {"limit": 10},
    "recent_memory": {"tier": "working", "limit": 10, "prefer_stream": False},
    "search_memory": {"query": "lattices", "tier": "longterm", "limit": 5, "min_relevance": 0.25},
    "purge_memory": {"tier": "episodic", "before_ms": AT},
    "repair_memory": {
        "request": {
            "mode": "dry_run",
            "command": {"action": "detach_parent", "id": UUID, "expected_parent": OTHER},
            "reason": "its parent is gone",
        }
    },
    "compact_memory": {
        "request": {
            "mode": "apply",
            "policy": {
                "delete_working_before_ms": AT,
                "delete_episodic_before_ms": AT,
                "mark_longterm_stale_before_ms": AT,
                "detach_stale_parents": True,
                "marked_at_ms": AT,
            },
            "reason": "spring",
        }
    },
    "backfill_memory_records": {"dry_run": True, "scope_pubkey": None},
    "backfill_settlement_receipts": {"dry_run": False, "scope_pubkey": None},
    "recent_receipts": {"limit": 10, "since_ms": AT},
    "chain_status": {},
    "flush_receipts": {"limit": 100},
    "receipt_batches": {"limit": 10},
    "recent_capabilities": {"limit": 10},
    "grant_capability": {"action": "memory.read", "scope": {"version": 1, "tiers": ["working"]}, "expires_at": AT},
    "revoke_capability": {"signature_b58": SIGNATURE},
    "purge_capabilities": {"before_ms": AT},
    "capability_usage": {},
    "verify": {"window": 100},
    "ignore_check": {"text": "read ~/.ssh/id_ed25519"},
    "list_tools": {},
    "call_tool": {"name": "echo", "arguments": {"text": "hello"}},
    "get_secret": {"name": "mail"},
    "recent_audit": {"limit": 50, "since_ms": AT, "prefer_stream": False},
    "verify_audit_integrity": {},
    "purge_audit": {"before_ms": AT},
    "prove_audit_inclusion": {"event_id": OTHER},
    "query_provenance": {
        "since_ms": AT,
        "until_ms": AT + 1,
        "actor": "user@local",
        "approver": "user@local",
        "rule": "memory.read",
        "outcome": "allowed",
        "limit": 20,
    },
    "send_a2_a_task": {"task": TASK},
    "try_recv_a2_a_task": {},
    "post_a2_a_result": {"result": RESULT},
    "try_recv_a2_a_result": {},
    "recent_a2_a_tasks": {"limit": 10},
    "recent_a2_a_results": {"limit": 10},
    "a2_a_queue": {"limit": 20, "min_lease_age_ms": 1000, "deadline_within_ms": 60_000, "state_filter": "in_flight"},
    "repair_a2_a_task": {
        "request": {
            "task_id": UUID,
            "command": {"action": "requeue", "lease_id": OTHER, "duplicate_risk": "operator-accepted"},
            "reason": "its agent has ended",
        }
    },
    "retry_a2_a_stale": {
        "policy": {
            "enabled": True,
            "min_lease_age_ms": 300_000,
            "max_attempts": 3,
            "max_requeues": 1,
            "scan_limit": 100,
        }
    },
    "compact_a2_a": {},
    "purge_peers": {"before_ms": AT},
    "rotate_operator_token": {},
    "list_peers": {"limit": 20, "pubkey_prefix": "8qb", "status_filter": "live"},
    "revoke_peer": {"token_prefix": "7jZ5bq", "force": False, "match_limit": 5},
    "enroll_peer": {"display": "researcher@lab", "actions": ["memory.read"]},
    "sign_attestation": {"message_b58": "StV1DL6CwTryKyV", "ts": AT},
    "pay_x402": {
        "provider": "acme",
        "endpoint": "https://acme.example/pay",
        "method": "POST",
        "body": "{}",
        "network": "base",
        "asset": "USDC",
        "per_call_cap": 10,
        "credits": 1,
    },
    "sap_status": {},
    "sap_publish_agent": {"manifest_json": "{}"},
    "sap_publish_audit_root": {
        "root_hash_hex": HEX,
        "release_target": "t",
        "release_subject": "s",
        "release_scope": "all",
    },
    "sap_publish_attestation": {
        "agent_pda": "p",
        "root_hash_hex": HEX,
        "attestation_type": "audit",
        "expires_at_unix": 1,
    },
    "authorize_spend": {
        "provider": "acme",
        "network": "base",
        "asset": "USDC",
        "amount": 1,
        "per_call_cap": 10,
        "credits": 1,
        "destination": "d",
    },
    # Of these version 1's page has the names alone.
    "settle_spend": {},
    "spend_grant_charge": {},
    "spend_grant_settle": {},
    "record_escrow_release": {},
    "prove_completion": {},
    "get_reputation": {},
    "rwa_preview": {},
    "rwa_trade": {},
    # Ours.
    "put_memory": {"tier": "episodic", "text": "lattices", "metadata": {"topic": "math"}, "parent": UUID},
    "promote_memory": {"id": UUID, "tier": "longterm"},
    "recent_denials": {"limit": 20, "run_id": "r1"},
    "cancel_a2_a_task": {"task_id": UUID, "reason": "not needed"},
    "cosign_audit_checkpoint": {"checkpoint": NOTE, "witnesses": [WITNESS]},
    "get_intent_result": {"intent_id": UUID},
    "list_agents": {"signatures": True},
    "list_expiries": {},
    "reload_agents": {},
    "list_approvals": {},
    "resolve_approval": {"approval_id": UUID, "choice": "once"},
}

RESPONSES: dict[str, dict[str, Any]] = {
    "expiries": {"expiries": [{"what": "envelope", "name": "researcher", "expires_at": AT}], "clock_behind_ms": 0},
    "console_opened": {"url": "http://127.0.0.1:8421/#code=3mJr7AoUXx2Wqd", "expires_at": AT},
    "clock_set": {"changed": True, "from_ms": AT + 86_400_000, "to_ms": AT},
    "error": {"message": "no live grant of `memory.write`", "code": "capability_missing", "hint": "grant it"},
    "pong": {},
    "protocol_info": {
        "info": {"protocol": "covenant.ipc", "version": 1, "min_supported": 1, "max_supported": 2},
    },
    "authenticated": {"display": "user@local"},
    "authentication_failed": {"reason": "unknown token"},
    "intent_result": {
        "intent_id": UUID,
        "status": "ok",
        "text": "three papers on lattices",
        "sources": ["https://example.org/1"],
        "settlement": None,
        "agent_id": "researcher",
        "run_id": "r1",
        "policy_digest": HEX,
    },
    "debits": {"debits": [{"agent": AGENT, "credits": 1, "paired_receipt": OTHER, "at_ms": AT}]},
    "memories": {"records": [RECORD]},
    "memory_purged": {"purged": 3},
    "memory_repaired": {
        "outcome": {
            "id": UUID,
            "action": "detach_parent",
            "mode": "dry_run",
            "would_change": True,
            "changed": False,
            "before": {**RECORD, "parent": OTHER},
            "after": RECORD,
        }
    },
    "memory_compacted": {
        "outcome": {
            "mode": "apply",
            "would_change": True,
            "changed": True,
            "deleted": [UUID],
            "stale_marked": [OTHER],
            "parents_detached": [],
        }
    },
    "memory_records_backfilled": {
        "row_count": 2,
        "savepoint_name": "backfill_receipt_correlation",
        "dry_run": True,
    },
    "memory_stored": {"record": RECORD},
    "memory_promoted": {"record": {**RECORD, "tier": "longterm"}},
    "verify_report": {
        "window": 100,
        "checks": [{"name": "memory_audit", "passed": False, "message": "1 record without a row"}],
        "drift": [{"kind": "memory_without_audit", "id": UUID, "message": "no row names it", "repair": "delete it"}],
        "orphans_total": 1,
    },
    "ignore_report": {"ignored": True, "matched_pattern": "**/id_ed25519*", "rules_loaded": 12},
    "receipts": {"receipts": [RECEIPT]},
    "settlement_receipts_backfilled": {"row_count": 2, "rollback_path": "receipts/working.jsonl.1", "dry_run": False},
    "chain_status": {
        "status": {
            "chain": "solana",
            "cluster": "localnet",
            "rpc_url": None,
            "ws_url": None,
            "program_id": None,
            "covnt_mint": None,
            "ready": False,
            "missing": ["rpc_url", "program_id"],
        }
    },
    "receipt_batch_flushed": {"batch": BATCH, "receipts_updated": 2},
    "receipt_batches": {"batches": [BATCH]},
    "x402_paid": {"receipt_id": OTHER, "status": 200, "body": "{}"},
    "completion_proven": {},
    "escrow_released": {},
    "capabilities": {"capabilities": [CAPABILITY]},
    "capability_granted": {"signature_b58": SIGNATURE, "subject_display": "user@local", "action": "memory.read"},
    "capability_revoked": {"signature_b58": SIGNATURE, "removed": True},
    "capabilities_purged": {"purged": 1},
    "capability_usage": {
        "grants": [
            {
                "signature_b58": SIGNATURE,
                "action": "tool.call.echo",
                "expires_at": None,
                "revoked": False,
                "effective": "live",
                "budget": {"max_uses": 3, "used": 1, "remaining": 2},
            }
        ]
    },
    "peers_purged": {"purged": 1},
    "operator_token_rotated": {"token_b58": TOKEN},
    "peer_list": {"peers": [PEER], "operator_pubkey_b58": ME["pubkey"], "truncated": False},
    "peer_revoked": {"outcome": {"type": "ambiguous", "matches": [PEER, PEER], "truncated": False}},
    "peer_enrolled": {
        "agent_id": AGENT,
        "token_b58": TOKEN,
        "pubkey_b58": AGENT["pubkey"],
        "display": AGENT["display"],
        "granted": ["memory.read"],
        "grants": [{"action": "memory.read", "signature_b58": SIGNATURE}],
    },
    "identity_attestation": {"signature_b58": SIGNATURE, "pubkey_b58": ME["pubkey"], "ts": AT},
    "secret": {"name": "mail", "value": "hunter2"},
    "tool_list": {"tools": [TOOL]},
    "tool_result": {"content": [{"type": "text", "text": "hello"}], "is_error": False},
    "audit_events": {"events": [EVENT]},
    "audit_integrity": {"report": REPORT},
    "audit_purged": {"purged": 5},
    "audit_inclusion": {
        "proof": {
            "event_id": OTHER,
            "leaf_index": 1,
            "event_hash_hex": HEX,
            "previous_hash_hex": HEX,
            "suffix_event_hashes_hex": [HEX],
            "root_hash_hex": HEX,
        }
    },
    "audit_checkpoint": {"checkpoint": NOTE},
    "provenance_actions": {
        "integrity": REPORT,
        "actions": [
            {
                "event_id": OTHER,
                "timestamp_ms": AT,
                "kind": "capability_check",
                "actor": "user@local",
                "action": "memory.read",
                "approver": "user@local",
                "rule": "memory.read",
                "outcome": "allowed",
            }
        ],
        "scanned": 2,
    },
    "denials": {
        "denials": [
            {
                "event_id": OTHER,
                "timestamp_ms": AT,
                "run_id": "r1",
                "agent_id": "researcher",
                "layer": "dns",
                "target": "evil.example",
                "code": "name_not_granted",
                "count": 2,
            }
        ]
    },
    "a2_a_task_queued": {"task_id": UUID},
    "a2_a_task_opt": {"task": TASK, "lease_id": OTHER, "lease_expires_at_ms": AT},
    "a2_a_result_posted": {"task_id": UUID},
    "a2_a_result_opt": {"result": None},
    "a2_a_tasks": {"tasks": [TASK]},
    "a2_a_results": {"results": [RESULT, FAILED]},
    "a2_a_queue": {
        "tasks": [
            {"state": "queued", "task": TASK, "attempt": 0},
            {
                "state": "in_flight",
                "task": TASK,
                "lease_id": OTHER,
                "leased_to": AGENT,
                "leased_at_ms": AT,
                "lease_expires_at_ms": AT + 1,
                "attempt": 1,
            },
        ],
        "results": [RESULT],
    },
    "a2_a_repaired": {
        "outcome": {
            "task_id": UUID,
            "action": "requeued",
            "state": "queued",
            "lease_id": OTHER,
            "duplicate_risk": "operator-accepted",
            "attempt": 1,
        }
    },
    "a2_a_auto_retried": {
        "report": {
            "policy": {
                "enabled": True,
                "min_lease_age_ms": 300_000,
                "max_attempts": 3,
                "max_requeues": 1,
                "scan_limit": 100,
            },
            "considered": 2,
            "requeued": [
                {"task_id": UUID, "lease_id": OTHER, "attempt": 1, "idempotency_key": "papers-1"},
            ],
            "skipped": [{"task_id": OTHER, "reason": "unsafe_duplicate_safety", "attempt": 2}],
            "skipped_by_reason": {"unsafe_duplicate_safety": 1},
            "error": None,
        }
    },
    "a2_a_compacted": {"dropped": 2},
    "a2_a_cancelled": {"task_id": UUID, "cancelled": True},
    "approvals": {
        "approvals": [
            {
                "id": OTHER,
                "intent_id": UUID,
                "run_id": "run_abc123",
                "agent_id": "researcher",
                "description": "removes x",
                "command": "rm -r x",
                "choices": ["once", "deny"],
                "requested_at": AT,
            }
        ]
    },
    "approval_resolved": {"approval_id": OTHER, "choice": "once", "resolved": 1},
    "agents": {
        "agents": [
            {
                "directory": "researcher",
                "id": "researcher",
                "name": "Researcher",
                "version": "1.0.0",
                "runtime": "python3",
                "required": ["memory.read"],
                "optional": [],
                "budget_credits_per_hour": 60,
                "tools_allowed": [],
                "routable": True,
                "error": None,
            }
        ],
        "truncated": True,
    },
}

STREAMS: dict[str, dict[str, Any]] = {
    "stream_begin": {"stream_id": UUID, "response_kind": "memories"},
    "stream_chunk": {"stream_id": UUID, "sequence": 0, "chunk": RECORD},
    "stream_end": {"stream_id": UUID, "summary": {"intent_id": UUID, "status": "ok", "settlement": None}},
    "stream_error": {"stream_id": UUID, "message": "the store failed"},
}
