"""Process one run from the package's bytes to the answer: verify, decide, log, start, exchange, log.

    (1) verify the envelope and the bytes, then parse the manifest from those same bytes
    (2) look at the host for what the manifest names
    (3) decide: the nine rules, and for linux-gvisor the compiled artefacts and the proof that runsc applies a filter
    (4) log the capability check, the accepted serial and the start, each durable before (5)
    (5) run, on the backend that the manifest names
    (6) log the end

Every refusal in (1) to (3) and every failure in (5) has its row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable

from policy import clocks, contract, decide, errors
from policy import lifecycle as life
from policy.host import HostFacts
from policy.manifest.agent import Manifest
from policy.rules.case import Unsigned
from policy.signing import trust
from sandbox import progress
from sandbox.broker import delegation
from sandbox.host import facts as host_facts
from sandbox.kernel.runsc import command
from sandbox.lifecycle import preflight
from sandbox.lifecycle.context import RunContext
from sandbox.lifecycle.types import Request, RunDependencies, RunResult
from sandbox.probes import preload
from sandbox.run_io import RunOutcome
from sandbox.rundir import directory as rundir_directory
from sandbox.runner import gvisor, prepare
from sandbox.shim import signals

__all__ = ["Request", "Run", "RunDependencies", "RunResult"]

# The log's text for a run that drift would not end.
_ALARM = ("drift: the run goes on when what confines it is changed (on_drift = alarm)",)
# The log's text for an agent that requests standby and has none.
_NO_STANDBY = "standby: nobody keeps instances ready here, each run starts cold (covenant-supervisor does)"
_NOT_AHEAD = "standby: an agent that may ask its supervisor for more starts cold, its rights count from its intent"
_NO_TRIES = "the tries inside the interpreter: none on this architecture"
_NO_SELF_TEST = "the self-test of the policy: off by self_test = false in the configuration"


class Run(RunContext):
    """One run's way through the procedure; keeps what its log rows need.

    ``standby`` is how many instances of the agent are to be kept ready, once that is known; ``used_ms`` the processor
    time of the run and of all below it, once it is over.
    """

    standby = 0
    used_ms = 0

    def __init__(
        self, dependencies: RunDependencies, request: Request, *, now_ms: int, child: delegation.Child | None = None
    ) -> None:
        super().__init__(dependencies, request, now_ms=now_ms, child=child)
        # Refuse an invalid intent here, before anything is accepted or logged.
        self._line = contract.Intent(
            self.intent_id,
            request.text,
            request.reads,
            now_ms,
            request.priority,
            parent=None if self._lineage is None else self._lineage.parent.intent_id,
        ).line()
        request.began(self.run_id, None)
        self._rows.transition(life.State.PROVISIONED, "a package and an intent were received", waits=True)
        self._timings: dict[str, float] = {}
        self._clock = time.perf_counter()
        self.signals = signals.DeferredSignals()

    def go(self) -> RunResult:
        """Carry out (1) to (6).

        Raises:
            errors.CovenantError: refused before anything started, or the machine failed the run.
            KeyboardInterrupt: it was interrupted.
        """
        try:
            with self.signals:
                answer = self._written_down()
                self._raise_told(answer)
        except BaseException as e:
            if self.signals.pending and not isinstance(e, KeyboardInterrupt):
                raise KeyboardInterrupt from e
            raise
        self._raise_told(answer)
        # A run with an answer keeps it: a caller that continues with another run must end then.
        return dataclasses.replace(answer, interrupted=True) if self.signals.pending else answer

    def _raise_told(self, answer: RunResult) -> None:
        if answer.error is not None and self.signals.pending:
            raise KeyboardInterrupt

    def _written_down(self) -> RunResult:
        try:
            try:
                return self._go()
            except BaseException:
                self.signals.hold()  # a signal must not cut its last rows short either
                raise
        except BaseException as e:
            self.used_ms = self.used_ms or sum(self._below_ms)
            self._failed(e)
            raise

    def _failed(self, error: BaseException) -> None:
        """Write the last rows of a run that did not end by itself."""
        self.log_failure(error)

    def _go(self) -> RunResult:
        trusted = self._verify()
        manifest = decide.manifest_of(self._request.package)
        self._rows.agent_id = manifest.agent.id
        if isinstance(trusted, trust.TrustedPackage):
            self._attribute(trusted, manifest)
        self._lap("verify and parse")
        backends: dict[str, Callable[[trust.TrustedPackage | Unsigned, Manifest], RunResult]] = {
            "linux-gvisor": self._linux_gvisor,
            "trusted-local": self._trusted_local,
        }
        return backends[manifest.sandbox.backend](trusted, manifest)

    def _attribute(self, trusted: trust.TrustedPackage, manifest: Manifest) -> None:
        """Record the operator of the run: a signer that counts for this manifest, not a name that it claims."""
        # Without such a signer rule 2 refuses, and its row has no operator.
        with contextlib.suppress(errors.SignatureError):
            signers = trust.authorise(
                trusted, agent_id=manifest.agent.id, role=manifest.agent.role, operator=manifest.agent.operator
            )
            self._rows.attribute(signers, manifest.agent.operator)

    def log_failure(self, error: BaseException) -> None:
        """Write the row of a refusal, or of a started run that failed by a fault of the machine."""
        if self._rows.started:
            self._denials.flush()
        self._rows.failure(error, package_digest=self._request.package.digest)

    def _verify(self) -> trust.TrustedPackage | Unsigned:
        dependencies, package = self._dependencies, self._request.package
        if package.envelope is None and dependencies.config.allow_unsigned_trusted_local:
            return Unsigned(package, allowed=True)
        self._root = dependencies.state.trust_root(self._now_ms)
        return trust.verify(
            package,
            self._root,
            now_ms=self._now_ms,
            audience=dependencies.config.host,
            serials=dependencies.state,
            greatest_time_ms=dependencies.state.greatest_time_ms(),
        )

    def _linux_gvisor(self, trusted: trust.TrustedPackage | Unsigned, manifest: Manifest) -> RunResult:
        dependencies = self._dependencies
        if self._request.user is not None:
            raise errors.UsageError(
                f"`--as {self._request.user}` is for trusted-local, this package runs under linux-gvisor",
                hint="leave --as out: each run has a uid of its own",
            )
        with progress.step("reading the files that the agent's root is made of"):
            facts = self._look(manifest)
        self._lap("host")
        decision = decide.authorise(
            trusted, manifest, host=facts, policies=dependencies.policies, **self._case(trusted)
        )
        self._rows.transition(life.State.VALIDATED, f"policy {decision.policy_digest[:16]}", waits=True)
        self._lap("decide")
        if preflight.runsc(dependencies, self._rows, facts):
            self._lap("self test")
        deadline = self._deadline(trusted, manifest)
        with contextlib.ExitStack() as stack:
            # Copy before the start row: copies may take seconds or fail, and the log must show only real starts.
            job = self._job(trusted, decision, facts, deadline, stack)
            self._lap("prepare")
            advisory = _ALARM if dependencies.config.on_drift == "alarm" else ()
            if dependencies.config.self_test:
                if preflight.policy(dependencies, self._rows, decision, facts, job, self._uids(), now_ms=self._now_ms):
                    self._lap("canaries")
                if job.tries is None and manifest.agent.runtime in preload.RUNTIMES:
                    advisory = (*advisory, _NO_TRIES)
            else:
                advisory = (*advisory, _NO_SELF_TEST)
            advisory = (*advisory, *self._stands_by(decision))
            self._begin(trusted, manifest, deadline, policy_digest=decision.policy_digest, not_enforced=advisory)
            operations = self._operations(decision.effective.lifetime)
            job = dataclasses.replace(job, operations=operations, after=dependencies.after, signals=self.signals)
            finished = gvisor.run(job, runs=dependencies.path / "runs", uids=self._uids())
        self._lap("run")
        return self._finish(manifest, finished, decision.policy_digest, (*advisory, *finished.reported))

    def _stands_by(self, decision: decide.Decision) -> tuple[str, ...]:
        """Record whether standby instances are kept for the agent. Returns the texts for the log if not."""
        wanted = decision.manifest.sandbox.standby
        if not wanted or self._child is not None or self._request.dev:
            return ()
        if command.BROKER_FLAG in decision.artefacts.json("runtime.json")["flags"]:
            return (_NOT_AHEAD,)
        if not self._dependencies.keeps_standby:
            return (_NO_STANDBY,)
        self.standby = wanted
        return ()

    def _trusted_local(self, trusted: trust.TrustedPackage | Unsigned, manifest: Manifest) -> RunResult:
        """Run on the backend that confines by uid, limits, namespaces and a deny list.

        Refuses grants that need more.
        """
        from sandbox.runner import trusted_local

        dependencies, request = self._dependencies, self._request
        if self._child is not None:
            raise delegation.refuse_backend(manifest.sandbox.backend)
        signed = isinstance(trusted, trust.TrustedPackage)
        plan = trusted_local.plan(manifest, config=dependencies.config, user=request.user, signed=signed)
        if dependencies.isolated and not plan.policy.own_network:
            raise errors.NotEnforceableError(
                "a trusted-local agent has the host's network, and the supervisor is not in it",
                hint="name the uplink in config.toml, or run it without the supervisor",
                grant="resources.network",
            )
        verdict = decide.rules(trusted, manifest, host=host_facts.probe(dependencies.config), **self._case(trusted))
        self._rows.transition(life.State.VALIDATED, "no policy is compiled for trusted-local", waits=True)
        deadline = self._deadline(trusted, manifest)
        label, claim = self._claim(self._asked(trusted, manifest, verdict.effective))
        self._begin(trusted, manifest, deadline, not_enforced=plan.not_enforced)
        operations = self._operations(verdict.effective.lifetime)
        # The directory is only for label and lock: other runs see the owner, and the next start sees its end.
        with (
            rundir_directory.RunDirectory(dependencies.path / "runs" / self.run_id, label, claim=claim) as directory,
            operations.listening(directory.path),
        ):
            finished = trusted_local.run(
                plan,
                package=request.package,
                run_id=self.run_id,
                intent=self._line,
                limits=self._limits(deadline),
                state=dependencies.path,
                hidden=dependencies.never_granted,
                rounds=self._watch(label),
                watches=dependencies.watches,
                operations=operations,
                directory=directory,
                signals=self.signals,
            )
        if directory.ended is not None:  # as gvisor.run
            finished = dataclasses.replace(finished, error=directory.ended)
        self._lap("run")
        return self._finish(manifest, finished, None, plan.not_enforced)

    def _begin(
        self,
        trusted: trust.TrustedPackage | Unsigned,
        manifest: Manifest,
        deadline: clocks.Deadline,
        *,
        policy_digest: str | None = None,
        not_enforced: tuple[str, ...] = (),
    ) -> None:
        """(4) Write all rows that must be durable before the agent starts."""
        signed = trusted if isinstance(trusted, trust.TrustedPackage) else None
        self._rows.capability_check(manifest, missing=delegation.missing(self._lineage, manifest))
        if signed is not None:
            self._accept(signed)
        if self._rows.state is not life.State.ISOLATED:  # a standby instance already is
            self._rows.transition(life.State.ISOLATED, f"on the backend {manifest.sandbox.backend}", waits=True)
        self._rows.expect_start()  # this may have to wait
        self.signals.hold()  # a start row must get its end row
        self._rows.run_started(
            manifest,
            deadline,
            intent_id=self.intent_id,
            package=self._request.package_name,
            policy_digest=policy_digest,
            payload_digest=signed.payload_digest if signed else None,
            not_enforced=not_enforced,
            parent=None if self._lineage is None else self._lineage.parent.run_id,
            behalf=self._request.behalf,
        )
        self._lap("log the start")

    def _job(
        self,
        trusted: trust.TrustedPackage | Unsigned,
        decision: decide.Decision,
        facts: HostFacts,
        deadline: clocks.Deadline,
        stack: contextlib.ExitStack,
    ) -> gvisor.SandboxSpec:
        dependencies, manifest = self._dependencies, decision.manifest
        label, claim = self._claim(self._asked(trusted, manifest, decision.effective))
        order = prepare.Order(
            run_id=self.run_id,
            package=self._request.package,
            intent=self._line,
            limits=self._limits(deadline),
            label=label,
            claim=claim,
            denied=self._denials.told,
            drifted=self._rows.drift,
            rounds=(self._denials.round(), *self._watch(label)),
            watches=dependencies.watches
            if self._child is None
            else {**dependencies.watches, **self._child.watches(label, self.adopted)},
            broker=self._broker(decision, deadline, stack),
            secrets=self._secrets,  # making the broker has found them
        )
        return prepare.job(
            order,
            decision,
            facts,
            state=dependencies.path,
            config=dependencies.config,
            never_granted=dependencies.never_granted,
            stack=stack,
        )

    def _finish(
        self, manifest: Manifest, finished: RunOutcome, policy_digest: str | None, not_enforced: tuple[str, ...]
    ) -> RunResult:
        """(6) Return the answer with the result or the error, and write the last rows."""
        usage = finished.usage.with_below(sum(self._below_ms))
        self.used_ms = usage.cpu_ms or 0
        result: contract.AgentResult | None = None
        error: errors.CovenantError | None = finished.error
        if error is None:
            try:
                result = contract.parse_result(finished.stdout)
            except errors.RunError as e:
                error = e
        text_hash = hashlib.sha256(result.text.encode()).hexdigest() if result else None
        code = error.code if error else None
        self._denials.ended_by(error)
        self._denials.flush()
        if text_hash is not None:
            self._rows.intent_dispatched(self.intent_id, self._request.text, text_hash)
        self._rows.finish(code or "the agent has answered")
        stderr = prepare.redacted(finished.stderr, self._dependencies.path)
        self._rows.run_ended(
            status="ok" if result else "failed",
            code=code,
            finished=finished,
            digest=text_hash,
            message=None if error is None else error.message,
            stderr=stderr,
        )
        if self._rows.unarchived:
            not_enforced = (*not_enforced, self._rows.unarchived)
        self._lap("log the end")
        timings = {
            "sandbox start": finished.start_seconds or 0.0,
            "answer line": finished.said_seconds or 0.0,
            "sandbox": finished.total_seconds,
        }
        return RunResult(
            run_id=self.run_id,
            intent_id=self.intent_id,
            agent_id=manifest.agent.id,
            policy_digest=policy_digest,
            result=result,
            error=error,
            stderr=stderr,
            not_enforced=not_enforced,
            unknown_sections=manifest.unknown_sections,
            denials=self._denials.totals,
            timings={**self._timings, **timings},
            usage=usage,
        )

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self._timings[name] = now - self._clock
        self._clock = now
