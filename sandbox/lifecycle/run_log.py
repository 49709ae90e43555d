"""Write the events of a run to the log: the observer that every part of a run reports to."""

from __future__ import annotations

from policy import denials, errors
from policy.prove import live
from sandbox.audit.denials import DenialLog
from sandbox.audit.run_events import RunEvents
from sandbox.shim.operations import RunOperations


class RunLog:
    """Pass the events of one run to its writers (run_io.RunObserver).

    Denials are bounded first (audit.denials). A start and an end concern the operations on the run as well.
    """

    def __init__(self, rows: RunEvents, denied: DenialLog, operations: RunOperations) -> None:
        self._rows, self._denials, self._operations = rows, denied, operations

    def denied(self, denial: denials.Denial, *, count: int = 1) -> None:
        """Write a denial. Raises ``errors.LedgerError`` when its row cannot be written."""
        self._denials.told(denial, count=count)

    def drifted(self, layer: live.Layer) -> None:
        """Write a drift. Raises ``errors.LedgerError`` when its row cannot be written."""
        self._rows.drift(layer)

    def starting(self) -> None:
        """Write that the run is running, where that is not written yet."""
        self._operations.starting()

    def ending(self, error: errors.RunError) -> None:
        """Write the end that is about to come."""
        self._operations.ending(error)
