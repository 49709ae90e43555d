"""Watch the trust state for revocations, from a live run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from policy import errors
from sandbox.control.revocation import Write, enforce, line_of
from sandbox.run_io import Outcome, PeriodicCheck
from sandbox.rundir import marks
from sandbox.storage.trust_state import State

# How often a shim checks its mark (seconds), and at every which check the root's version: for revocations that
# no process announced.
_LOOK_SECONDS, VERSION_EVERY = 0.25, 8


class RevocationWatch:
    """Check a run's own mark, and whether a new trust root revokes what the run rests on. A shim calls it by the clock.

    ``state`` is None for a run that no operator's trust root decides about (covenant dev). ``version`` is the root that
    the run was verified under, None for an unsigned package. A newer root may revoke what the run rests on, also where
    the process that installed it was killed before it enforced it.
    """

    def __init__(
        self, path: Path, label: Mapping[str, str], state: State | None, write: Write, *, version: int | None = None
    ) -> None:
        self._path, self._state, self._write = path, state, write
        self._line = line_of(label)
        if version is None:
            version = state.root_version() if state is not None else 0
        self._version = self._seen = version
        self._looks = 0

    def round(self) -> PeriodicCheck:
        """Return the check for the exchange, which also runs just before the agent is given its intent."""
        return PeriodicCheck(_LOOK_SECONDS, self.look, at_start=True)

    def look(self) -> Outcome:
        """Return the error that ends the run, or None."""
        self._looks += 1
        outcome = self._look_at_the_root() if self._looks % VERSION_EVERY == 0 else None
        return marks.verdict(self._path) or outcome

    def _look_at_the_root(self) -> Outcome:
        if self._state is None or (version := self._state.root_version()) == self._version:
            return None
        if version != self._seen:  # the process that installed it enforces it next: act only at the second look
            self._seen = version
            return None
        root = self._state.present_root()
        reason = next((why for one in self._line if (why := one.revoked(root)) is not None), None)
        if reason is None:
            self._version = version
            return None
        enforce(self._path.parent, root, write=self._write, own=self._path)
        # Also where no mark could be written: on a full disk it would go on for good.
        return errors.RunRevokedError(reason)
