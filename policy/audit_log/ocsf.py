"""Rows of the audit logs as events of the Open Cybersecurity Schema Framework (OCSF 1.5.0).

One table has the class of every kind. A kind that is not in it is refused: a record of a wrong class misleads the
reader of a SIEM. The fields of a row that its class has no attribute for are in ``unmapped``, which OCSF has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from policy import errors
from policy.audit_log import exported

VERSION: Final = "1.5.0"

INFORMATIONAL, LOW, MEDIUM, HIGH = 1, 2, 3, 4
_SUCCESS, _FAILURE = 1, 2


class Mapped(NamedTuple):
    """The class of a kind, its activity and severity. ``about`` is the field that names its object; ``status`` is
    success or failure where the kind itself says so."""

    make: Callable[[exported.ExportedRow, str], dict[str, Any]]
    class_uid: int
    activity_id: int
    severity_id: int
    about: str
    status: int | None


def _user(row: exported.ExportedRow) -> dict[str, Any]:
    return {"name": row.fields.get("operator") or row.issuer or "covenant"}


def _run(row: exported.ExportedRow) -> dict[str, Any]:
    """The run, or the log where the row is of no run, as an endpoint."""
    found: dict[str, Any] = {"uid": row.fields.get("run_id") or row.place.origin or row.place.log}
    if agent := row.fields.get("agent_id"):
        found["name"] = agent
    return found


def _process(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    process = _run(row)
    if parent := row.fields.get("parent"):
        process["parent_process"] = {"uid": parent}
    made = {"actor": {"user": _user(row)}, "process": process}
    if (code := row.fields.get("exit_status")) is not None:
        made["exit_code"] = code
    return made


def _network(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    fields = row.fields
    endpoint: dict[str, Any] = {"name": str(fields.get(about, "")) or "others"}
    if isinstance(port := fields.get("port"), int):
        endpoint["port"] = port
    made = {"actor": {"user": _user(row)}, "src_endpoint": _run(row), "dst_endpoint": endpoint}
    names = {"bytes": "bytes", "in_bytes": "bytes_in", "out_bytes": "bytes_out"}
    if traffic := {ocsf: fields[name] for name, ocsf in names.items() if name in fields}:
        made["traffic"] = traffic
    return made


def _api(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    api: dict[str, Any] = {"operation": row.kind}
    if about in row.fields:
        api["service"] = {"name": str(row.fields[about]) or row.kind}
    return {"actor": {"user": _user(row)}, "api": api, "src_endpoint": _run(row)}


def _finding(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    info = {"uid": row.event_id, "title": row.kind}
    if about in row.fields:
        info["desc"] = str(row.fields[about])
    made: dict[str, Any] = {"finding_info": info}
    if "run_id" in row.fields:
        made["resources"] = [_run(row)]
    if isinstance(count := row.fields.get("count"), int):
        made["count"] = count
    return made


def _compliance(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    control = str(row.fields.get(about, row.kind))
    compliance: dict[str, Any] = {"control": control, "standards": ["Covenant"]}
    if "passed" in row.fields:
        compliance["status_id"] = 1 if row.fields["passed"] else 3  # Pass, Fail
    return {"finding_info": {"uid": row.event_id, "title": row.kind}, "compliance": compliance}


def _entity(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    uid = row.fields.get(about)
    return {"actor": {"user": _user(row)}, "entity": {"type": row.kind, "uid": str(uid) if uid else row.kind}}


def _application(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    name = row.fields.get(about)
    return {"app": {"name": str(name) if name else "covenant"}, "actor": {"user": _user(row)}}


def _authentication(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    name = row.fields.get(about) or row.issuer or "unknown"
    return {"user": {"name": str(name)}, "service": {"name": "covenantd"}}


def _access(row: exported.ExportedRow, about: str) -> dict[str, Any]:
    name = row.fields.get(about) or row.issuer or "unknown"
    action = row.fields.get("action") or row.fields.get("secret_name") or row.fields.get("asks") or row.kind
    return {"actor": {"user": _user(row)}, "user": {"name": str(name)}, "privileges": [str(action)]}


_Table = dict[str, Mapped]


def _kinds(
    make: Callable[[exported.ExportedRow, str], dict[str, Any]],
    class_uid: int,
    about: str,
    activities: Mapping[int, str],
    *,
    severity: int = INFORMATIONAL,
    status: int | None = None,
) -> _Table:
    return {
        kind: Mapped(make, class_uid, activity, severity, about, status)
        for activity, kinds in activities.items()
        for kind in kinds.split()
    }


# Activities are those of each class: https://schema.ocsf.io/1.5.0/classes. 99 is "Other".
TABLE: Final[Mapping[str, Mapped]] = {
    # Process Activity: 1 Launch, 2 Terminate, 3 Open
    **_kinds(_process, 1007, "run_id", {3: "console_attached"}, severity=LOW),
    **_kinds(_process, 1007, "run_id", {1: "run_started", 2: "run_ended session_ended", 99: "run_state"}),
    **_kinds(_process, 1007, "run_id", {2: "runs_revoked runs_stopped budget_preempted"}, severity=MEDIUM),
    **_kinds(_process, 1007, "run_id", {2: "child_cancelled"}),
    **_kinds(_process, 1007, "run_id", {2: "budget_preempt_failed"}, severity=MEDIUM, status=_FAILURE),
    # Network Activity: 1 Open, 2 Close, 6 Traffic, 7 Listen
    **_kinds(_network, 4001, "target", {6: "reached"}),
    **_kinds(_network, 4001, "to", {7: "port_published", 2: "publish_ended"}),
    **_kinds(_network, 4001, "port", {1: "host_port_opened", 2: "host_port_ended"}),
    # API Activity: 1 Create, 2 Read, 3 Update, 4 Delete
    **_kinds(_api, 6003, "provider", {2: "model_asked"}),
    **_kinds(_api, 6003, "service", {2: "web_asked"}),
    **_kinds(_api, 6003, "peer", {1: "agent_asked"}),
    **_kinds(_api, 6003, "signal", {1: "telemetry_relayed"}),
    **_kinds(_api, 6003, "uri", {99: "tool_called tool_answered"}),
    **_kinds(_api, 6003, "tool", {99: "tool_call_completed run_tool_asked hermes_tool_invoked hermes_tool_completed"}),
    **_kinds(_api, 6003, "host", {99: "request_injected ssh_signed"}),
    **_kinds(_api, 6003, "matched_agent", {1: "intent_dispatched", 3: "intent_resumed"}),
    **_kinds(_api, 6003, "matched_agent", {1: "intent_failed intent_ignored"}, severity=LOW, status=_FAILURE),
    **_kinds(_api, 6003, "kind", {99: "run_usage family_usage supervisor_row capability_used identity_signed"}),
    **_kinds(_api, 6003, "recipient_display", {1: "a2_a_task_sent a2_a_push_sent"}),
    **_kinds(_api, 6003, "recipient_display", {99: "cross_host_a2_a_admission cross_host_a2_a_delivery"}),
    **_kinds(_api, 6003, "task_id", {2: "a2_a_task_leased a2_a_result_taken", 3: "a2_a_result_posted"}),
    **_kinds(_api, 6003, "task_id", {4: "a2_a_task_cancelled a2_a_task_expired a2_a_compacted"}),
    **_kinds(_api, 6003, "task_id", {3: "a2_a_repair_applied", 2: "a2_a_auto_retry_scheduler_scan"}),
    **_kinds(_api, 6003, "approvals", {1: "approval_asked hermes_approval_requested"}),
    **_kinds(_api, 6003, "approvals", {3: "hermes_approval_resolved hermes_approval_answered"}),
    # Detection Finding: 1 Create
    **_kinds(_finding, 2004, "target", {1: "denied approval_denied"}, severity=LOW, status=_FAILURE),
    **_kinds(_finding, 2004, "uri", {1: "tool_refused"}, severity=LOW, status=_FAILURE),
    **_kinds(_finding, 2004, "tool", {1: "tool_call_schema_rejected"}, severity=LOW, status=_FAILURE),
    **_kinds(_finding, 2004, "layer", {1: "drift"}, severity=HIGH, status=_FAILURE),
    **_kinds(_finding, 2004, "code", {1: "manifest_rejected refusals_summed"}, severity=MEDIUM, status=_FAILURE),
    **_kinds(_finding, 2004, "reason", {1: "a2_a_result_rejected"}, severity=LOW, status=_FAILURE),
    **_kinds(_finding, 2004, "reason", {1: "supervisor_rows_missing"}, severity=MEDIUM, status=_FAILURE),
    **_kinds(
        _finding,
        2004,
        "action",
        {1: "a2_a_sender_mismatch a2_a_recipient_rejected capability_grant_rejected capability_scope_rejected"},
        severity=MEDIUM,
        status=_FAILURE,
    ),
    **_kinds(
        _finding,
        2004,
        "reason",
        {1: "capability_revoke_rejected budget_exhausted budget_unseeded capability_budget_exhausted"},
        severity=LOW,
        status=_FAILURE,
    ),
    **_kinds(_finding, 2004, "secret_name", {1: "secret_access_denied"}, severity=MEDIUM, status=_FAILURE),
    **_kinds(
        _finding,
        2004,
        "peer_display",
        {1: "operator_token_rotation_rejected operator_peers_list_rejected operator_peer_revoke_rejected"},
        severity=MEDIUM,
        status=_FAILURE,
    ),
    **_kinds(_finding, 2004, "peer_display", {1: "peer_self_revoke_blocked"}, severity=MEDIUM, status=_FAILURE),
    **_kinds(_finding, 2004, "first_index", {1: exported.GAP}, severity=HIGH, status=_FAILURE),
    # Compliance Finding: 1 Create
    **_kinds(_compliance, 2003, "name", {1: "self_test_started self_test"}),
    **_kinds(_compliance, 2003, "agent_id", {1: "capability_check"}),
    **_kinds(_compliance, 2003, "target", {1: "loss_accepted"}, severity=MEDIUM),
    # Authentication: 1 Logon
    **_kinds(_authentication, 3002, "issuer", {1: "console_entered", 99: "console_link_made"}),
    **_kinds(_authentication, 3002, "issuer", {1: "authentication_failed"}, severity=MEDIUM, status=_FAILURE),
    # User Access Management: 1 Assign Privileges, 2 Revoke Privileges
    **_kinds(_access, 3005, "subject_display", {1: "capability_granted capability_attenuated"}),
    **_kinds(_access, 3005, "subject_display", {2: "capability_revoked capabilities_purged"}),
    **_kinds(_access, 3005, "agent_id", {1: "secret_access_granted credential_granted credential_injected"}),
    **_kinds(_access, 3005, "agent_id", {1: "approval_granted"}, severity=LOW),
    **_kinds(_access, 3005, "agent_id", {2: "lease_ended"}),
    **_kinds(_access, 3005, "peer_display", {1: "peer_enrolled", 2: "peer_expired peer_revoked peers_purged"}),
    # Entity Management: 1 Create, 2 Read, 3 Update, 4 Delete
    **_kinds(_entity, 3004, "peer_display", {3: "operator_token_rotated"}),
    **_kinds(_entity, 3004, "name", {3: "vault_changed volume_changed"}),
    **_kinds(_entity, 3004, "version_to", {3: "trust_changed"}, severity=MEDIUM),
    **_kinds(_entity, 3004, "to_ms", {3: "clock_set"}, severity=MEDIUM),
    **_kinds(_entity, 3004, "run_id", {3: "workspace_applied", 1: "workspace_branched", 4: "workspace_discarded"}),
    **_kinds(_entity, 3004, "run_id", {1: "hermes_file_written"}),
    **_kinds(_entity, 3004, "memory_id", {1: "memory_written", 3: "memory_promoted memory_repair_applied"}),
    **_kinds(_entity, 3004, "memory_id", {3: "memory_record_backfill_applied", 99: "memory_write_ignored"}),
    **_kinds(_entity, 3004, "memory_id", {4: "memory_compaction_applied memory_purged"}),
    **_kinds(_entity, 3004, "receipt_id", {1: "receipt_written external_payment_settled"}),
    **_kinds(_entity, 3004, "receipt_id", {3: "settlement_receipt_backfill_applied"}),
    **_kinds(_entity, 3004, "batch_id", {1: "receipts_flushed"}),
    **_kinds(_entity, 3004, "agent_display", {3: "budget_capacity_set budget_refunded", 4: "budget_compacted"}),
    **_kinds(_entity, 3004, "origin", {1: "audit_checkpoint", 3: "audit_checkpoint_cosigned"}),
    **_kinds(_entity, 3004, "key_id", {4: "audit_rebased audit_purged"}, severity=LOW),
    # Application Lifecycle: 3 Start, 4 Stop, 8 Update
    **_kinds(_application, 6002, "app", {3: "daemon_started", 4: "daemon_stopped", 8: "agents_reloaded"}),
    **_kinds(_application, 6002, "server", {8: "tool_server_changed"}),
}

# Words of a row's own `status` or `outcome` that say that it went well.
_WELL: Final = frozenset({"ok", "done", "completed", "delivered", "accepted", "admitted", "success"})


def _status(row: exported.ExportedRow, said: int | None) -> int:
    fields = row.fields
    if said is not None:
        return said
    if "passed" in fields:
        return _SUCCESS if fields["passed"] else _FAILURE
    word = fields.get("outcome", fields.get("status"))
    if isinstance(word, str):
        return _SUCCESS if word in _WELL else _FAILURE
    if isinstance(word, int):  # of HTTP; 0 where none answered
        return _SUCCESS if 100 <= word < 400 else _FAILURE
    return _FAILURE if fields.get("error") else _SUCCESS


def event(row: exported.ExportedRow, *, host: str, version: str) -> dict[str, Any]:
    """One row as an event of its class.

    Raises:
        errors.EventError: the kind is not in the table.
    """
    mapped = TABLE.get(row.kind)
    if mapped is None:
        raise errors.EventError(f"audit event kind `{row.kind}` has no class of OCSF")
    fields, place = row.fields, row.place
    metadata: dict[str, Any] = {
        "version": VERSION,
        # The attributes `device` and `actor` of every class.
        "profiles": ["host"],
        "product": {"name": "Covenant", "vendor_name": "Covenant", "version": version},
        "uid": row.event_id,
        "event_code": row.kind,
        "log_name": place.log,
        "log_provider": place.origin,
    }
    if place.leaf is not None:
        metadata["sequence"] = place.leaf
    if correlation := fields.get("intent_id") or fields.get("run_id"):
        metadata["correlation_uid"] = correlation
    made = {
        "time": row.timestamp_ms,
        "class_uid": mapped.class_uid,
        "category_uid": mapped.class_uid // 1000,
        "activity_id": mapped.activity_id,
        "type_uid": mapped.class_uid * 100 + mapped.activity_id,
        "severity_id": mapped.severity_id,
        "status_id": _status(row, mapped.status),
        "metadata": metadata,
        "device": {"type_id": 1, "hostname": host},
        **mapped.make(row, mapped.about),
        "unmapped": {**fields, "audit_log": row.log_place},
    }
    if isinstance(code := fields.get("code"), str):
        made["status_code"] = code
    if isinstance(duration := fields.get("duration_ms"), int):
        made["duration"] = duration
    return made
