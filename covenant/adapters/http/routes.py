"""The one table of HTTP routes: what each asks the daemon, where its fields stand, and what it answers with.

Version 1's routes first (covenant-v1.md, section 5), then ours. The router, the reading of requests, the OpenAPI
document, docs/http-routes.md and the tests are derived from it. Fields in a query or in the path are the request's own
names unless ``renamed`` says otherwise; a body is the request without its ``kind``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from covenant.handlers.state.event_feed import Topic

Method = Literal["GET", "POST"]
# What a part of a path may be: ids, and nothing that a file system, a log or a header would read as more.
SEGMENT: Final = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}"


@dataclass(frozen=True, slots=True)
class Route:
    """One method and path.

    Args:
        kind: the request; empty where the gateway answers by itself.
        answer: the kind of response besides ``error``; empty where it is none.
        renamed: the request's field -> the name it has in the query.
        defaults: what a query that does not say gets, where it is not the request's own default.
        lenient: query fields whose unknown values count as not given (version 1).
        inside: the one field that the body may also stand for by itself.
        stream: what is followed with ``Accept: text/event-stream``.
        open: needs no token.
    """

    method: Method
    path: str
    kind: str
    answer: str
    about: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lenient: frozenset[str] = frozenset()
    inside: str = ""
    stream: Topic | None = None
    open: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The fields that stand in the path, in its order."""
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))

    @property
    def pattern(self) -> str:
        """The path as aiohttp's router takes it."""
        return self.path.replace("}", f":{SEGMENT}}}")

    @property
    def operation(self) -> str:
        """A name for the operation that no other has."""
        words = self.path.replace("{", "by_").replace("}", "").replace("-", "_").replace(".", "_").split("/")
        return "_".join([self.method.lower(), *filter(None, words)])


_TWENTY: Final = {"limit": 20}


def _get(path: str, kind: str, answer: str, about: str, **more: Any) -> Route:
    return Route("GET", path, kind, answer, about, **more)


def _post(path: str, kind: str, answer: str, about: str, **more: Any) -> Route:
    return Route("POST", path, kind, answer, about, **more)


VERSION_1: Final = (
    _get("/health", "", "health", "Whether the daemon answers.", open=True),
    _get("/version", "", "version", "Which daemon this is.", open=True),
    _post(
        "/intent",
        "submit_intent",
        "intent_result",
        "Do this; as a stream, its result when it is there.",
        stream="intent",
    ),
    _post("/intents/resume", "resume_intent", "intent_result", "Go on with an intent that waited."),
    _get("/intents/{intent_id}/result", "get_intent_result", "intent_result", "The result of an intent."),
    _get("/intents/{intent_id}/events", "", "", "What an intent does, while it does it.", stream="intent"),
    _get(
        "/memory/recent",
        "recent_memory",
        "memories",
        "The newest records; as a stream, also those to come.",
        stream="memory",
    ),
    _get("/memory/search", "search_memory", "memories", "By meaning and words.", renamed={"query": "q"}),
    _post("/memory/purge", "purge_memory", "memory_purged", "Take out what is older."),
    _post("/memory/repair", "repair_memory", "memory_repaired", "Repair one record.", inside="request"),
    _post("/memory/compact", "compact_memory", "memory_compacted", "Take out and mark.", inside="request"),
    _post(
        "/memory/records/backfill",
        "backfill_memory_records",
        "memory_records_backfilled",
        "Write receipts' correlations into records.",
    ),
    _get("/verify", "verify", "verify_report", "Compare the stores with each other."),
    _get("/receipts/recent", "recent_receipts", "receipts", "The newest receipts."),
    _get("/capabilities/recent", "recent_capabilities", "capabilities", "Grants of or by the caller."),
    _post("/capabilities/grant", "grant_capability", "capability_granted", "Grant an action."),
    _post("/capabilities/revoke", "revoke_capability", "capability_revoked", "Take a grant back."),
    _post("/capabilities/purge", "purge_capabilities", "capabilities_purged", "Forget what was revoked."),
    _post("/identity/sign", "sign_attestation", "identity_attestation", "Sign with the daemon's identity."),
    _get("/tools", "list_tools", "tool_list", "The tools."),
    _post("/tools/call", "call_tool", "tool_result", "Call one."),
    _get(
        "/audit/recent",
        "recent_audit",
        "audit_events",
        "The caller's newest rows; as a stream, also those to come.",
        defaults=_TWENTY,
        stream="audit",
    ),
    _get("/audit/verify", "verify_audit_integrity", "audit_integrity", "Verify the chain of the rows."),
    _post("/audit/purge", "purge_audit", "audit_purged", "Take out what is older."),
    _post("/a2a/tasks", "send_a2_a_task", "a2_a_task_queued", "Put a task into the mailbox.", inside="task"),
    _get("/a2a/tasks/next", "try_recv_a2_a_task", "a2_a_task_opt", "The caller's next task, leased to it."),
    _get("/a2a/tasks/recent", "recent_a2_a_tasks", "a2_a_tasks", "The newest tasks."),
    _post("/a2a/results", "post_a2_a_result", "a2_a_result_posted", "What came of a task.", inside="result"),
    _get("/a2a/results/next", "try_recv_a2_a_result", "a2_a_result_opt", "The caller's next result."),
    _get("/a2a/results/recent", "recent_a2_a_results", "a2_a_results", "The newest results."),
    _get("/a2a/queue", "a2_a_queue", "a2_a_queue", "What waits in the mailbox."),
    _post("/a2a/repair", "repair_a2_a_task", "a2_a_repaired", "Repair one task.", inside="request"),
    _post("/a2a/compact", "compact_a2_a", "a2_a_compacted", "Forget what is done."),
    _post("/a2a/peer-tasks", "", "", "A signed task of another host; 503 without known-hosts.toml.", open=True),
    _post("/peers/purge", "purge_peers", "peers_purged", "Forget the peers that were revoked."),
    _post("/peers/rotate", "rotate_operator_token", "operator_token_rotated", "A new token for the operator."),
    _post("/peers/revoke", "revoke_peer", "peer_revoked", "Let a peer in no more."),
    _get(
        "/peers/list",
        "list_peers",
        "peer_list",
        "Who may connect.",
        renamed={"pubkey_prefix": "prefix", "status_filter": "status"},
        lenient=frozenset({"status_filter"}),
    ),
    _get("/budget/debits", "recent_debits", "debits", "The newest debits.", defaults=_TWENTY),
    _get("/chain/status", "chain_status", "chain_status", "What is configured of a chain."),
    _get("/chain/receipt-batches", "receipt_batches", "receipt_batches", "The newest batches.", defaults=_TWENTY),
    _post("/chain/flush-receipts", "flush_receipts", "receipt_batch_flushed", "Put receipts into a batch."),
    _post(
        "/settlement/receipts/backfill",
        "backfill_settlement_receipts",
        "settlement_receipts_backfilled",
        "Write records' ids into receipts.",
    ),
    _get("/sap/stats", "sap_status", "", "Not served: always an error."),
    _post("/x402/pay", "pay_x402", "", "Not served: always an error."),
)

