"""Answers of a daemon and a supervisor for the screens: fixed, and with names that a hostile agent would choose."""

from __future__ import annotations

import json
from typing import Any

from tests.tui_kit import NOW_MS

OPERATOR = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}
ADA = {"display": "ada@laptop", "pubkey": "9hSR6S7WPtxmTojgo6GG3k4yDPecgJY292j7xrsUGWBu"}

# Markup of rich and Textual, OSC 52 (clipboard), OSC 8 (a link), a title, bidi, line ends, marks, a private character.
HOSTILE = (
    "[red]markup[/red][@click=app.quit]x[/] \x1b]52;c;ZXZpbA==\x07\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\"
    "\x1b]0;title\x07\x9b2J\u202egnp.exe\u2066\nsecond line\r\ttab e\u0301\u0301\u0301\u0301\u0301 \ue000 \u200b"
    "\U0001f1e9\U0001f1ea\ufe0f \ud800 " + "x" * 5000
)


def run(number: int, agent: str = "librarian", **fields: Any) -> dict[str, Any]:
    """A live run, as ``top`` lists it."""
    return {
        "run_id": f"{number:08x}-1111-4111-8111-{number:012x}",
        "agent_id": agent,
        "intent_id": None,
        "state": "Running",
        "parent": None,
        "depth": 0,
        "started_ms": NOW_MS - 60_000 * (number + 1),
        "cpu_ms": 100 * number,
        "memory_bytes": number << 24,
        "memory_mb": 512,
        "processes": 3,
        "received_bytes": 0,
        "sent_bytes": 0,
        "denied": 0,
    } | fields


def agent(directory: str, **fields: Any) -> dict[str, Any]:
    """A package, as ``list_agents`` lists it."""
    return {
        "directory": directory,
        "id": directory,
        "name": directory.title(),
        "version": "0.1.0",
        "runtime": "python3",
        "required": ["tool.web_search"],
        "optional": [],
        "budget_credits_per_hour": 60,
        "tools_allowed": [],
        "routable": True,
        "error": None,
    } | fields


RUNS = [
    run(1),
    run(2, "researcher", parent=run(1)["run_id"], depth=1, denied=4),
    run(3, "researcher", parent=run(2)["run_id"], depth=2, state="Suspended"),
    run(4, "exec-bash", memory_bytes=None, processes=None, cpu_ms=None),
]
AGENTS = [
    agent("librarian"),
    agent("researcher"),
    agent("broken", id=None, name=None, version=None, runtime=None, routable=False, error="agent.entry is missing"),
]
DENIALS = [
    {
        "event_id": f"00000000-0000-4000-8000-00000000000{number}",
        "timestamp_ms": NOW_MS - 1000 * number,
        "run_id": RUNS[1]["run_id"],
        "agent_id": "researcher",
        "layer": layer,
        "target": target,
        "code": "not_granted",
        "count": number,
    }
    for number, (layer, target) in enumerate(
        [("path", "/etc/hosts"), ("network", "example.org:443"), ("exec", "/usr/bin/curl")], 1
    )
]
INTENT = "aaaaaaaa-2222-4222-8222-000000000001"


def event(number: int, kind: str, **fields: Any) -> dict[str, Any]:
    """A row of the log."""
    return {
        "id": f"eeeeeeee-0000-4000-8000-{number:012x}",
        "timestamp_ms": NOW_MS - 1000 * number,
        "issuer": OPERATOR,
        "kind": {"type": kind, **fields},
    }


def model_asked(number: int, agent_id: str, tokens: int) -> dict[str, Any]:
    """A row that the daemon copied from the supervisor's log."""
    inner = {"type": "model_asked", "agent_id": agent_id, "provider": "local", "model": "small", "credits": 1}
    inner |= {"input_tokens": tokens, "output_tokens": 2 * tokens}
    line = json.dumps({"id": "x", "kind": inner})
    return event(number, "supervisor_row", intent_id=INTENT, row_type="model_asked", line=line)


EVENTS = [
    event(1, "intent_dispatched", intent_id=INTENT, intent_text="count the words", matched_agent="librarian",
          status="ok"),
    event(2, "intent_failed", intent_id="bbbbbbbb-2222-4222-8222-000000000002", matched_agent="researcher", run_id=None,
          stage="run", code="deadline_exceeded", message="the agent took longer than 30000 ms"),
    event(3, "budget_exhausted", intent_id="cccccccc-2222-4222-8222-000000000003", intent_text="read it all",
          agent_display="librarian@agent", requested=1, tokens_remaining=0, refill_eta_ms=NOW_MS + 60_000),
    model_asked(4, "librarian", 120),
    model_asked(5, "librarian", 30),
    event(6, "capability_granted", subject_display="operator@local", action="memory.read", signature_b58="3mJr7AoUXx"),
    event(7, "authentication_failed", transport="http", reason="unknown token"),
]  # fmt: skip


