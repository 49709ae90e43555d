"""Report to a client the log's rows of the runs of one request, unchanged, and the resources that they used.

A family is the requested run and all its descendants. Each row of a child is issued by ``<agent>@<run id of its
parent>``, a name that no other issuer has. Rows without a run and rows of other runs are left out. The report is
bounded, and counts the rows that it leaves out. The usage is summed over all rows of the family, reported or not.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from policy.audit_log import events
from sandbox.audit.log import Ledger

# The most rows and bytes of a family in a report. The second line is the share of its last rows.
MOST_ROWS, MOST_BYTES = 1024, 1 << 20
LAST_ROWS, LAST_BYTES = 256, 1 << 18
# A longer row, such as that of a long intent, is reported by its hash only.
ROW_BYTES: Final = 64 << 10
# The most bytes of the log that are read for one request, over all calls of ``read``. A row of another family counts
# with at most OTHERS_BYTES: only its beginning is parsed, and long intents of others must not use up the budget.
# PASSED_BYTES bounds all bytes that are read, about a second of work.
LOOKED_BYTES, OTHERS_BYTES, PASSED_BYTES = 16 << 20, 4096, 256 << 20
_U64_MAX: Final = 2**64 - 1
# (records, bytes of events, bytes of the chain): a position in the log.
Mark = tuple[int, int, int]


@dataclass
class RunReport:
    """Rows with their anchors, both unchanged from the log, and the resources that the family used.

    ``runs`` counts the started runs, ``unended`` those without an end yet. ``uncounted`` counts ended runs whose usage
    is partly missing in the sums: this machine does not count it, or the counting process was killed. ``credits`` are
    the prices of requests at service gates. ``whole`` says that the log was read from the first row of the family to
    the end.
    """

    rows: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    left_out: int = 0
    runs: int = 0
    unended: int = 0
    uncounted: int = 0
    cpu_ms: int = 0
    memory_byte_ms: int = 0
    wall_ms: int = 0
    credits: int = 0
    whole: bool = True

    def document(self, origin: str) -> dict[str, Any]:
        """Return the content of a frame. ``origin`` is the id of the log's key."""
        return {
            "kind": "rows",
            "origin": origin,
            "rows": [
                [anchor.decode("ascii"), None if line is None else line.decode("ascii")] for anchor, line in self.rows
            ],
            "left_out": self.left_out,
            "whole": self.whole,
            "family": {
                "runs": self.runs,
                "unended": self.unended,
                "uncounted": self.uncounted,
                # The client writes these numbers into its own rows, which have 64 bits for a number.
                "cpu_ms": min(self.cpu_ms, _U64_MAX),
                "memory_byte_ms": min(self.memory_byte_ms, _U64_MAX),
                "wall_ms": min(self.wall_ms, _U64_MAX),
                "credits": min(self.credits, _U64_MAX),
            },
        }