OURS: Final = (
    # Of a later version 1 than the page of its routes.
    _get("/audit/inclusion/{event_id}", "prove_audit_inclusion", "audit_inclusion", "That a row is in the log."),
    _get("/expiries", "list_expiries", "expiries", "What ends, and when."),
    _post("/clock/set", "set_clock", "clock_set", "Take the daemon's clock back to the machine's."),
    _get("/agents", "list_agents", "agents", "The packages, and what is wrong with them."),
    _post("/agents/reload", "reload_agents", "agents", "Read the packages again."),
    _get("/approvals", "list_approvals", "approvals", "What runs at a Hermes API wait for."),
    _post("/approvals/resolve", "resolve_approval", "approval_resolved", "Answer one of them."),
    _post("/ignore/check", "ignore_check", "ignore_report", "Whether .covenantignore matches a text."),
    _post("/memory/put", "put_memory", "memory_stored", "Write a record of the caller's own."),
    _post("/memory/promote", "promote_memory", "memory_promoted", "Put a record into another tier."),
    _get("/capabilities/usage", "capability_usage", "capability_usage", "What is left of the caller's grants."),
    _post("/peers/enroll", "enroll_peer", "peer_enrolled", "Enroll a peer."),
    _get(
        "/audit/prove/{event_id}",
        "prove_audit_inclusion",
        "audit_inclusion",
        "That a row is in the log (RFC 6962).",
        defaults={"extended": True},
    ),
    _post("/audit/cosign", "cosign_audit_checkpoint", "audit_checkpoint", "Keep cosignatures of a checkpoint."),
    _get("/provenance", "query_provenance", "provenance_actions", "Which actor did what, by which rule or approval."),
    _get("/denials", "recent_denials", "denials", "The denials of agents."),
    _post("/a2a/retry-stale", "retry_a2_a_stale", "a2_a_auto_retried", "Put stale leases back.", inside="policy"),
    _post("/a2a/cancel", "cancel_a2_a_task", "a2_a_cancelled", "Take a task back."),
    _post("/mcp", "", "", "The daemon as an MCP server: one JSON-RPC message, one reply."),
    _get("/metrics", "", "", "Numbers, as Prometheus reads them."),
    _get("/openapi.json", "", "", "This interface.", open=True),
)

TABLE: Final[tuple[Route, ...]] = (*VERSION_1, *OURS)
