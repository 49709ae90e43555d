"""The supervisor's log rows about the runs of one request, from its frame ``rows``.

Each row has its line and its anchor from that log (sandbox.audit.run_report), and is checked against its own hash: only
rows that match are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from policy import budget, errors
from policy.audit_log import chain, events
from policy.contract import Usage

# Twice as many as a supervisor sends: it is trusted, but its mistake must not fill our memory.
_MOST_ROWS: Final = 2048
_TOLD: Final = "told"


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One row: its place in the supervisor's log, and its line; None if that is too long to be sent."""

    anchor: chain.Anchor
    line: str | None
    kind: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """The usage of a run and all its descendants that had ended at the reply.

    ``runs`` were started, ``unended`` of them had not ended, and for ``uncounted`` some usage is missing from the sums.
    Memory is the peak of each run, over its time; ``credits`` are the prices of what was asked at service gates.
    """

    runs: int
    unended: int
    uncounted: int
    cpu_ms: int
    memory_byte_ms: int
    wall_ms: int
    credits: int


@dataclass(frozen=True, slots=True)
class SupervisorReport:
    """The rows, oldest first, and ``origin``, the key id of their log.

    ``left_out`` rows are missing; ``missing`` says why, and is empty if none are.
    """

    origin: str | None = None
    rows: tuple[ReportRow, ...] = ()
    left_out: int | None = 0
    missing: str = ""
    family: Family | None = None


def read(document: Mapping[str, Any] | None) -> SupervisorReport:
    """Parse the frame, or return the reason why it is missing or invalid."""
    if document is None:
        return SupervisorReport(left_out=None, missing="the supervisor sent none")
    if "missing" in document:
        return SupervisorReport(left_out=None, missing=str(document["missing"])[:1000])
    try:
        found = [_row(*one) for one in document["rows"][:_MOST_ROWS]]
        left_out = _count(document["left_out"]) + len(document["rows"]) - len(found)
        family = Family(**{name: _count(document["family"][name]) for name in Family.__slots__})
        origin = document["origin"]
        if not isinstance(origin, str) or any(c not in "0123456789abcdef" for c in origin) or len(origin) != 64:
            raise ValueError(origin)
    except (AttributeError, KeyError, TypeError, ValueError):
        return SupervisorReport(left_out=None, missing="what the supervisor sent are no rows")
    missing = f"more than are copied, {left_out} are not" if left_out else ""
    if document.get("whole") is not True:
        missing = "its log grew by more than is looked through meanwhile"
    return SupervisorReport(origin, tuple(found), left_out if document.get("whole") is True else None, missing, family)


def _row(anchor: str, line: str | None) -> ReportRow:
    place = chain.Anchor.parse(anchor.encode())
    if place is None:
        raise ValueError(anchor)
    if line is None:
        return ReportRow(place, None)
    raw = line.encode()
    begins = events.begins(raw)
    if begins is None or chain.event_hash(raw) != place.event_hash_hex:
        raise ValueError(line)
    return ReportRow(place, line, begins.kind, begins.run_id)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(value)
    return value


def with_told(error: errors.CovenantError, told: SupervisorReport | None) -> errors.CovenantError:
    """Return the error with the report about its runs."""
    if told is not None:
        error.details[_TOLD] = told
    return error


def of(error: BaseException) -> SupervisorReport | None:
    """Return the report about the runs of a request that ended with this error; None if there is none."""
    found = error.details.get(_TOLD) if isinstance(error, errors.CovenantError) else None
    return found if isinstance(found, SupervisorReport) else None


def billed(usage: Usage, told: SupervisorReport | None) -> budget.BudgetUsage:
    """Return the usage that a run is billed for: its whole family's if the supervisor reports it, and at least its
    own."""
    own = budget.BudgetUsage.of_peak(
        cpu_ms=usage.cpu_ms or 0, memory_peak_bytes=usage.memory_peak_bytes or 0, wall_ms=usage.wall_ms or 0
    )
    family = None if told is None else told.family
    if family is None:
        return own
    return budget.BudgetUsage(
        max(own.cpu_ms, family.cpu_ms),
        max(own.memory_byte_ms, family.memory_byte_ms),
        max(own.wall_ms, family.wall_ms),
        family.credits,
    )
