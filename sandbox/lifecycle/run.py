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
import functools
import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from policy import clocks, contract, decide, errors
from policy import lifecycle as life
from policy.compile import bundle
from policy.host import HostFacts
from policy.manifest.agent import Manifest
from policy.rules.case import Unsigned
from policy.signing import trust
from sandbox import progress
from sandbox.audit import run_archive
from sandbox.audit.agent_denials import AgentDenials
from sandbox.broker import delegation
from sandbox.host import facts as host_facts
from sandbox.lifecycle import lease_desks, preflight
from sandbox.lifecycle.context import RunContext, spoken_of
from sandbox.lifecycle.run_log import RunLog
from sandbox.lifecycle.start_mode import ImmediateStart, StartMode, StartRecord
from sandbox.lifecycle.types import Request, RunDependencies
from sandbox.network.reached import REST
from sandbox.probes import preload
from sandbox.run_io import RunOutcome
from sandbox.run_result import RunResult
from sandbox.rundir import directory as rundir_directory
from sandbox.runner import gvisor, prepare
from sandbox.shim import signals
from sandbox.workspace import session, store
from sandbox.workspace.session import RunWorkspace

if TYPE_CHECKING:
    from policy.why.ask import Sight
    from sandbox.network.gate.proxy import ProxyTerms
    from sandbox.network.ssh import gate as ssh_gate

__all__ = ["Request", "Run", "RunDependencies"]

# As much of a failed run's stdout as its record may keep, with room for characters of several bytes.
_STDOUT_BYTES = 4 * run_archive.STDOUT_BYTES
# The log's text for a run that drift would not end.
_ALARM = ("drift: the run goes on when what confines it is changed (on_drift = alarm)",)
_NOT_COUNTED = "the TLS gate ended before it had reported all: rows `reached` may be missing, or have too few bytes"
_NO_TRIES = "the tries inside the interpreter: none on this architecture"
_NO_SELF_TEST = "the self-test of the policy: off by self_test = false in the configuration"


