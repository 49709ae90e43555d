"""How a run starts: at once with its intent, or ahead of it (sandbox.standby).

``Run`` (sandbox.lifecycle.run) calls its mode at the steps where the two differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from policy import clocks, decide
from policy.contract import LINE, Contract
from policy.host import HostFacts
from policy.manifest.agent import Manifest
from policy.rules.case import Unsigned
from policy.signing import trust
from sandbox.run_io import RunOutcome
from sandbox.runner.spec import SandboxSpec


class StartRecord(Struct, frozen=True):
    """The start of a run as its row states it. ``contract`` reads the answer, ``not_enforced`` is for the log."""

    trusted: trust.TrustedPackage | Unsigned
    manifest: Manifest
    deadline: clocks.Deadline
    policy_digest: str | None = None
    not_enforced: tuple[str, ...] = ()
    contract: Contract = LINE


class StartMode(Protocol):
    """The steps of a run that depend on when the agent gets its intent. Each may refuse with a CovenantError."""

    def decided(
        self, trusted: trust.TrustedPackage | Unsigned, decision: decide.Decision | None, facts: HostFacts
    ) -> None:
        """Take the decision, before anything is prepared. It is None for trusted-local, which has no sandbox."""

    def check_serial(self, trusted: trust.TrustedPackage, last: trust.Accepted | None) -> None:
        """Check the package against the highest serial that was accepted, behind the gate."""

    def adapt(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec that the runner is given."""

    def begin(self, record: StartRecord, log_start: Callable[[StartRecord], None]) -> None:
        """Write the start, now or when the intent has come. ``log_start`` writes its rows durably."""

    def ended(self, outcome: RunOutcome) -> None:
        """Take the end of the sandbox, before the end of the run is written."""

    def failed(self, error: BaseException, log_failure: Callable[[BaseException], None]) -> None:
        """Write the last rows of a run that did not end by itself."""


class ImmediateStart:
    """Start a run that has its intent."""

    def decided(
        self, trusted: trust.TrustedPackage | Unsigned, decision: decide.Decision | None, facts: HostFacts
    ) -> None:
        """Accept every decision."""

    def check_serial(self, trusted: trust.TrustedPackage, last: trust.Accepted | None) -> None:
        """Accept every serial that the run's own check accepts."""

    def adapt(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec as it is."""
        return spec

    def begin(self, record: StartRecord, log_start: Callable[[StartRecord], None]) -> None:
        """Write the start now."""
        log_start(record)

    def ended(self, outcome: RunOutcome) -> None:
        """Every end of the sandbox is an end of the run."""

    def failed(self, error: BaseException, log_failure: Callable[[BaseException], None]) -> None:
        """Write the failure now."""
        log_failure(error)
