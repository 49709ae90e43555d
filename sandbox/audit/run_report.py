"""What the log says of the runs that came of one request, for whoever asked: their rows as they stand, and their use.

A family is the run that was asked for and all that descends from it: of a child, each row is issued by
``<agent>@<run id of its parent>``, which is no display that anybody else has. Rows without a run, and rows of other
runs, are nobody's here. What is told has bounds, and says how much it left out; what the family used is summed over
all of its rows, told or not.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from policy.audit_log import events
from sandbox.audit.log import Ledger

# Of one family: so many rows and bytes of them are told, the first and, from here on, the last.
MOST_ROWS, MOST_BYTES = 1024, 1 << 20
_LAST_ROWS, _LAST_BYTES = 256, 1 << 18
# A longer row, such as that of a long intent, is told by its hash alone.
ROW_BYTES: Final = 64 << 10
# What of the log is read for one request, however often it is looked: what everybody wrote while the family lived. Of
# somebody else's row only the beginning is looked at, and it counts as no more than that: how long an intent is that
# others send takes nobody's rows and sums from them. All that goes by has a bound as well, a second of work.
LOOKED_BYTES, OTHERS_BYTES, PASSED_BYTES = 16 << 20, 4096, 256 << 20
_U64_MAX: Final = 2**64 - 1
# (records, bytes of events, bytes of the chain): where the reading of the log begins.
Mark = tuple[int, int, int]


@dataclass
class Told:
    """Rows with their anchors, both as they stand in the log, and what the family used.

    ``runs`` were started, ``unended`` of them had no end yet, and of ``uncounted`` that had, something is not in the
    sums: it is not counted on this machine, or whoever would have seen it was killed. ``whole`` says that the log was
    read from where the first of them has rows to its end.
    """

    rows: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    left_out: int = 0
    runs: int = 0
    unended: int = 0
    uncounted: int = 0
    cpu_ms: int = 0
    memory_byte_ms: int = 0
    wall_ms: int = 0
    whole: bool = True

    def document(self, origin: str) -> dict[str, Any]:
        """As a frame has it; ``origin`` is the id of the log's key."""
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
                # Whoever takes them writes them into rows, which have 64 bits for a number.
                "cpu_ms": min(self.cpu_ms, _U64_MAX),
                "memory_byte_ms": min(self.memory_byte_ms, _U64_MAX),
                "wall_ms": min(self.wall_ms, _U64_MAX),
            },
        }


class Retelling:
    """The rows of one request from ``since`` on. ``began`` is told of each run that comes of it, and ``refused`` of a
    row that was written before there was a run. Each ``read`` goes on from where the last one stopped."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._since = self._request = ledger.mark
        self._runs: set[str] = set()
        self._refusals: set[str] = set()
        self._again()

    def _again(self) -> None:
        """Nothing was read yet: a run that comes to the family has rows from before."""
        self._at: Mark | None = None
        self._family, self._open = set(self._runs), set[str]()
        self._found, self._kept = Told(), _Kept()
        self._looked = self._passed = 0
        self._to_the_end = False

    def began(self, run_id: str, since: Mark | None) -> None:
        """A run is about to have rows, or has some since an instance was made of which it comes."""
        self._runs.add(run_id)
        self._since = min(self._since, since or self._since, key=lambda mark: mark[0])
        self._again()

    def refused(self, event_id: str) -> None:
        """The row of a refusal that has no run."""
        self._refusals.add(event_id)
        self._again()

    @property
    def lost(self) -> set[str]:
        """Runs of the family that have a start and no end, as the last ``read`` saw them. None where it did not come
        to the end of the log, where their ends may be."""
        return set(self._open) if self._to_the_end else set()

    def read(self) -> Told:
        """What the log has now.

        Raises:
            errors.LedgerError: the log does not hold together, or cannot be read.
        """
        found, kept = self._found, self._kept
        if self._at is None:
            # Of an instance that was made long ago, its own rows are further back than is looked.
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
        """Whether the bounds leave room for one more row, which then counts."""
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

    def _count(self, found: Told, kind: str, run_id: str, line: bytes) -> None:
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


class _Kept:
    """The first rows up to the bounds, and the last behind them: how a family began, and how it ended."""

    def __init__(self) -> None:
        self._first: list[tuple[bytes, bytes | None]] = []
        self._last: deque[tuple[bytes, bytes | None]] = deque()
        self._bytes = self._last_bytes = self.left_out = 0

    def add(self, anchor: bytes, line: bytes) -> None:
        one = anchor, line if len(line) <= ROW_BYTES else None
        size = _size(one)
        has_room = len(self._first) < MOST_ROWS - _LAST_ROWS and self._bytes + size <= MOST_BYTES - _LAST_BYTES
        if not self._last and has_room:
            self._first.append(one)
            self._bytes += size
            return
        self._last.append(one)
        self._last_bytes += size
        while len(self._last) > _LAST_ROWS or self._last_bytes > _LAST_BYTES:
            self._last_bytes -= _size(self._last.popleft())
            self.left_out += 1

    def rows(self) -> list[tuple[bytes, bytes | None]]:
        return [*self._first, *self._last]


def _may_be_read(first: Mark, last: Mark) -> bool:
    """Whether the bounds let everything between be read, if most of it is somebody else's."""
    count, lines, anchors = (to - since for to, since in zip(last, first, strict=True))
    return anchors + min(lines, count * OTHERS_BYTES) <= LOOKED_BYTES and anchors + lines <= PASSED_BYTES


def _size(one: tuple[bytes, bytes | None]) -> int:
    return len(one[0]) + len(one[1] or b"")