def recent_audit(limit: int, types: Any = (), **fields: Any) -> dict[str, Any]:
    """Answer as the daemon does: the newest, of these kinds alone where any is named."""
    return {"events": [one for one in EVENTS if not types or one["kind"]["type"] in types][:limit]}


def record(number: int, tier: str, text: str, **fields: Any) -> dict[str, Any]:
    """A record of memory."""
    return {
        "id": f"dddddddd-0000-4000-8000-{number:012x}",
        "tier": tier,
        "owner": OPERATOR,
        "text": text,
        "embedding": [],
        "metadata": {"agent_id": "librarian"},
        "created_at": NOW_MS - 1000 * number,
        "parent": None,
    } | fields


RECORDS = [
    record(1, "working", "five words are in this"),
    record(2, "longterm", "the disk of the archive is full on Fridays", owner=ADA),
]


def searched(query: str, **fields: Any) -> dict[str, Any]:
    """Answer as the daemon does, by words alone."""
    return {"records": [one for one in RECORDS if all(word in one["text"] for word in query.split())]}


def grant(signature: str, action: str, **fields: Any) -> dict[str, Any]:
    """A signed capability."""
    one = {"subject": OPERATOR, "action": action, "scope": {}, "granted_by": OPERATOR, "expires_at": None} | fields
    return {"capability": one, "signature": signature}


GRANTS = [
    grant("3mJr7AoUXx2Wqd", "memory.read", expires_at=NOW_MS + 86_400_000),
    grant("5kLs8BpVYy3Xre", "tool.call.echo", subject=ADA, scope={"version": 1, "max_uses": 3}),
]
USES = [
    {"signature_b58": "3mJr7AoUXx2Wqd", "action": "memory.read", "revoked": False, "effective": True},
    {"signature_b58": "5kLs8BpVYy3Xre", "action": "tool.call.echo", "revoked": False, "effective": False,
     "budget": {"max_uses": 3, "used": 3, "remaining": 0}},
]  # fmt: skip
PEERS = [
    {"agent_id": OPERATOR, "token_prefix": "7uqkz7", "registered_at": NOW_MS - 86_400_000, "revoked_at": None},
    {"agent_id": ADA, "token_prefix": "9fTg2a", "registered_at": NOW_MS - 3_600_000, "revoked_at": NOW_MS - 60_000},
]
TASK = {"id": "t-1", "sender": ADA, "recipient": OPERATOR, "intent_text": "count to three"}
QUEUE = {
    "tasks": [
        {"state": "in_flight", "task": TASK, "lease_id": "l-1", "leased_to": OPERATOR, "attempt": 1},
        {"state": "queued", "task": {**TASK, "id": "t-2", "intent_text": "count to four"}, "attempt": 0},
    ],
    "results": [{"task_id": "t-0", "status": "error", "content": [], "error_message": "it could not count"}],
}
RECEIPT = {
    "id": "ffffffff-0000-4000-8000-000000000001",
    "payer": OPERATOR,
    "resource": "compute",
    "credits_consumed": 2,
    "settled_at": NOW_MS - 1500,
    "batch_id": None,
}
DEBIT = {"agent": ADA, "credits": 1, "paired_receipt": RECEIPT["id"], "at_ms": NOW_MS - 2500}
_HELD_RUN = {"run_id": "0b5c3a52", "agent_id": "hello", "policy_digest": "1" * 64, "asked_ms": NOW_MS - 5_000}
HELD: list[dict[str, Any]] = [
    {
        **_HELD_RUN, "id": "3f" * 8, "kind": "network", "target": "api.example.com", "ends_ms": NOW_MS + 60_000,
        "side_effect": "", "arguments": "",
        "add": ["[[permissions.network]]", 'host = "api.example.com"', "ports = [443]", 'protocol = "tls"'],
    },
    {
        **_HELD_RUN, "id": "7b" * 8, "kind": "tool", "ends_ms": NOW_MS + 50_000, "side_effect": "network",
        "target": f"matrix://tool/mcp/mail/send@1.2.0 sha256:{'ab' * 32}", "arguments": '{"text": "hello"}',
        "add": ["[permissions.skills]", 'allow = ["matrix://tool/mcp/mail/send@1.2.0"]', 'side_effects = ["network"]'],
    },
    {
        **_HELD_RUN, "id": "5d" * 8, "kind": "inject", "ends_ms": NOW_MS + 40_000, "side_effect": "",
        "target": f"POST https://api.example.com/repos/a/b/issues sha256:{'cd' * 32}",
        "arguments": '{"headers": {"content-type": "application/json"}, "body": "{\\"title\\": \\"x\\"}"}',
        "add": [
            "# in inject of the entry for api.example.com; each method there is granted for each path",
            'methods = ["POST"]', 'paths = ["/repos/a/b/issues"]',
        ],
    },
]  # fmt: skip
APPROVAL = {
    "id": "approval-1",
    "intent_id": INTENT,
    "run_id": "hermes-run-1",
    "agent_id": "assistant",
    "description": "run a command",
    "command": "rm -r /tmp/old",
    "choices": ["once", "session", "deny"],
    "requested_at": NOW_MS - 20_000,
}
REPORT = {"events": 7, "anchors": 7, "valid": True, "root_hash_hex": "ab" * 32, "failures": []}
PROOF = {"event_id": EVENTS[0]["id"], "leaf_index": 6, "tree_size": 7, "root_hash_hex": "ab" * 32, "checkpoint": None}
SESSION = run(
    9, "exec-claude", issuer="uid1000@local", contract="terminal", published=[{"port": 8080, "to": "127.0.0.1:8080"}]
)
ANSWERING = run(5, intent_id="abababab-2222-4222-8222-000000000001", contract="line", issuer="x@local")
WORKSPACE = {
    "run_id": SESSION["run_id"],
    "agent_id": "exec-claude",
    "directory": "/home/op/project",
    "policy_digest": "cd" * 32,
    "settled": True,
    "changes": 2,
    "apply": "caller",
    "keeps": False,
    "package": "",
    "uid": 1000,
    "bytes": 4096,
    "started_ms": NOW_MS - 7_200_000,
}
DIFF = {
    "run_id": WORKSPACE["run_id"],
    "agent_id": "exec-claude",
    "directory": "/home/op/project",
    "policy_digest": "cd" * 32,
    "apply": "caller",
    "digest": "ef" * 32,
    "applicable": 1,
    "changes": [
        {"path": "src/main.py", "action": "modify", "refused": "", "conflict": ""},
        {"path": ".git/hooks/pre-commit", "action": "add", "refused": "it starts programs on the host", "conflict": ""},
    ],
    "more": 0,
    "apart": {},
}