class Run:
    """Process the run of one context. ``mode`` says when the agent gets its intent; without it, at its start.

    ``used_ms`` is the processor time of the run and of all runs below it, once it is over.
    """

    used_ms = 0

    def __init__(self, context: RunContext, mode: StartMode | None = None) -> None:
        self.context, self._mode = context, mode or ImmediateStart()
        context.request.began(context.run_id, None)
        context.rows.transition(life.State.PROVISIONED, "a package and an intent were received", waits=True)
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
        return structs.replace(answer, interrupted=True) if self.signals.pending else answer

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
            self.used_ms = self.used_ms or sum(self.context.below_ms)
            self._mode.failed(e, self.context.log_failure)
            raise

    def _go(self) -> RunResult:
        context = self.context
        trusted = self._verify()
        manifest = decide.manifest_of(context.request.package)
        context.rows.agent_id = manifest.agent.id
        if isinstance(trusted, trust.TrustedPackage):
            self._attribute(trusted, manifest)
        context.laps.lap("verify and parse")
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
            self.context.rows.attribute(signers, manifest.agent.operator)

    def _verify(self) -> trust.TrustedPackage | Unsigned:
        context, package = self.context, self.context.request.package
        dependencies = context.dependencies
        if package.envelope is None and dependencies.config.allow_unsigned_trusted_local:
            return Unsigned(package, allowed=True)
        context.root = dependencies.state.trust_root(context.now_ms)
        if context.request.part is not None:
            return context.request.part
        return trust.verify(
            package,
            context.root,
            now_ms=context.now_ms,
            audience=dependencies.config.host,
            serials=dependencies.state,
            greatest_time_ms=dependencies.state.greatest_time_ms(),
        )

    def _linux_gvisor(self, trusted: trust.TrustedPackage | Unsigned, manifest: Manifest) -> RunResult:
        context, config = self.context, self.context.dependencies.config
        if context.request.user is not None:
            raise errors.UsageError(
                f"`--as {context.request.user}` is for trusted-local, this package runs under linux-gvisor",
                hint="leave --as out: each run has a uid of its own",
            )
        with progress.step("reading the files that the agent's root is made of"):
            facts = context.look(manifest)
        context.laps.lap("host")
        decision = decide.authorise(
            trusted, manifest, host=facts, policies=context.dependencies.policies, **context.case(trusted)
        )
        context.rows.transition(life.State.VALIDATED, f"policy {decision.policy_digest[:16]}", waits=True)
        context.laps.lap("decide")
        preflight.host_network(decision, facts, context.dependencies)
        if preflight.runsc(context.dependencies, context.rows, facts):
            context.laps.lap("self test")
        deadline = context.deadline(trusted, manifest)
        context.settle_standby(decision)
        self._mode.decided(trusted, decision, facts)
        with contextlib.ExitStack() as stack:
            # Copy before the start row: copies may take seconds or fail, and the log must show only real starts.
            spec = self._mode.adapt(self._spec(trusted, decision, facts, deadline, stack))
            context.laps.lap("prepare")
            advisory = _ALARM if config.on_drift == "alarm" else ()
            advisory = (*advisory, *self._self_test(decision, facts, spec), *context.standby_notes)
            record = StartRecord(trusted, manifest, deadline, decision.policy_digest, advisory, spec.contract)
            self._mode.begin(record, self._log_start)
            spec = structs.replace(spec, after=context.dependencies.after, signals=self.signals)
            finished = gvisor.run(spec, runs=context.dependencies.path / "runs", uids=context.uids())
        context.laps.lap("run")
        return self._finish(record, finished, (*advisory, *finished.reported))

    def _self_test(self, decision: decide.Decision, facts: HostFacts, spec: gvisor.SandboxSpec) -> tuple[str, ...]:
        """Try what the policy forbids, unless the operator does without. Returns the texts for the log."""
        context = self.context
        if not context.dependencies.config.self_test:
            return (_NO_SELF_TEST,)
        if preflight.policy(
            context.dependencies, context.rows, decision, facts, spec, context.uids(), now_ms=context.now_ms
        ):
            context.laps.lap("canaries")
        return (_NO_TRIES,) if spec.files.tries is None and decision.manifest.agent.runtime in preload.RUNTIMES else ()

    def _trusted_local(self, trusted: trust.TrustedPackage | Unsigned, manifest: Manifest) -> RunResult:
        """Run on the backend that confines by uid, limits, namespaces and a deny list.

        Refuses grants that need more.
        """
        from sandbox.runner import trusted_local

        context, dependencies = self.context, self.context.dependencies
        if context.child is not None:
            raise delegation.refuse_backend(manifest.sandbox.backend)
        contract.check_caller(contract.LINE, _connected(context.request))
        signed = isinstance(trusted, trust.TrustedPackage)
        plan = trusted_local.plan(manifest, config=dependencies.config, user=context.request.user, signed=signed)
        if dependencies.isolated and not plan.policy.own_network:
            raise errors.NotEnforceableError(
                "a trusted-local agent has the host's network, and the supervisor is not in it",
                hint="name the uplink in config.toml, or run it without the supervisor",
                grant="resources.network",
            )
        facts = host_facts.probe(dependencies.config)
        verdict = decide.rules(trusted, manifest, host=facts, **context.case(trusted))
        context.rows.transition(life.State.VALIDATED, "no policy is compiled for trusted-local", waits=True)
        self._mode.decided(trusted, None, facts)
        deadline = context.deadline(trusted, manifest)
        place = context.place_for(trusted, manifest, verdict.effective, facts)
        label, claim = context.label_for(place, self._mode.check_serial)
        record = StartRecord(trusted, manifest, deadline, not_enforced=plan.not_enforced)
        self._mode.begin(record, self._log_start)
        operations = context.operations(verdict.effective.lifetime)
        # The directory is only for label and lock: other runs see the owner, and the next start sees its end.
        with (
            rundir_directory.RunDirectory(dependencies.path / "runs" / context.run_id, label, claim=claim) as directory,
            operations.listening(directory.path),
        ):
            finished = trusted_local.run(
                plan,
                package=context.request.package,
                run_id=context.run_id,
                intent=context.line,
                limits=context.limits(deadline),
                state=dependencies.path,
                hidden=dependencies.never_granted,
                rounds=context.checks(label),
                watches=dependencies.watches,
                observer=RunLog(context.rows, context.denials, operations),
                operations=operations,
                directory=directory,
                signals=self.signals,
            )
        if directory.ended is not None:  # as gvisor.run
            finished = structs.replace(finished, error=directory.ended)
        context.laps.lap("run")
        return self._finish(record, finished, plan.not_enforced)

    def _log_start(self, record: StartRecord) -> None:
        """(4) Write all rows that must be durable before the agent starts."""
        context, manifest = self.context, record.manifest
        signed = record.trusted if isinstance(record.trusted, trust.TrustedPackage) else None
        context.rows.capability_check(manifest, missing=delegation.missing(context.lineage, manifest))
        if signed is not None:
            context.accept(signed)
        if context.rows.state is not life.State.ISOLATED:  # a standby instance already is
            context.rows.transition(life.State.ISOLATED, f"on the backend {manifest.sandbox.backend}", waits=True)
        context.rows.expect_start()  # this may have to wait
        self.signals.hold()  # a start row must get its end row
        context.rows.run_started(
            manifest,
            record.deadline,
            intent_id=context.intent_id,
            package=context.request.package_name,
            policy_digest=record.policy_digest,
            payload_digest=signed.payload_digest if signed else None,
            not_enforced=record.not_enforced,
            parent=None if context.lineage is None else context.lineage.parent.run_id,
            behalf=context.request.behalf,
        )
        context.laps.lap("log the start")

    def _spec(
        self,
        trusted: trust.TrustedPackage | Unsigned,
        decision: decide.Decision,
        facts: HostFacts,
        deadline: clocks.Deadline,
        stack: contextlib.ExitStack,
    ) -> gvisor.SandboxSpec:
        context, dependencies = self.context, self.context.dependencies
        place = context.place_for(trusted, decision.manifest, decision.effective, facts)
        label, claim = context.label_for(place, self._mode.check_serial)
        operations = context.operations(decision.effective.lifetime)
        desk = context.desk(decision, operations, stack)
        spoken = spoken_of(decision)
        label["contract"] = spoken.name
        contract.check_caller(spoken, _connected(context.request))
        argument = spoken.argument(context.intent)
        bundle.check_arguments(decision.artefacts, argument)
        assert facts.runsc is not None
        return gvisor.SandboxSpec(
            run_id=context.run_id,
            artefacts=decision.artefacts,
            runsc_path=facts.runsc.path,
            intent=spoken.stdin(context.intent),
            limits=context.limits(deadline),
            contract=spoken,
            argument=argument,
            appended=context.request.arguments,
            caller=context.request.caller,
            label=label,
            claim=claim,
            config=dependencies.config,
            observer=RunLog(context.rows, context.denials, operations),
            operations=operations,
            rounds=(context.denials.round(), *context.checks(label), *lease_desks.rounds(desk)),
            watches=dependencies.watches
            if context.child is None
            else {**dependencies.watches, **context.child.watches(label, context.adopted)},
            broker=context.broker(decision, deadline, stack),
            secrets=context.secrets,  # making the broker has found them
            services=lease_desks.hold_tools(context.services(decision, stack), decision, desk),
            reached=functools.partial(_reached, context),
            observe=None if context.request.observe is None else context.request.observe.saw,
            publish=context.publish(decision),
            host=context.host_ports(decision),
            inject=lease_desks.hold_requests(context.inject(decision, deadline, stack), decision, desk),
            ssh=self._ssh(decision, stack),
            desk=None if desk is None else desk.desk,
            proxy=self._proxy(decision),
            tell_agent=functools.partial(self._tell_agent, decision, facts),
            workspace=self._workspace(decision),
            files=prepare.files(
                context.request.package,
                decision,
                facts,
                state=dependencies.path,
                config=dependencies.config,
                never_granted=dependencies.never_granted,
                stack=stack,
            ),
        )

    def _ssh(self, decision: decide.Decision, stack: contextlib.ExitStack) -> ssh_gate.SshAgentTerms | None:
        """Return the terms of the keys that sign the run's logins, where it has some.

        Raises:
            errors.VaultError: they cannot be had.
        """
        if not decision.effective.ssh:
            return None
        # Imported only here, as below.
        from sandbox.lifecycle import ssh_terms

        context = self.context
        is_dev = context.request.is_dev
        return ssh_terms.of(decision, context.run_id, context.dependencies, context.rows, is_dev, stack)

    def _proxy(self, decision: decide.Decision) -> ProxyTerms | None:
        """Return the operator's proxy for the run's network, where there are both.

        Raises:
            errors.VaultError: its secret cannot be had.
        """
        if not (config := self.context.dependencies.config).proxy.url:
            return None
        # Imported only here: most hosts have no proxy, and a cold start pays for each import.
        from sandbox.lifecycle import model_terms

        return model_terms.network_proxy(decision.effective.network.mode, config, self.context.rows)

    def _workspace(self, decision: decide.Decision) -> RunWorkspace | None:
        """Return the workspace of the run, checked; nothing of it is made yet.

        Raises:
            errors.WorkspaceError: a workspace without a directory, a directory without one, or another is meant.
        """
        context, dependencies = self.context, self.context.dependencies
        given, terms = context.request.workspace, decision.artefacts.json("mounts.json").get("workspace")
        if terms is None and given is None:
            return None
        if terms is None or given is None:
            text = "" if decision.manifest.process.contract in contract.STREAMS else "TEXT "
            verb = "dev" if context.request.is_dev else "run"
            raise errors.WorkspaceError(
                "the manifest has a [workspace], and no directory was given"
                if given is None
                else "a directory was given, and the manifest has no [workspace] of mode `overlay`",
                hint=f"covenant {verb} PACKAGE {text}--workspace DIR" if given is None else "leave --workspace out",
                where=decision.manifest.where("workspace.mode"),
            )
        never = host_facts.never_granted(dependencies.config, dependencies.never_granted)
        directory = session.check(given, terms, never)
        linked = session.check_repository(given, directory, terms, never)
        agent, request = decision.manifest.agent, context.request
        package = "" if request.typed else request.package_name
        about = session.About(context.run_id, agent.id, decision.policy_digest, directory, agent.role, package, linked)
        limits = store.UserLimits(dependencies.config.kept_workspaces, dependencies.config.kept_workspaces_mb)
        one = RunWorkspace(dependencies.path, given, terms, about, limits)
        one.check_resumed()
        return one

    def _tell_agent(
        self, decision: decide.Decision, facts: HostFacts, fd: int
    ) -> contextlib.AbstractContextManager[None]:
        """Write the run's denials to the file that its agent reads, each with what would allow it."""
        context, config = self.context, self.context.dependencies.config

        def sight() -> Sight:
            from policy.why import sight

            never = host_facts.never_granted(config, context.dependencies.never_granted)
            files = context.request.package.digests
            return sight.of(decision.artefacts, decision.manifest, files=files, host=facts, never=never)

        return context.denials.telling(AgentDenials(fd, sight))

    def _finish(self, record: StartRecord, finished: RunOutcome, not_enforced: tuple[str, ...]) -> RunResult:
        """(6) Return the answer with the result or the error, and write the last rows."""
        self._mode.ended(finished)
        context = self.context
        usage = finished.usage.with_below(sum(context.below_ms))
        self.used_ms = usage.cpu_ms or 0
        result, error = _result_of(finished, record.contract)
        text_hash = hashlib.sha256(result.text.encode()).hexdigest() if result else None
        code = error.code if error else None
        context.denials.ended_by(error)
        context.flush()
        if not finished.all_counted:
            context.rows.note(_NOT_COUNTED)
        if context.request.observe is not None:
            package = context.request.package.digest
            context.request.observe.ended(context.run_id, package, context.denials.totals, time.time_ns())
        if finished.totals is not None:
            context.rows.session_ended(record.contract.name, finished.totals)
        elif text_hash is not None:
            context.rows.intent_dispatched(context.intent_id, context.request.text, text_hash)
        context.rows.finish(code or "the agent has answered")
        stderr = prepare.redacted(finished.stderr, context.dependencies.path)
        context.rows.run_ended(
            status="ok" if result else "failed",
            code=code,
            finished=finished,
            digest=text_hash,
            message=None if error is None else error.message,
            stderr=stderr,
            stdout="" if result else prepare.redacted(finished.stdout[-_STDOUT_BYTES:], context.dependencies.path),
        )
        if context.rows.unarchived:
            not_enforced = (*not_enforced, context.rows.unarchived)
        context.laps.lap("log the end")
        timings = {
            "sandbox start": finished.start_seconds or 0.0,
            "answer line": finished.said_seconds or 0.0,
            "sandbox": finished.total_seconds,
        }
        return RunResult(
            run_id=context.run_id,
            intent_id=context.intent_id,
            agent_id=record.manifest.agent.id,
            policy_digest=record.policy_digest,
            result=result,
            error=error,
            stderr=stderr,
            exit_status=finished.exit_status,
            not_enforced=not_enforced,
            unknown_sections=record.manifest.unknown_sections,
            denials=context.denials.totals,
            timings={**context.laps.seconds, **timings},
            usage=usage,
        )


def _reached(context: RunContext, target: str, connections: int, carried: int | None) -> None:
    """Count a destination of the run."""
    context.reached.add(target, connections, carried)
    observe = context.request.observe
    if observe is not None and target == REST:
        observe.missed += connections
    elif observe is not None:
        observe.reached(target, connections, time.time_ns())


def _connected(request: Request) -> contract.Connected:
    """Return what the caller of a request is connected by."""
    if request.caller is None:
        return "nothing"
    return "streams" if request.caller.size is None else "terminal"


def _result_of(
    finished: RunOutcome, spoken: contract.Contract
) -> tuple[contract.AgentResult | None, errors.CovenantError | None]:
    """Return the agent's answer, or the error of a run that has none."""
    if finished.error is not None:
        return None, finished.error
    try:
        return spoken.parse(finished.stdout), None
    except errors.RunError as e:
        return None, e
