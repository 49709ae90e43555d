"""The rows that one run leaves in the supervisor's log: who asked, what started, how it ended, what was refused.

Every row of a run carries its id and the operator who answers for it, once that is known.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from policy import clocks, denials, errors, events
from policy.manifest.agent import Manifest
from policy.prove import live
from policy.signing import trust
from sandbox.bundle import SELF_TEST
from sandbox.ledger import Ledger
from sandbox.runner import Finished


class Rows:
    """One run's pen. ``attribute`` and ``agent_id`` are filled in as they become known."""

    def __init__(self, ledger: Ledger, run_id: str, issuer: Mapping[str, str]) -> None:
        self._ledger, self._run_id, self._issuer = ledger, run_id, issuer
        self.agent_id: str | None = None
        self.operator: str | None = None
        self.signers: tuple[trust.Signer, ...] = ()
        self.started = False

    def attribute(self, signers: tuple[trust.Signer, ...], operator: str | None) -> None:
        """Who answers for the run: signers that count for this manifest, not a name that it merely gives."""
        self.signers, self.operator = signers, operator or signers[0].name

    def capability_check(self, manifest: Manifest) -> None:
        """What the manifest requires of its caller; the operator at the command line holds everything."""
        required = list(manifest.capabilities.required)
        display = self._issuer["display"]
        self._append(
            "capability_check",
            agent_id=manifest.agent.id,
            required_actions=required,
            missing_actions=[],
            passed=True,
            authorized_by=[{"action": a, "granted_by_display": display, "signature_b58": ""} for a in required],
        )

    def self_test_started(self, detail: str, *, name: str) -> None:
        """Durable before the sandbox of a self-test starts: whatever becomes of it, the log says that it was there."""
        self._append("self_test_started", name=name, detail=detail)

    def self_test(self, detail: str, *, passed: bool, name: str = "system call filter") -> None:
        """What the live probe of runsc found, or the canaries of a policy."""
        self._append("self_test", name=name, passed=passed, detail=detail)

    def run_started(
        self,
        manifest: Manifest,
        deadline: clocks.Deadline,
        *,
        intent_id: str,
        package: str,
        policy_digest: str | None,
        payload_digest: str | None,
        not_enforced: tuple[str, ...],
    ) -> None:
        """Durable before the agent starts."""
        self._append(
            "run_started",
            agent_id=manifest.agent.id,
            intent_id=intent_id,
            package=package,
            policy_digest=policy_digest,
            payload_digest=payload_digest,
            backend=manifest.sandbox.backend,
            signers=[s.name for s in self.signers],
            not_enforced=list(not_enforced),
            deadline_ms=deadline.milliseconds,
            deadline_clock=deadline.clock,
        )
        self.started = True

    def denied(self, row: denials.Row) -> None:
        """Something was refused to the agent, ``row.count`` times since its last row (sandbox.denials bounds them)."""
        denial = row.denial
        self._append(
            "denied",
            agent_id=self.agent_id,
            denial=denial.id,
            layer=denial.layer,
            target=denial.target,
            code=denial.code,
            grant=denial.grant,
            count=row.count,
        )

    def drift(self, layer: live.Layer) -> None:
        """Something that confines the agent is not as it was made; durable before the run is ended for it."""
        self._append("drift", agent_id=self.agent_id, layer=layer.name, expected=layer.expected, found=layer.found)

    def run_ended(
        self, *, status: str, code: str | None, finished: Finished | None = None, digest: str | None = None
    ) -> None:
        """The last row of a run that was started; ``finished`` is None when the machine failed it."""
        exit_status = finished.exit_status if finished else None
        # runsc says 128 + n for a signal as a shell does; an agent may exit with such a number itself.
        by_signal = exit_status is not None and 0 < exit_status - 128 < signal.NSIG
        self._append(
            "run_ended",
            agent_id=self.agent_id,
            status=status,
            code=code,
            exit_status=None if by_signal else exit_status,
            exit_signal=exit_status - 128 if exit_status is not None and by_signal else None,
            duration_ms=int(finished.total_seconds * 1000) if finished else 0,
            oom=finished is not None and finished.oom_kills > 0,
            stdout_bytes=len(finished.stdout) if finished else 0,
            stderr_bytes=finished.stderr_total if finished else 0,
            result_hash_hex=digest,
        )
        self.started = False

    def intent_dispatched(self, intent_id: str, text: str, digest: str) -> None:
        """Version 1's row of an intent that was answered."""
        self._append(
            "intent_dispatched",
            intent_id=intent_id,
            intent_text=text,
            matched_agent=self.agent_id,
            result_hash_hex=digest,
            status="ok",
        )

    def failure(self, error: BaseException, *, package_digest: str) -> None:
        """The row of a refusal, or of a run that was started and that the machine failed."""
        fault = errors.InternalError if isinstance(error, Exception) else errors.StoppedError
        code = error.code if isinstance(error, errors.CovenantError) else fault.code
        if self.started:
            self.run_ended(status="failed", code=code)
        elif isinstance(error, errors.CovenantError) and not isinstance(error, errors.UsageError):
            fields = events.rejection(error, agent_id=self.agent_id, package_digest=package_digest)
            self._append("manifest_rejected", **fields)

    def _append(self, kind: str, **fields: Any) -> None:
        fields |= {"run_id": self._run_id, "operator": self.operator}
        self._ledger.append(kind, fields, issuer=self._issuer, now_ms=int(time.time() * 1000))


def cut_off(ledger: Ledger, run_id: str, label: Mapping[str, str]) -> None:
    """The last row of a run whose supervisor died while it ran; without it the log would show it as running."""
    if SELF_TEST in label:
        return  # no agent ran; the self-test will be made again
    rows = Rows(ledger, run_id, {name: label[name] for name in ("display", "pubkey")})
    rows.agent_id, rows.operator = label["agent_id"], label["operator"] or None
    rows.run_ended(status="failed", code=errors.CutOffError.code)