class RunReportReader:
    """Reads the rows of one request from the log. Each ``read`` continues at the end of the last one.

    Call ``began`` for each run of the request, and ``refused`` for a row that was written without a run.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._since = self._request = ledger.mark
        self._runs: set[str] = set()
        self._refusals: set[str] = set()
        self._again()

    def _again(self) -> None:
        """Start reading from the beginning: a run that joins the family has earlier rows."""
        self._at: Mark | None = None
        self._family, self._open = set(self._runs), set[str]()
        self._found, self._kept = RunReport(), _Kept()
        self._looked = self._passed = 0
        self._to_the_end = False

    def began(self, run_id: str, since: Mark | None) -> None:
        """Add a run that is about to have rows. ``since`` is the earlier position of rows of its standby instance."""
        self._runs.add(run_id)
        self._since = min(self._since, since or self._since, key=lambda mark: mark[0])
        self._again()

    def refused(self, event_id: str) -> None:
        """Add the row of a refusal that has no run."""
        self._refusals.add(event_id)
        self._again()

    @property
    def lost(self) -> set[str]:
        """Runs of the family with a start and no end, by the last ``read``.

        Empty if it did not reach the end of the log: their ends may be there.
        """
        return set(self._open) if self._to_the_end else set()

    def read(self) -> RunReport:
        """Read the log on to its present end, within the bounds.

        Raises:
            errors.LedgerError: Raised when the log is inconsistent or cannot be read.
        """
        found, kept = self._found, self._kept
        if self._at is None:
            # The rows of an instance that was made long ago may be further back than the bounds allow.
            found.whole = _may_be_read(self._since, self._ledger.refreshed())
            self._at = self._since if found.whole else self._request
        self._to_the_end = True
        for anchor, line in self._ledger.rows(self._at):
            row = events.begins(line)
            ours = row is not None and self._is_ours(row)
            if not self._may_look(len(anchor) + 1, len(line) + 1, ours=ours):
                found.whole = self._to_the_end = False
                break
            self._at = self._at[0] + 1, self._at[1] + len(line) + 1, self._at[2] + len(anchor) + 1
            if row is not None and ours:
                if row.run_id is not None:
                    self._count(found, row.kind, row.run_id, line)
                kept.add(anchor, line)
        found.rows, found.left_out, found.unended = kept.rows(), kept.left_out, len(self._open)
        return found

    def _may_look(self, anchor: int, line: int, *, ours: bool) -> bool:
        """Whether the bounds leave room for one more row. If so, the row is counted."""
        looked = self._looked + anchor + (line if ours else min(line, OTHERS_BYTES))
        passed = self._passed + anchor + line
        if looked > LOOKED_BYTES or passed > PASSED_BYTES:
            return False
        self._looked, self._passed = looked, passed
        return True

    def _is_ours(self, row: events.Begins) -> bool:
        if row.run_id is not None and (row.run_id in self._family or row.host in self._family):
            self._family.add(row.run_id)
            return True
        return row.event_id in self._refusals

    def _count(self, found: RunReport, kind: str, run_id: str, line: bytes) -> None:
        if kind == "run_started":
            found.runs += 1
            self._open.add(run_id)
        elif kind == "run_ended":
            self._open.discard(run_id)
            used = json.loads(line)["kind"]
            found.uncounted += any(used[name] is None for name in ("cpu_ms", "memory_peak_bytes", "wall_ms"))
            wall_ms = used["wall_ms"] or 0
            found.cpu_ms += used["cpu_ms"] or 0
            found.memory_byte_ms += (used["memory_peak_bytes"] or 0) * wall_ms
            found.wall_ms += wall_ms
        elif kind in ("model_asked", "web_asked"):
            found.credits += json.loads(line)["kind"]["credits"]


class _Kept:
    """Keeps the first rows and the last rows within the bounds: how a family began and how it ended."""

    def __init__(self) -> None:
        self._first: list[tuple[bytes, bytes | None]] = []
        self._last: deque[tuple[bytes, bytes | None]] = deque()
        self._bytes = self._last_bytes = self.left_out = 0

    def add(self, anchor: bytes, line: bytes) -> None:
        one = anchor, line if len(line) <= ROW_BYTES else None
        size = _size(one)
        has_room = len(self._first) < MOST_ROWS - LAST_ROWS and self._bytes + size <= MOST_BYTES - LAST_BYTES
        if not self._last and has_room:
            self._first.append(one)
            self._bytes += size
            return
        self._last.append(one)
        self._last_bytes += size
        while len(self._last) > LAST_ROWS or self._last_bytes > LAST_BYTES:
            self._last_bytes -= _size(self._last.popleft())
            self.left_out += 1

    def rows(self) -> list[tuple[bytes, bytes | None]]:
        return [*self._first, *self._last]


def _may_be_read(first: Mark, last: Mark) -> bool:
    """Whether the bounds allow reading everything between, if most rows belong to other families."""
    count, lines, anchors = (to - since for to, since in zip(last, first, strict=True))
    return anchors + min(lines, count * OTHERS_BYTES) <= LOOKED_BYTES and anchors + lines <= PASSED_BYTES


def _size(one: tuple[bytes, bytes | None]) -> int:
    return len(one[0]) + len(one[1] or b"")
