"""Copy the supervisor's rows about an intent into our own log, each with its origin, or a row for missing ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from covenant.runtime import supervisor_report
from covenant.runtime.runner import Spent, Usage, spent
from covenant.runtime.supervisor_report import Family, ReportRow, SupervisorReport
from covenant.stores.audit.interface import AuditEntry
from policy import errors

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller

# Failures that did not come from the supervisor's reply, so that it could not send its rows either.
_UNTOLD: Final = (errors.KilledError, errors.ServiceError, errors.InternalError)


def entries(found: SupervisorReport, intent_id: str, caller: Caller, *, run_id: str | None = None) -> list[AuditEntry]:
    """Return one row for each supervisor row, one if some are missing, and one for the usage of a family of runs."""
    made = [
        AuditEntry("supervisor_row", _copied(one, found.origin or "", intent_id), caller.agent) for one in found.rows
    ]
    if found.missing:
        made.append(_missing(intent_id, caller, found.missing, found=found, run_id=run_id))
    family = found.family
    if family is not None and (family.runs > 1 or family.unended or family.uncounted):
        used = {name: getattr(family, name) for name in Family.__slots__ if name != "credits"}
        made.append(AuditEntry("family_usage", {"intent_id": intent_id, "run_id": run_id, **used}, caller.agent))
    return made


def of_failed(error: errors.CovenantError, intent_id: str, caller: Caller, *, sandboxed: bool) -> list[AuditEntry]:
    """Return the rows for a run that failed with this error; ``sandboxed``: the supervisor was asked."""
    found, known = supervisor_report.of(error), took(error)
    if found is not None:
        return entries(found, intent_id, caller, run_id=None if known is None else known.run_id)
    if sandboxed and isinstance(error, _UNTOLD):
        # The rows exist only in the supervisor's log.
        return [_missing(intent_id, caller, error.message, found=SupervisorReport(left_out=None), run_id=None)]
    return []


def took(error: errors.CovenantError) -> Spent | None:
    """Return the usage of a failed run: from its reply, or the usage of its descendants if the machine failed it."""
    found = supervisor_report.of(error)
    family = None if found is None else found.family
    if (known := spent(error)) is not None or found is None or family is None or not family.cpu_ms:
        return known
    root = next((row.run_id for row in found.rows if row.kind == "run_started"), None)
    return Spent(Usage(None, None, None), root, told=found)


def _copied(row: ReportRow, origin: str, intent_id: str) -> dict[str, Any]:
    anchor = row.anchor
    return {
        "intent_id": intent_id,
        "run_id": row.run_id,
        "origin": origin,
        "index": anchor.index,
        "event_id": anchor.event_id,
        "event_hash_hex": anchor.event_hash_hex,
        "chain_hash_hex": anchor.chain_hash_hex,
        "row_type": row.kind,
        "line": row.line,
    }


def _missing(intent_id: str, caller: Caller, reason: str, *, found: SupervisorReport, run_id: str | None) -> AuditEntry:
    fields = {
        "intent_id": intent_id,
        "run_id": run_id,
        "origin": found.origin,
        "copied": len(found.rows),
        "left_out": found.left_out,
        "reason": reason,
    }
    return AuditEntry("supervisor_rows_missing", fields, caller.agent)
