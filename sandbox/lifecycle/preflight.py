"""Checks before an agent may start: its services can be reached, this runsc applies a filter, and the policy refuses
all that it forbids.

The last two are self-tests. Each has its rows in the log, the first before the sandbox of the test exists.
"""

from __future__ import annotations

from policy import decide, errors
from policy.host import HostFacts
from policy.rules import host_network as needs
from sandbox import progress
from sandbox.audit.run_events import RunEvents
from sandbox.config import file_of
from sandbox.host import filter_check
from sandbox.lifecycle import probe_run
from sandbox.lifecycle.types import RunDependencies
from sandbox.rundir.uid_pool import UidLease
from sandbox.runner import gvisor, prepare


def host_network(decision: decide.Decision, facts: HostFacts, dependencies: RunDependencies) -> None:
    """Refuse the first grant that can do nothing without the host's network, unless the run's processes are in it.

    Raises:
        errors.NotEnforceableError: Raised when there is such a grant.
    """
    if dependencies.isolated and facts.isolates_runs:
        file = str(file_of(dependencies.config.state))
        for refusal in needs.refusals(decision.effective, facts, where=decision.manifest.where, file=file):
            raise refusal


def runsc(dependencies: RunDependencies, rows: RunEvents, facts: HostFacts) -> bool:
    """Test that runsc applies the filter, unless that is proved. Returns whether the test was made now.

    Raises:
        errors.NotEnforceableError: Raised when runsc does not apply it.
    """
    if filter_check.proved(dependencies.config, facts):
        return False
    assert facts.runsc is not None
    rows.self_test_started(f"runsc sha256 {facts.runsc.sha256[:16]}", name="system call filter")
    with progress.step("trying whether this runsc holds an agent"):
        proof = filter_check.prove(dependencies.config, facts)
    rows.self_test(proof.detail, passed=not proof.fault)
    if proof.fault:
        raise errors.NotEnforceableError(
            f"this runsc cannot hold an agent: {proof.fault}",
            hint="run `covenant doctor` for the fix",
            grant="permissions.syscalls",
        )
    return True


def policy(
    dependencies: RunDependencies,
    rows: RunEvents,
    decision: decide.Decision,
    facts: HostFacts,
    job: gvisor.SandboxSpec,
    uids: UidLease,
    *,
    now_ms: int,
) -> bool:
    """Try under the policy all that it forbids, once a day and after any change, before the agent may start.

    Returns whether the test was made now.

    Raises:
        errors.SelfTestError: Raised when something forbidden was not refused, or could not be tried.
    """
    key = probe_run.SelfTestKey(decision.policy_digest, facts, dependencies.config.uplink)
    if probe_run.passed(dependencies.path, key, now_ms=now_ms):
        return False
    rows.self_test_started(f"policy {decision.policy_digest[:16]}", name="canaries")
    try:
        closures = prepare.closures(decision, facts)
        with progress.step("trying what its policy forbids, before its first run of the day"):
            faults = probe_run.attempt(job, closures, runs=dependencies.path / "runs", uids=uids)
    except errors.CovenantError as e:
        # The machine lacks something that the run needs as well: its fix is the one, and never self_test = false.
        rows.self_test(
            f"policy {decision.policy_digest[:16]}: it could not be tried: {e.message}", passed=False, name="canaries"
        )
        raise errors.SelfTestError(f"the policy cannot be tried here: {e.message}", hint=e.hint, where=e.where) from e
    says = faults[0] if faults else "what it forbids is refused, what it allows is not"
    rows.self_test(f"policy {decision.policy_digest[:16]}: {says}", passed=not faults, name="canaries")
    if faults:
        raise probe_run.error(faults)
    probe_run.remember(dependencies.path, key, now_ms=now_ms)
    return True
