"""From a package and an intent to a result: decide, write down, start, converse, write down. One process, as root.

Log first, act second: a refusal and a start are durable before anything follows from them, and an act whose line
cannot be written does not happen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy import clocks, contract, decide, errors
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.rules.case import Owner
from policy.signing import trust
from sandbox import config as configuration
from sandbox import bundle, granted, gvisor, host
from sandbox.ledger import Ledger
from sandbox.rootfs import Skeletons
from sandbox.runner import Finished, Limits
from sandbox.state import State
from sandbox.store import PackageStore
from sandbox.uids import UidLease

BACKENDS = ("linux-gvisor", "trusted-local")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: a package's bytes, the intent's text, who asks, and how long they will wait.

    ``user`` is for trusted-local; ``dev`` decides by the local key of ``covenant dev`` instead of the trust root.
    ``package_name`` is where the package lies, as the operator knows it (rule 8).
    """

    package: Package
    text: str
    issuer: Mapping[str, str]
    timeout_ms: int | None = None
    user: str | None = None
    dev: bool = False
    package_name: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it. ``error`` is None exactly when ``result`` is not; both after a start only."""

    run_id: str
    intent_id: str
    agent_id: str
    policy_digest: str | None
    result: contract.AgentResult | None
    error: errors.CovenantError | None
    stderr: str
    not_enforced: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    unknown_sections: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)


class Supervisor:
    """Holds COVENANT_STATE for one process. Use as a context manager.

    ``never_granted`` are host paths that no manifest may name besides those of the data file: COVENANT_HOME.
    """

    def __init__(self, state: Path, *, never_granted: tuple[str, ...] = ()) -> None:
        if os.geteuid() != 0:
            raise errors.PrivilegeError("running an agent needs root", hint="run it with sudo, and give COVENANT_HOME")
        self.path = state
        self.config = configuration.load(state)
        self.never_granted = never_granted
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:
        with self._stack:
            self.state = State(self.path)
            self.ledger = self._stack.enter_context(
                Ledger.open(self.path / "audit", head=self.path / "audit-head" / "head.json")
            )
            for name in ("runs", "uids", "packages", "rootfs"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            gvisor.recover(self.path / "runs")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def run(self, request: Request) -> Answer:
        """Decide and run.

        Raises:
            errors.CovenantError: refused before anything started; the refusal is in the log.
        """
        now_ms = int(time.time() * 1000)
        run = _Run(self, request, str(uuid.uuid4()), str(uuid.uuid4()), now_ms)
        try:
            manifest = decide.manifest_of(request.package)
            run.agent_id = manifest.agent.id
            run.state = self._stack.enter_context(self.state.dev(manifest.agent.id)) if request.dev else self.state
            if manifest.sandbox.backend == "trusted-local":
                return run.trusted_local(manifest)
            return run.linux_gvisor()
        except errors.CovenantError as e:
            if not run.started:
                run.log_refusal(e)
            raise


class _Run:
    """One run's way through the procedure; keeps what the log rows need."""

    def __init__(self, supervisor: Supervisor, request: Request, run_id: str, intent_id: str, now_ms: int) -> None:
        self.supervisor, self.request = supervisor, request
        self.run_id, self.intent_id, self.now_ms = run_id, intent_id, now_ms
        self.agent_id: str | None = None
        self.operator: str | None = None
        self.started = False
        self.state = supervisor.state
        self.timings: dict[str, float] = {}
        self._clock = time.perf_counter()

    def linux_gvisor(self) -> Answer:
        """The enforced backend."""
        supervisor, request = self.supervisor, self.request
        trusted, manifest = self._verified()
        facts = host.for_manifest(
            host.probe(supervisor.config),
            manifest,
            config=supervisor.config,
            package=request.package.files,
            extra_never=supervisor.never_granted,
        )
        self._lap("host")
        decision = decide.authorise(
            trusted,
            manifest,
            host=facts,
            now_ms=self.now_ms,
            identities=_live_owners(supervisor.path / "runs"),
            package_name=request.package_name,
            extra_never=dict.fromkeys(supervisor.never_granted, "holds what decides"),
        )
        self._lap("decide")
        deadline = self._deadline(manifest, trusted.statement.expires_at)
        self._begin(manifest, deadline, backend="linux-gvisor", decision=decision, trusted=trusted)
        with contextlib.ExitStack() as stack:
            job = self._job(decision, facts, deadline, stack)
            self._lap("prepare")
            finished = gvisor.run(
                job,
                runs=supervisor.path / "runs",
                uids=UidLease(
                    supervisor.path / "uids", first=supervisor.config.uid_first, count=supervisor.config.uid_count
                ),
            )
        self._lap("run")
        return self._finish(manifest, finished, decision.policy_digest, not_enforced=finished.reported)

    def trusted_local(self, manifest: Manifest) -> Answer:
        """The backend that confines by uid, limits and a deny list only; refuses whatever needs more."""
        from sandbox import trusted_local

        supervisor, request = self.supervisor, self.request
        trusted = None
        if request.package.envelope is not None or not supervisor.config.allow_unsigned_trusted_local:
            trusted, manifest = self._verified()
        plan = trusted_local.plan(manifest, config=supervisor.config, user=request.user, signed=trusted is not None)
        expires = trusted.statement.expires_at if trusted is not None else None
        deadline = self._deadline(manifest, expires)
        self._begin(
            manifest, deadline, backend="trusted-local", trusted=trusted, not_enforced=plan.not_enforced
        )
        finished = trusted_local.run(
            plan,
            package=request.package,
            run_id=self.run_id,
            intent=self._intent(),
            limits=self._limits(deadline),
            state=supervisor.path,
            hidden=supervisor.never_granted,
        )
        self._lap("run")
        return self._finish(manifest, finished, None, not_enforced=plan.not_enforced)

    def _verified(self) -> tuple[trust.TrustedPackage, Manifest]:
        state = self.state
        trusted = trust.verify(
            self.request.package,
            state.trust_root(self.now_ms),
            now_ms=self.now_ms,
            audience=self.supervisor.config.host,
            serials=state,
            greatest_time_ms=state.greatest_time_ms(),
        )
        self._lap("verify")
        manifest = decide.manifest_of(trusted.package)
        self.operator = manifest.agent.operator or trusted.signers[0].name
        return trusted, manifest

    def _begin(
        self,
        manifest: Manifest,
        deadline: clocks.Deadline,
        *,
        backend: str,
        trusted: trust.TrustedPackage | None,
        decision: decide.Decision | None = None,
        not_enforced: tuple[str, ...] = (),
    ) -> None:
        """The rows that must be durable before the agent starts, and the serial that is accepted with them."""
        required = list(manifest.capabilities.required)
        self._append(
            "capability_check",
            agent_id=manifest.agent.id,
            required_actions=required,
            missing_actions=[],
            passed=True,
            authorized_by=[
                {"action": action, "granted_by_display": self.request.issuer["display"], "signature_b58": ""}
                for action in required
            ],
        )
        if trusted is not None:
            self.state.accept(trusted, now_ms=self.now_ms)
        self._append(
            "run_started",
            agent_id=manifest.agent.id,
            intent_id=self.intent_id,
            policy_digest=decision.policy_digest if decision else None,
            payload_digest=trusted.payload_digest if trusted else None,
            backend=backend,
            signers=[s.name for s in trusted.signers] if trusted else [],
            not_enforced=list(not_enforced),
            deadline_ms=deadline.milliseconds,
            deadline_clock=deadline.clock,
        )
        self.started = True
        self._lap("log")

    def _job(
        self, decision: decide.Decision, facts: Any, deadline: clocks.Deadline, stack: contextlib.ExitStack
    ) -> gvisor.Job:
        supervisor, manifest = self.supervisor, decision.manifest
        plan = decision.artefacts.json("mounts.json")
        executable = manifest.agent.entry if manifest.agent.runtime == "rust-bin" else ""
        copy = PackageStore(supervisor.path / "packages").put(self.request.package, executable=executable)
        names = [c["name"] for c in plan["root"]["closures"]]
        closures = [facts.runtimes[n] if n in facts.runtimes else facts.executables[n] for n in names]
        points = [(p["path"], p["kind"]) for p in plan["root"]["mount_points"]]
        rootfs = stack.enter_context(Skeletons(supervisor.path / "rootfs").hold(closures, points))
        sources = {}
        for mount in plan["mounts"]:
            if mount["type"] == "bind":
                own = mount["source"] == "package"
                fd = _open_directory(copy) if own else self._open_granted(mount["source"])
                stack.callback(os.close, fd)
                sources[mount["destination"]] = fd
        assert facts.runsc is not None
        return gvisor.Job(
            run_id=self.run_id,
            artefacts=decision.artefacts,
            runsc_path=facts.runsc.path,
            rootfs=rootfs,
            sources=sources,
            intent=self._intent(),
            limits=self._limits(deadline),
            label={
                "agent_id": manifest.agent.id,
                "package": self.request.package_name,
                "payload_digest": decision.trusted.payload_digest if decision.trusted else "",
            },
        )

    def _open_granted(self, path: str) -> int:
        """The descriptor that is mounted is the one that was checked, not a second look at the name."""
        supervisor = self.supervisor
        never = host.never_granted(supervisor.config, supervisor.never_granted)
        fd, _ = granted.open_granted(path, owners=supervisor.config.path_owners, never=never)
        return fd

    def _intent(self) -> bytes:
        return contract.Intent(self.intent_id, self.request.text, self.request.issuer, self.now_ms).line()

    def _deadline(self, manifest: Manifest, expires_at_ms: int | None) -> clocks.Deadline:
        return clocks.effective_deadline(
            now_ms=self.now_ms,
            cpu_ms_per_task=manifest.resources.cpu_ms_per_task,
            timeout_ms=self.request.timeout_ms,
            ttl_seconds=manifest.lifetime.ttl_seconds,
            expires_at_ms=expires_at_ms,
        )

    def _limits(self, deadline: clocks.Deadline) -> Limits:
        settings = self.supervisor.config
        return Limits(
            start_seconds=settings.start_deadline_seconds,
            task_seconds=deadline.milliseconds / 1000,
            task_clock=deadline.clock,
            grace_seconds=settings.grace_seconds,
        )

    def _finish(
        self,
        manifest: Manifest,
        finished: Finished,
        policy_digest: str | None,
        *,
        not_enforced: tuple[str, ...],
    ) -> Answer:
        result, error = None, finished.error
        if error is None:
            try:
                result = contract.parse_result(finished.stdout)
            except errors.RunError as e:
                error = e
        text_hash = hashlib.sha256(result.text.encode()).hexdigest() if result else None
        signal_number = finished.exit_status - 128 if finished.exit_status > 128 else None
        self._append(
            "run_ended",
            agent_id=manifest.agent.id,
            status="ok" if result else "failed",
            code=error.code if error else None,
            exit_status=finished.exit_status if signal_number is None else None,
            exit_signal=signal_number,
            duration_ms=int(finished.total_seconds * 1000),
            oom=finished.oom_kills > 0,
            stdout_bytes=len(finished.stdout),
            stderr_bytes=finished.stderr_total,
            result_hash_hex=text_hash,
        )
        if text_hash is not None:
            self._append(
                "intent_dispatched",
                intent_id=self.intent_id,
                intent_text=self.request.text,
                matched_agent=manifest.agent.id,
                result_hash_hex=text_hash,
                status="ok",
            )
        self._lap("log end")
        return Answer(
            run_id=self.run_id,
            intent_id=self.intent_id,
            agent_id=manifest.agent.id,
            policy_digest=policy_digest,
            result=result,
            error=error,
            stderr=_redacted(finished.stderr, self.supervisor.path),
            not_enforced=not_enforced,
            unknown_sections=manifest.unknown_sections,
            timings={**self.timings, "sandbox start": finished.start_seconds or 0.0, "sandbox": finished.total_seconds},
        )

    def log_refusal(self, error: errors.CovenantError) -> None:
        """The row of a refusal, with rule, grant and place."""
        rule = getattr(error, "rule", None) or (2 if isinstance(error, errors.SignatureError) else None)
        self._append(
            "manifest_rejected",
            agent_id=self.agent_id,
            rule=rule,
            grant=getattr(error, "grant", None) or None,
            where=error.where or None,
            code=error.code,
            message=error.message,
            package_digest=self.request.package.digest,
        )

    def _append(self, kind: str, **fields: Any) -> None:
        fields = {"run_id": self.run_id, "operator": self.operator, **fields}
        self.supervisor.ledger.append(kind, fields, issuer=self.request.issuer, now_ms=int(time.time() * 1000))

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self.timings[name] = now - self._clock
        self._clock = now


def _live_owners(runs: Path) -> dict[str, list[Owner]]:
    """Which packages hold which agent ids in live runs (rule 8)."""
    owners: dict[str, list[Owner]] = {}
    for label in bundle.live_labels(runs):
        owners.setdefault(label["agent_id"], []).append(Owner(label["package"], label["payload_digest"]))
    return owners


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _redacted(stderr: bytes, state: Path) -> str:
    """stderr as text without the host's paths: runsc's own messages name the bundle and its state."""
    return stderr.decode("utf-8", "replace").replace(str(state), "<state>")
