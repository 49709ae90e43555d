"""Checks before an agent may start: its services can be reached, this runsc applies a filter, and the policy refuses
all that it forbids.

The last two are self-tests. Each has its rows in the log, the first before the sandbox of the test exists.
"""

from __future__ import annotations

from collections.abc import Iterator

from policy import decide, errors
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest.services import LOOPBACK
from sandbox import progress
from sandbox.audit.run_events import RunEvents
from sandbox.config import Config, file_of
from sandbox.host import filter_check
from sandbox.lifecycle import probe_run
from sandbox.lifecycle.types import RunDependencies
from sandbox.network.service import providers
from sandbox.rundir.uid_pool import UidLease
from sandbox.runner import gvisor, prepare


def host_network(decision: decide.Decision, dependencies: RunDependencies) -> None:
    """Refuse the first grant that can do nothing without the host's network, unless the run's processes are in it.

    A shim of the supervisor is in an empty network namespace, unless the operator named an uplink, a proxy or a vault
    that is a server (sandbox.serve.connection). The connectors of the run's gates are then in that namespace as well,
    and reach no address: not of a provider, and not of this host's loopback.

    A provider of kind `mock` needs no network, and neither do made-up pages.

    Raises:
        errors.NotEnforceableError: Raised when there is such a grant.
        errors.ConfigError: Raised when providers.toml is malformed.
    """
    config = dependencies.config
    if not dependencies.isolated or config.proxy.url:
        return
    for grant, wanted, instead in _needing_host_network(decision, config):
        raise errors.NotEnforceableError(
            f"{wanted} the host's network, and the supervisor is not in it",
            hint=f'write uplink = "NAME", an interface that `ip link` shows, or a [proxy] in {file_of(config.state)} '
            f"and reload the supervisor{instead}",
            grant=grant,
            where=decision.manifest.where(grant),
        )


def _needing_host_network(decision: decide.Decision, config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the key of each such grant, the beginning of its error, and another fix."""
    effective = decision.effective
    if effective.services.models or effective.web.search or effective.web.fetch:
        yield from _needing_it_for_providers(effective, providers.load_all(config.state))
    if effective.agents:
        yield "services.agents.allow", "agents are asked by", ""
    if effective.telemetry:
        yield "services.telemetry.signals", "the collector of telemetry is reached by", ""
    for port in effective.host_ports.numbers():
        yield "permissions.network", f"port {port} of host.covenant is in", ""
    for _, to in effective.publish.pairs():
        if to.startswith(LOOPBACK):
            yield "publish", f"publishing at {to} needs", ", or publish at unix:/PATH"


def _needing_it_for_providers(effective: Effective, operators: providers.Operators) -> Iterator[tuple[str, str, str]]:
    named = {
        "services.models": {name for name, _ in effective.services.models},
        "services.search": set(effective.web.search),
    }
    for key, names in named.items():
        for name in sorted(names):
            if name in operators.providers and operators.providers[name].kind != "mock":
                yield f"{key}.allow", f"provider `{name}` is reached by", ""
    mocked = any(one.mock and effective.web.holds(host) for host, one in operators.pages.items())
    if effective.web.fetch and not mocked:
        yield "services.fetch.hosts", "pages are fetched by", ""


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
        faults = (f"it could not be tried: {e.message}",)
    says = faults[0] if faults else "what it forbids is refused, what it allows is not"
    rows.self_test(f"policy {decision.policy_digest[:16]}: {says}", passed=not faults, name="canaries")
    if faults:
        raise probe_run.error(faults)
    probe_run.remember(dependencies.path, key, now_ms=now_ms)
    return True
