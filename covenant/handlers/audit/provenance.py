"""Provenance: the audit log as a list of acts, each with actor, grant, rule and outcome.

Each kind of row is read by the tables below, in their order. A field that a kind does not have is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from covenant.handlers import paging
from covenant.handlers.audit import audit, integrity
from covenant.wire import parts, requests, responses

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.server import Handler, Server

MOST_ACTIONS: Final = 1_000
FOUND_FOR_MS: Final = 60_000

# The first of these that a row has says what was done; the kind itself where none is there.
_ACTIONS: Final = ("action", "tool", "secret_name", "name", "task_kind", "state")
# The first of these says by which rule: a grant's or its scope's action, a pattern, a rule's number, a code.
_RULES: Final = ("matched_pattern", "rule", "grant", "code", "signature_b58", "backend")
_OUTCOMES: Final = ("outcome", "status")
_ENDINGS: Final = {
    "rejected": "denied",
    "denied": "denied",
    "mismatch": "denied",
    "blocked": "denied",
    "ignored": "denied",
    "exhausted": "denied",
    "failed": "failed",
    "requested": "pending",
    "preempted": "ended",
}


async def query_provenance(
    server: Server, caller: Caller, asked: requests.QueryProvenance
) -> responses.ProvenanceActions:
    """The newest acts that fit the question: of everybody for the operator, their own for everybody else.

    ``actor`` and ``approver`` are compared with displays and keys, whole; ``scanned`` rows were looked at.
    """

    def wanted(row: parts.AuditEvent) -> bool:
        if asked.until_ms is not None and row.timestamp_ms > asked.until_ms:
            return False
        found = read(row)
        return (
            asked.actor in (None, row.issuer.display, row.issuer.pubkey)
            and asked.approver in (None, found.approver)
            and asked.rule in (None, found.rule)
            and asked.outcome in (None, found.outcome)
        )

    whose = None if caller.operator else caller.agent.pubkey
    limit = min(asked.limit, MOST_ACTIONS)
    scan = await server.audit.scan(wanted, limit, since_ms=asked.since_ms, issuer_pubkey=whose)
    actions = paging.that_fit((read(row) for row in scan.events), paging.ROOM - audit.MOST_FAILURE_BYTES)
    integrity = await _integrity(server, fresh=caller.operator)
    if not caller.operator:
        # How many rows others have is theirs to know.
        integrity = integrity.model_copy(update={"events": scan.scanned, "anchors": scan.scanned, "failures": ()})
    return responses.ProvenanceActions(integrity=integrity, actions=actions, scanned=scan.scanned)


async def _integrity(server: Server, *, fresh: bool) -> parts.AuditReport:
    """Return whether the log holds.

    A verification costs time that grows with the log. Only the operator gets a new one each time; other callers get the
    result of the last minute.
    """
    return audit.report(await integrity.verified(server, within_ms=0 if fresh else FOUND_FOR_MS))


def read(row: parts.AuditEvent) -> parts.ProvenanceAction:
    """One row as an act."""
    kind = str(row.kind.get("type", ""))
    return parts.ProvenanceAction(
        event_id=row.id,
        timestamp_ms=row.timestamp_ms,
        kind=kind,
        actor=row.issuer.display,
        action=_action(kind, row.kind),
        approver=_approver(kind, row),
        rule=_first(row.kind, _RULES) or _required(row.kind),
        outcome=_outcome(kind, row.kind),
    )


def _action(kind: str, fields: Mapping[str, Any]) -> str:
    return _required(fields) or _first(fields, _ACTIONS) or kind


def _required(fields: Mapping[str, Any]) -> str | None:
    required = fields.get("required_actions")
    return ",".join(map(str, required)) or None if isinstance(required, Sequence) else None


def _approver(kind: str, row: parts.AuditEvent) -> str | None:
    by = row.kind.get("authorized_by")
    if isinstance(by, Sequence) and by and isinstance(by[0], Mapping):
        return str(by[0].get("granted_by_display"))
    if kind in ("hermes_approval_answered", "hermes_approval_resolved"):
        return row.issuer.display
    return _first(row.kind, ("granted_by_display",))


def _outcome(kind: str, fields: Mapping[str, Any]) -> str:
    for name, (yes, no) in {"passed": ("allowed", "denied"), "error": ("failed", "ok")}.items():
        if isinstance(fields.get(name), bool):
            return yes if fields[name] else no
    return _first(fields, _OUTCOMES) or _ENDINGS.get(kind.rpartition("_")[2], "ok")


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((str(fields[name]) for name in names if fields.get(name) not in (None, "")), None)


HANDLERS: Final[Mapping[str, Handler]] = {"query_provenance": query_provenance}
