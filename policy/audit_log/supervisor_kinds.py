"""The kinds of rows that the supervisor writes, with their fields.

``policy.audit_log.events`` joins them with the kinds of the daemon's log. Types as there; a `?` after one allows null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_RUN: Final = {"run_id": "text", "agent_id": "text", "operator": "text?"}

_CALLED: Final = {
    "run_id": "text?",
    "operator": "text?",
    "agent_id": "text",
    "uri": "text",
    "side_effect_class": "text?",
    "arguments_hash_hex": "digest?",
    "argument_bytes": "int",
}

SUPERVISOR: Final[Mapping[str, Mapping[str, str]]] = {
    # Version 1. `agent_id` names whose requirements were checked, `authorized_by` holds
    # {action, granted_by_display, signature_b58}.
    "capability_check": {
        "run_id": "text?",
        "operator": "text?",
        "agent_id": "text",
        "required_actions": "texts",
        "missing_actions": "texts",
        "passed": "bool",
        "authorized_by": "objects",
    },
    "intent_dispatched": {
        "run_id": "text?",
        "operator": "text?",
        "intent_id": "text",
        "intent_text": "text",
        "matched_agent": "text?",
        "result_hash_hex": "digest",
        "status": "text",
    },
    # A package was refused before anything started: `rule` is 1 to 9 where one of the nine rules refused.
    "manifest_rejected": {
        "run_id": "text?",
        "agent_id": "text?",
        "operator": "text?",
        "rule": "int?",
        "grant": "text?",
        "where": "text?",
        "code": "text",
        "message": "text",
        "package_digest": "digest?",
    },
    # Durable before the agent starts. `package` is where it lay; `not_enforced` lists what is only advisory here;
    # `deadline_clock` names which clock gives the effective deadline (timeout, cpu_ms_per_task, ttl, ...). `parent` is
    # the run whose agent asked for this one, null where an operator did. The row's issuer asked, whose all authority
    # is; `behalf_display` and `behalf_pubkey` are whom they said that it is for, and decide nothing.
    "run_started": {
        **_RUN,
        "intent_id": "text",
        "package": "text",
        "policy_digest": "digest?",
        "payload_digest": "digest?",
        "backend": "text",
        "signers": "texts",
        "not_enforced": "texts",
        "deadline_ms": "int",
        "deadline_clock": "text",
        "parent": "text?",
        "behalf_display": "text?",
        "behalf_pubkey": "text?",
    },
    # `status` is ok, failed or ended; `code` the error's code; `exit_status` or `exit_signal` of the agent. `cpu_ms`,
    # `memory_peak_bytes` and `wall_ms` are what this run used from its intent on, those that it started not among it;
    # null where this machine does not count it or its keeper was killed.
    "run_ended": {
        **_RUN,
        "status": "text",
        "code": "text?",
        "exit_status": "int?",
        "exit_signal": "int?",
        "duration_ms": "int",
        "oom": "bool",
        "stdout_bytes": "int",
        "stderr_bytes": "int",
        "result_hash_hex": "digest?",
        "cpu_ms": "int?",
        "memory_peak_bytes": "int?",
        "wall_ms": "int?",
    },
    # A client of the run's tools gave up on `child`, which is about to be stopped. Its own `run_ended` follows.
    "child_cancelled": {**_RUN, "child": "text", "child_agent_id": "text"},
    # The end of a stream session (`contract` stdio or terminal), with the bytes that were relayed and their SHA-256:
    # `in` from the caller, `out` from the agent; `recording_hash_hex` of a recording that the caller asked for.
    "session_ended": {
        **_RUN,
        "contract": "text",
        "in_bytes": "int",
        "in_hash_hex": "digest",
        "out_bytes": "int",
        "out_hash_hex": "digest",
        "recording_hash_hex": "digest?",
    },
    # A transition of the table in policy/lifecycle.py, before the act; `agent_id` is null before the manifest is read.
    "run_state": {**_RUN, "agent_id": "text?", "state": "text", "reason": "text"},
    # `denial` is the name of this refusal wherever it is shown (policy.denials); `layer` who refused, `target` what
    # was wanted, `code` why; `grant` the key of agent.toml that would have allowed it, null when none would;
    # `count` how often since the last row of this denial.
    "denied": {
        **_RUN,
        "denial": "text",
        "layer": "text",
        "target": "text",
        "code": "text",
        "grant": "text?",
        "count": "int",
    },
    # A request of the agent that is held for an operator: `request` is its id, `asks` its kind (network), `target` what
    # is wanted, for at most `seconds`.
    "approval_asked": {**_RUN, "request": "text", "asks": "text", "target": "text", "seconds": "int"},
    # An operator granted it, durable before it takes effect: `duration` is once, run or until, `expires_ms` its end at
    # the latest, `signers` the operators and `lease` the SHA-256 of what they signed; `add` are the lines of agent.toml
    # that would grant it.
    "approval_granted": {
        **_RUN,
        "request": "text",
        "asks": "text",
        "target": "text",
        "duration": "text",
        "expires_ms": "int",
        "signers": "texts",
        "lease": "digest",
        "add": "texts",
    },
    # It was denied: `code` is denied (`by` says who), expired, or left where the run ended first.
    "approval_denied": {
        **_RUN,
        "request": "text",
        "asks": "text",
        "target": "text",
        "code": "text",
        "by": "text?",
    },
    # A lease is over: `code` is expired or used.
    "lease_ended": {**_RUN, "asks": "text", "target": "text", "code": "text", "lease": "digest"},
    # A destination that the agent reached, once the run has ended: `target` as in `denied`, empty for all beyond a
    # run's bound; `bytes` both ways, null where packets were forwarded and not counted. Never content.
    "reached": {**_RUN, "target": "text", "connections": "int", "bytes": "int?"},
    # A call of a tool of a package's own server: refused, durable before it is sent, and its end. The digests are of
    # arguments and answer as JSON, which stand in no row; a summary of `count` more refusals has none. `call` joins the
    # two rows of one call; `status` is ok, tool_error where the tool says that it failed, or failed with the `code`.
    "tool_refused": {
        **_CALLED,
        "denial": "text",
        "code": "text",
        "grant": "text?",
        "count": "int",
    },
    "tool_called": {**_CALLED, "call": "text"},
    "tool_answered": {
        "run_id": "text?",
        "operator": "text?",
        "agent_id": "text",
        "uri": "text",
        "call": "text",
        "status": "text",
        "code": "text?",
        "answer_hash_hex": "digest?",
        "answer_bytes": "int",
        "duration_ms": "int",
    },
    # Durable before the secret leaves the supervisor. Never its value; refusals are `denied`, layer `credential`.
    "credential_granted": {**_RUN, "name": "text", "version": "int", "backend": "text"},
    # As it, for a secret that the gate adds, at its first use at a host; then each request, when its answer has ended.
    "credential_injected": {**_RUN, "name": "text", "version": "int", "backend": "text", "host": "text"},
    # Durable before the signature leaves the supervisor: which key, at which host, for which user. Never content.
    "ssh_signed": {
        **_RUN,
        **dict.fromkeys(("name", "backend", "host", "user", "algorithm", "fingerprint"), "text"),
        "version": "int",
    },
    "request_injected": {
        **_RUN,
        **dict.fromkeys(("host", "name", "method", "path"), "text"),
        **dict.fromkeys(("status", "out_bytes", "in_bytes"), "int"),
        "whole": "bool",
        "duration_ms": "int",
    },
    # One request to a model that was passed on, when its answer has ended: counts, never content. `status` is the
    # provider's, 0 where none answered; `counted` says whether the tokens are its own numbers, `whole` whether all of
    # the answer reached the agent; `credits` is the price.
    "model_asked": {
        **_RUN,
        "provider": "text",
        "model": "text",
        "path": "text",
        "stream": "bool",
        "status": "int",
        "input_tokens": "int",
        "output_tokens": "int",
        "counted": "bool",
        "whole": "bool",
        "duration_ms": "int",
        "credits": "int",
    },
    # One search (of the provider `target`) or one hop to a page (of its host), once it has ended; status 0: no answer.
    "web_asked": {
        **_RUN,
        "service": "text",
        "target": "text",
        "status": "int",
        "results": "int",
        "bytes": "int",
        "duration_ms": "int",
        "credits": "int",
    },
    # One call to another agent (`peer`) over A2A, once it has ended; `method` is its name in JSON-RPC, or `card`;
    # status 0: no answer. The digest is that of what was asked.
    "agent_asked": {
        **_RUN,
        "peer": "text",
        "method": "text",
        "status": "int",
        "request_sha256": "text",
        "bytes": "int",
        "duration_ms": "int",
    },
    # One request of the agent's own OTLP to the operator's collector, once it has ended: its spans, data points or log
    # records, those that the collector rejected, and the bytes of the request, unpacked; status 0: no answer.
    "telemetry_relayed": {
        **_RUN,
        "signal": "text",
        "status": "int",
        "records": "int",
        "rejected": "int",
        "bytes": "int",
        "duration_ms": "int",
    },
    # A port of the agent is about to be published at `to`; at its end the connections that were carried and refused,
    # and the bytes to the agent (`in`) and from it. A killed run has no row of the end.
    "port_published": {**_RUN, "port": "int", "to": "text"},
    "publish_ended": {
        **_RUN,
        "port": "int",
        "to": "text",
        "connections": "int",
        "refused": "int",
        "in_bytes": "int",
        "out_bytes": "int",
    },
    # A port of this host is about to be reached as host.covenant; at its end the connections that were carried and
    # refused, and the bytes from the agent (`in`) and to it. A killed run has no row of the end.
    "host_port_opened": {**_RUN, "port": "int"},
    "host_port_ended": {
        **_RUN,
        "port": "int",
        "connections": "int",
        "refused": "int",
        "in_bytes": "int",
        "out_bytes": "int",
    },
    # Durable before the vault is changed: `action` is created, put, rotated, removed or rekeyed; the last and the first
    # are about the vault as a whole, without agent and name.
    "vault_changed": {
        "operator": "text?",
        "backend": "text",
        "action": "text",
        "agent_id": "text?",
        "name": "text?",
        "version": "int?",
    },
    "drift": {**_RUN, "layer": "text", "expected": "text", "found": "text"},
    # Durable before the sandbox of a self-test starts.
    "self_test_started": {"run_id": "text?", "operator": "text?", "name": "text", "detail": "text"},
    "self_test": {"run_id": "text?", "operator": "text?", "name": "text", "passed": "bool", "detail": "text"},
    # A target of `policy compile` would allow more than the manifest, and the operator said so by these ids.
    "loss_accepted": {
        "run_id": "text?",
        "operator": "text?",
        "agent_id": "text",
        "target": "text",
        "package_digest": "digest",
        "losses": "texts",
    },
    # Durable before the runs are ended: each as {run_id, agent_id, because, reason}, where `because` is the run whose
    # manifest was revoked, itself or one above it.
    "runs_revoked": {"operator": "text?", "version": "int", "runs": "objects"},
    # Durable before the first change of the caller's directory, and before a workspace is removed. `approved_by` are
    # the operators whose approval the manifest asks for, with the hash of its payload; none where it asks for none.
    "workspace_applied": {
        "run_id": "text",
        "operator": "text?",
        "policy_digest": "digest",
        "changes_sha256": "digest",
        "changes": "int",
        "approved_by": "texts",
        "approval_sha256": "digest?",
    },
    # Durable before the commit of a branch: `changes` of the workspace, whose digest is the hash.
    "workspace_branched": {
        "run_id": "text",
        "operator": "text?",
        "policy_digest": "digest",
        "branch": "text",
        "changes_sha256": "digest",
        "changes": "int",
        "approved_by": "texts",
        "approval_sha256": "digest?",
    },
    "workspace_discarded": {"run_id": "text", "operator": "text?", "policy_digest": "digest", "changes": "int"},
    # Durable before the change holds. `act` is created, resized, removed, snapshot, restored or snapshot_removed; `mb`
    # is the size that the volume has then.
    "volume_changed": {
        "operator": "text?",
        "act": "text",
        "name": "text",
        "owner": "int",
        "mb": "int",
        "snapshot": "text?",
    },
    # Durable before a tree is ended because its issuer asked for it: each as {run_id, agent_id}.
    "runs_stopped": {"operator": "text?", "reason": "text", "runs": "objects"},
    # Durable before the version holds; `changes` in the words that its signers were shown.
    "trust_changed": {
        "operator": "text?",
        "version_from": "int?",
        "version_to": "int",
        "digest": "digest",
        "signers": "texts",
        "changes": "texts",
    },
    # An operator said that the clock is right now (`covenant state clock`): what was recorded under a clock that was
    # ahead, up to `from_ms`, is taken back to `to_ms`. `agents` are those whose serials were.
    "clock_set": {"operator": "text?", "from_ms": "int", "to_ms": "int", "agents": "texts"},
}
