"""The runners' steps at the events of a run: its use is counted, and a revoked run waits for its tree."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from policy import denials, errors
from policy.prove import live
from sandbox.broker.server import Broker
from sandbox.control import tree_kill
from sandbox.run_io import RunObserver
from sandbox.runner.limits import Meter


class RunnerObserver(Struct, frozen=True):
    """Pass the events of a run to ``run``, with the runner's steps at the intent and at the end (run_io.RunObserver).

    - ``meter`` counts the use from the intent on, and ``broker`` answers the agent from the intent on.
    - ``swept`` is the directory of a run that waits at its end for a process that kills its tree. None: it waits for
      none.
    """

    run: RunObserver
    meter: Meter
    broker: Broker | None = None
    swept: Path | None = None

    def denied(self, denial: denials.Denial, *, count: int = 1) -> None:
        """Pass a refusal on."""
        self.run.denied(denial, count=count)

    def drifted(self, layer: live.Layer) -> None:
        """Pass a drift on."""
        self.run.drifted(layer)

    def starting(self) -> None:
        """Let the broker answer, and begin the count. The run's own step comes first: it may raise."""
        self.run.starting()
        if self.broker is not None:
            self.broker.begin()
        self.meter.begin()

    def ending(self, error: errors.RunError) -> None:
        """Finish a run that is revoked, once the revoking process has ended all of its runs."""
        if self.swept is not None:
            tree_kill.wait_for_sweep(self.swept)
        self.run.ending(error)