def workspace(verb: str, **fields: Any) -> dict[str, Any]:
    """Answer about workspaces."""
    return {
        "list": {"kind": "workspaces", "workspaces": [WORKSPACE], "damaged": []},
        "diff": DIFF,
        "apply": {"kind": "workspace_applied", "run_id": WORKSPACE["run_id"], "applied": ["src/main.py"], "left": 1},
        "discard": {"kind": "workspace_discarded", "run_id": WORKSPACE["run_id"]},
    }[verb]


DAEMON: dict[str, Any] = {
    "list_agents": {"agents": AGENTS},
    "recent_denials": {"denials": DENIALS},
    "recent_audit": recent_audit,
    "verify_audit_integrity": {"report": REPORT},
    "prove_audit_inclusion": {"proof": PROOF},
    "get_intent_result": {"intent_id": INTENT, "status": "ok", "text": "three\nlines\nhere", "sources": ["a book"]},
    "submit_intent": {"intent_id": INTENT, "status": "ok", "text": "done so", "sources": [], "agent_id": "librarian"},
    "resume_intent": {"intent_id": INTENT, "status": "ok", "text": "resumed so", "sources": []},
    "list_approvals": {"approvals": [APPROVAL]},
    "resolve_approval": lambda approval_id, choice: {"approval_id": approval_id, "choice": choice, "resolved": 1},
    "recent_memory": {"records": RECORDS},
    "search_memory": searched,
    "recent_receipts": {"receipts": [RECEIPT]},
    "recent_debits": {"debits": [DEBIT]},
    "recent_capabilities": {"capabilities": GRANTS},
    "capability_usage": {"grants": USES},
    "grant_capability": lambda action, **fields: {
        "signature_b58": "8nMt", "subject_display": fields.get("subject") or "operator@local", "action": action
    },
    "revoke_capability": {"signature_b58": "3mJr7AoUXx2Wqd", "removed": True},
    "list_peers": {"peers": PEERS, "operator_pubkey_b58": OPERATOR["pubkey"], "truncated": False},
    "revoke_peer": {"outcome": {"type": "revoked"}},
    "a2_a_queue": QUEUE,
    "list_tools": {"tools": [{"name": "echo", "description": "Say it again.", "inputSchema": {}}]},
}  # fmt: skip
SUPERVISOR: dict[str, Any] = {
    "top": {"runs": RUNS},
    "ps": {
        "runs": [run(5, intent_id="abababab-2222-4222-8222-000000000001", contract="line", issuer="x@local"), SESSION]
    },
    "operate": lambda run, **fields: {"runs": [run]},
    "logs": {"run_id": RUNS[0]["run_id"], "live": True, "begins": 0, "next": 6, "text": "hello\n"},
    "workspace": workspace,
    "approvals": {"requests": [HELD[2]], "leases": [], "now_ms": 1_790_000_000_000},
}
