"""Attest a live run at intervals, and write each drift."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from policy import errors
from policy.compile.artefacts import Artefacts
from policy.prove.live import Layer, Standing
from sandbox.attest.reference import ReferenceValues
from sandbox.attest.verifier import Examination, VerifierCache, examine
from sandbox.kernel import procfs
from sandbox.run_io import Outcome, PeriodicCheck

# How long a sandbox may take to end before its absence counts as drift, and the interval of the checks meanwhile.
_LEAVING_SECONDS, _AGAIN_SECONDS = 10.0, 0.5
# The same for the first check, before the agent gets its intent; the shim does nothing else meanwhile.
FIRST_SECONDS, FIRST_AGAIN_SECONDS = 2.0, 0.02
# The most alarms of one run, where drift does not end it.
_MOST_ALARMS = 100


class Attestor:
    """Attest one run periodically.

    ``drifted`` is called with each layer that does not hold, before the run is ended for it. With ``alarm`` the run is
    not ended. A run that is ``over`` is not examined: in a tree that is being killed, attestation would take CPU from
    the kills still in progress. ``completed`` adds what is known only once the sandbox runs.
    """

    def __init__(
        self,
        made: ReferenceValues,
        artefacts: Artefacts,
        *,
        state: Path,
        seconds: float,
        alarm: bool,
        drifted: Callable[[Layer], None],
        over: Callable[[], bool] = lambda: False,
        completed: Callable[[ReferenceValues], ReferenceValues] = lambda made: made,
    ) -> None:
        self._made, self._artefacts, self._state = made, artefacts, state
        self._seconds, self._alarm, self._drifted, self._over = seconds, alarm, drifted, over
        self._completed = completed
        self._known = VerifierCache()
        self._started = self._seen = False
        self._missing = 0.0
        self._told: set[Layer] = set()
        self._alarms = 0

    def started(self) -> None:
        """Begin to examine the run: the agent's first process exists."""
        self._started = True

    def round(self) -> PeriodicCheck:
        """Return the round for the exchange: once before the agent gets its intent, then at each interval."""
        return PeriodicCheck(self._seconds, self._look, self._wait, at_start=True)

    def _look(self) -> Outcome:
        if not self._started:
            return None
        report = self._examine() if self._seen else self._first()
        if not report.gone:
            self._seen, self._missing = True, 0.0
            return self._judge([layer for layer in report.layers if not layer.holds])
        self._missing += _AGAIN_SECONDS
        if self._over() or (self._missing < _LEAVING_SECONDS and (self._seen or not self._runs())):
            return None
        return self._judge([Layer("process", Standing.WIDER, "a gofer and a sandbox", "they are not there")])

    def _first(self) -> Examination:
        """Examine the run for the first time. Retries while the sandbox is absent and ``runsc run`` lives, at most 2 s.

        INVARIANT: no agent gets an intent before this examination.
        """
        self._made = self._completed(self._made)
        until = time.monotonic() + FIRST_SECONDS
        while (report := self._examine()).gone and self._runs() and not self._over() and time.monotonic() < until:
            time.sleep(FIRST_AGAIN_SECONDS)
        return report

    def _examine(self) -> Examination:
        return examine(self._made, self._artefacts, self._known, state=self._state, over=self._over)

    def _runs(self) -> bool:
        return procfs.name(self._made.runner.pid) == self._made.runner

    def _wait(self) -> float:
        return min(_AGAIN_SECONDS, self._seconds) if self._missing else self._seconds

    def _judge(self, drift: list[Layer]) -> Outcome:
        for layer in drift:
            if layer not in self._told and self._alarms < _MOST_ALARMS:
                self._alarms += 1
                self._drifted(layer)
        # Drift that was undone and comes back is reported again.
        self._told = set(drift)
        if not drift or self._alarm:
            return None
        first = drift[0]
        return errors.DriftError(
            f"{first.name} is not as it was made: {first.found}, not {first.expected}",
            hint="see `covenant audit recent`; whoever changed it had root",
            layer=first.name,
        )
