"""Write the events of one run into the supervisor's log: its caller, start, end and denials.

Every event has the run's id, and the operator who signed for it once that is known.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from policy import clocks, contract, denials, errors, lifecycle
from policy.audit_log import events
from policy.lifecycle import State
from policy.manifest.agent import Manifest
from policy.prove import live
from policy.signing import trust
from sandbox.audit import open_runs, run_archive
from sandbox.audit.log import MOST_RECORDS, Ledger, Record
from sandbox.run_io import RunOutcome, StreamTotals
from sandbox.rundir import registry


class RunEvents:
    """Write the events of one run. ``attribute`` and ``agent_id`` are filled in as they become known."""

    def __init__(self, ledger: Ledger, run_id: str, issuer: Mapping[str, str]) -> None:
        self._ledger, self._run_id, self._issuer = ledger, run_id, issuer
        self.agent_id: str | None = None
        self.operator: str | None = None
        self.signers: tuple[trust.Signer, ...] = ()
        self.started = False
        self.state: State | None = None
        self._place: Path | None = None
        self._waiting: list[Record] = []
        self._together = False
        self._about: dict[str, Any] = {}
        self._known: dict[str, Any] = {}
        self._refused = 0
        # Why the record is not in the archive, if so. The run is answered anyway.
        self.unarchived = ""
        self._mark: open_runs.OpenRunMarker | None = None

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._run_id

    def asked_by(self, issuer: Mapping[str, str]) -> None:
        """Use this issuer for all further rows: an instance is given its intent."""
        self._issuer = issuer

    @contextlib.contextmanager
    def together(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        """Write the rows of this block durably at its end, all at once, with one sync: a client is waiting.

        No row in the block may have an effect by itself. Other processes see the state only after ``show``.
        ``meanwhile`` is called during the sync or just before it. It must raise nothing.
        """
        self._together = True
        try:
            yield
        finally:
            self._together = False
        self._flush(meanwhile, carried=True)

    def attribute(self, signers: tuple[trust.Signer, ...], operator: str | None) -> None:
        """Record the signers that count for this manifest, and not a name that the manifest merely states."""
        self.signers, self.operator = signers, operator or signers[0].name
        # The waiting rows are about the same run, and get its operator too.
        self._waiting = [
            structs.replace(one, fields={**one.fields, "operator": self.operator}) for one in self._waiting
        ]

    def transition(self, target: State, reason: str, *, waits: bool = False) -> None:
        """Write the next state of the run before the act.

        ``waits`` says that the row need not be durable by itself. It is written with the next row that must be.

        Raises:
            errors.WrongStateError: Raised when the state table has no such transition.
        """
        state = lifecycle.step(self.state, target)
        self._append("run_state", waits=waits, agent_id=self.agent_id, state=str(state), reason=reason)
        self.state = state
        if not self._together:
            self.show()

    def note(self, reason: str) -> None:
        """Record an event that does not change the run's state."""
        self._append("run_state", agent_id=self.agent_id, state=str(self.state), reason=reason)

    def show_state(self, directory: Path | None) -> None:
        """Also write the state into this directory from now on, for processes that list the runs. None stops that."""
        self._place = directory
        self.show()

    def show(self) -> None:
        """Write the state into the run's directory, where it is to stand.

        Raises:
            errors.StateError: it cannot be written.
        """
        if self._place is not None:
            made = self._place / f".{registry.STATE}.new"
            try:
                made.write_text(f"{self.state}\n")
                made.rename(self._place / registry.STATE)
            except OSError as e:
                raise errors.StateError(f"the state of the run cannot be written: {e.strerror}") from e

    def capability_check(self, manifest: Manifest, *, missing: tuple[str, ...] = ()) -> None:
        """Record the capabilities that the manifest requires of its caller. The operator at the command line holds all.

        Raises:
            errors.CapabilityError: Raised when the caller lacks ``missing``, after the event is written.
        """
        required = list(manifest.capabilities.required)
        display = self._issuer["display"]
        self._append(
            "capability_check",
            waits=True,
            agent_id=manifest.agent.id,
            required_actions=required,
            missing_actions=list(missing),
            passed=not missing,
            authorized_by=[
                {"action": a, "granted_by_display": display, "signature_b58": ""} for a in required if a not in missing
            ],
        )
        if missing:
            raise errors.CapabilityError(
                f"`{display}` does not hold `{missing[0]}`, which agent `{manifest.agent.id}` requires of its caller",
                hint="what an agent's own manifest requires of its caller it may hand on",
                where=manifest.where("capabilities.required"),
            )

    def self_test_started(self, detail: str, *, name: str) -> None:
        """Record a self-test durably before its sandbox starts, so that the log shows it also after a crash."""
        self._append("self_test_started", name=name, detail=detail)

    def self_test(self, detail: str, *, passed: bool, name: str = "system call filter") -> None:
        """Record the result of the live probe of runsc, or of the probes of a policy."""
        self._append("self_test", name=name, passed=passed, detail=detail)

    def expect_start(self) -> None:
        """Mark that the log is owed an end (sandbox.audit.open_runs), ahead of the start, while no client waits.

        Until the start is written the mark means nothing.
        """
        if self._mark is None:
            self._mark = open_runs.OpenRunMarker(self._ledger, self._run_id)

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
        parent: str | None = None,
        behalf: Mapping[str, str] | None = None,
    ) -> None:
        """Record the start durably, before the agent starts. The log is then owed an end (sandbox.audit.open_runs)."""
        self.expect_start()
        self.about(package=package, policy_digest=policy_digest, parent=parent, started_ms=int(time.time() * 1000))
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
            parent=parent,
            behalf_display=None if behalf is None else behalf["display"],
            behalf_pubkey=None if behalf is None else behalf["pubkey"],
        )
        self.started = True

    def leave(self) -> None:
        """Stop writing for this run.

        The next process that opens the log writes an end that could not be written, as if this process had died
        (sandbox.audit.open_runs). Without a start no end is owed.
        """
        if self._mark is not None:
            if self.started:
                self._mark.leave()
            else:
                self._mark.clear()
            self._mark = None

    def about(self, *, package: str, policy_digest: str | None, parent: str | None, started_ms: int) -> None:
        """Set the fields of the archive's record beside those of the end."""
        self._about = {"package": package, "policy_digest": policy_digest, "parent": parent, "started_ms": started_ms}

    def denied(self, row: denials.Row) -> None:
        """Record a denial and its ``row.count`` since its last row (sandbox.audit.denials bounds the rows)."""
        denial = row.denial
        self._refused += row.count
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

    def reached(self, target: str, connections: int, carried: int | None) -> None:
        """Record a destination of the run with its counts (sandbox.network.reached bounds the rows)."""
        self._append("reached", agent_id=self.agent_id, target=target, connections=connections, bytes=carried)

    def approval(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Record durably that an operator is asked, or has answered, or that a lease is over."""
        self._append(kind, agent_id=self.agent_id, **fields)

    def credential_granted(self, name: str, version: int, backend: str) -> None:
        """Record durably that a secret is about to be given to the agent."""
        self._append("credential_granted", agent_id=self.agent_id, name=name, version=version, backend=backend)

    def model_asked(self, fields: Mapping[str, Any], price: int) -> None:
        """Record a request to a model, once its answer has ended: ``fields`` are its counts."""
        self._append("model_asked", agent_id=self.agent_id, credits=price, **fields)

    def credential_injected(self, name: str, version: int, backend: str, host: str) -> None:
        """Record durably that the gate is about to add a secret to requests to a host."""
        self._append(
            "credential_injected", agent_id=self.agent_id, name=name, version=version, backend=backend, host=host
        )

    def request_injected(self, fields: Mapping[str, Any]) -> None:
        """Record a request to which a secret was added, once its answer has ended."""
        self._append("request_injected", agent_id=self.agent_id, **fields)

    def ssh_signed(self, fields: Mapping[str, Any]) -> None:
        """Record durably that a login is about to be signed by a key of the vault."""
        self._append("ssh_signed", agent_id=self.agent_id, **fields)

    def web_asked(self, fields: Mapping[str, Any], price: int) -> None:
        """Record a search or a page, once it has ended: ``fields`` are its counts."""
        self._append("web_asked", agent_id=self.agent_id, credits=price, **fields)

    def tool(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Record a call of a tool: refused, about to be sent, or answered. ``fields`` hold digests only.

        It is durable with ``sync``, or with the next row that must be.
        """
        self._append(kind, waits=True, **fields)

    def child_cancelled(self, child: str, agent_id: str) -> None:
        """Record that a child is about to be stopped, since its client no longer waits. Durable before that."""
        self._append("child_cancelled", agent_id=self.agent_id, child=child, child_agent_id=agent_id)

    def sync(self) -> None:
        """Make all rows durable, with one sync of the disk where there is room (ADR 0058). ``settle`` may follow."""
        if self._waiting:  # otherwise another row took all along
            self._flush(carried=True)

    def settle(self) -> None:
        """Sync the rows of ``sync`` to their files, while no client waits. Otherwise the next ``sync`` does it."""
        self._ledger.settle()

    def agent_asked(self, fields: Mapping[str, Any]) -> None:
        """Record a call to another agent, once it has ended: its digest and counts."""
        self._append("agent_asked", agent_id=self.agent_id, **fields)

    def telemetry_relayed(self, fields: Mapping[str, Any]) -> None:
        """Record a request of the agent's own telemetry, once it has ended: its counts."""
        self._append("telemetry_relayed", agent_id=self.agent_id, **fields)

    def port_published(self, port: int, to: str) -> None:
        """Record that a port of the agent is about to be reached at a place of this host."""
        self._append("port_published", agent_id=self.agent_id, port=port, to=to)

    def publish_ended(self, port: int, to: str, counts: Mapping[str, Any]) -> None:
        """Record the end of a published port, with what was carried."""
        self._append("publish_ended", agent_id=self.agent_id, port=port, to=to, **counts)

    def host_port_opened(self, port: int) -> None:
        """Record that a port of this host is about to be reached by the agent."""
        self._append("host_port_opened", agent_id=self.agent_id, port=port)

    def host_port_ended(self, port: int, counts: Mapping[str, Any]) -> None:
        """Record the end of a port of this host, with what was carried."""
        self._append("host_port_ended", agent_id=self.agent_id, port=port, **counts)

    def drift(self, layer: live.Layer) -> None:
        """Record a drift durably, before the run is ended for it."""
        self._append("drift", agent_id=self.agent_id, layer=layer.name, expected=layer.expected, found=layer.found)

    def finish(self, reason: str) -> None:
        """Record the last two states of a run that was started, together with its last row."""
        if self.state not in (State.TERMINATED, State.ARCHIVED):
            self.transition(State.TERMINATED, reason, waits=True)
        if self.state is State.TERMINATED:
            self.transition(State.ARCHIVED, "its record goes into the archive", waits=True)

    def run_ended(
        self,
        *,
        status: Literal["ok", "failed"],
        code: str | None,
        finished: RunOutcome | None = None,
        digest: str | None = None,
        message: str | None = None,
        stderr: str = "",
        stdout: str = "",
        usage: contract.Usage | None = None,
    ) -> None:
        """Write the last row of a run that was started, and its record in the archive.

        ``finished`` is None when the machine failed the run; ``usage`` is then its use as far as it is known.
        ``message``, ``stderr`` and ``stdout`` are for the record alone.
        """
        exit_status = finished.exit_status if finished else None
        # runsc says 128 + n for a signal as a shell does; an agent may exit with such a number itself.
        by_signal = exit_status is not None and 0 < exit_status - 128 < signal.NSIG
        usage = finished.usage if finished else usage
        self._known = {"finished": finished, "stderr": stderr, "stdout": stdout, "usage": usage}
        with self._counted(usage):
            self._append(
                "run_ended",
                agent_id=self.agent_id,
                status=status,
                code=code,
                exit_status=None if by_signal else exit_status,
                exit_signal=exit_status - 128 if exit_status is not None and by_signal else None,
                duration_ms=int(finished.total_seconds * 1000) if finished else 0,
                oom=finished is not None and finished.oom_kills > 0,
                stdout_bytes=_stdout_bytes(finished),
                stderr_bytes=finished.stderr_total if finished else 0,
                result_hash_hex=digest,
                **_used(usage),
            )
        self.started = False
        record = run_archive.ArchivedRun(
            run_id=self._run_id,
            agent_id=self.agent_id or "",
            operator=self.operator,
            issuer=self._issuer["display"],
            status=status,
            code=code,
            message=message,
            ended_ms=int(time.time() * 1000),
            exit_status=exit_status,
            result_hash_hex=digest,
            denials=self._refused,
            stderr=run_archive.tail(stderr),
            stderr_bytes=finished.stderr_total if finished else 0,
            stdout=run_archive.tail(stdout, run_archive.STDOUT_BYTES),
            stdout_bytes=_stdout_bytes(finished),
            **self._about,
        )
        try:
            run_archive.store(self._ledger.place.parent, record)
        except errors.StateError as e:
            self.unarchived = e.message
        if self._mark is not None:
            self._mark.clear()
            self._mark = None

    @contextlib.contextmanager
    def _counted(self, usage: contract.Usage | None) -> Iterator[None]:
        """Note the use where the last row cannot be written, for the process that writes it next."""
        try:
            yield
        except errors.CovenantError:
            if usage is not None:
                with contextlib.suppress(errors.CovenantError, OSError):
                    open_runs.note_used(self._ledger.place.parent, self._run_id, usage)
            raise

    def runs_revoked(self, fields: Mapping[str, Any]) -> None:
        """Record the live runs that a new trust root revokes, where this run's shim is the first to find it."""
        fields = {"operator": self.operator, **fields}
        self._ledger.append("runs_revoked", fields, issuer=self._issuer, now_ms=int(time.time() * 1000))

    def runs_stopped(self, fields: Mapping[str, Any]) -> None:
        """Record the runs that end because a newer serial was accepted: this run, or one that its shim found."""
        fields = {"operator": self.operator, **fields}
        self._ledger.append("runs_stopped", fields, issuer=self._issuer, now_ms=int(time.time() * 1000))

    def session_ended(self, spoken: str, totals: StreamTotals) -> None:
        """Record what a stream session moved in both directions; it goes with the run's last row."""
        self._append(
            "session_ended",
            waits=True,
            agent_id=self.agent_id,
            contract=spoken,
            in_bytes=totals.in_bytes,
            in_hash_hex=totals.in_sha256,
            out_bytes=totals.out_bytes,
            out_hash_hex=totals.out_sha256,
            recording_hash_hex=totals.recording_sha256,
        )

    def intent_dispatched(self, intent_id: str, text: str, digest: str) -> None:
        """Version 1's row of an intent that was answered; it goes with the run's last."""
        if self._waiting:
            self._flush()  # its text may be as long as a write with few other rows
        self._append(
            "intent_dispatched",
            waits=True,
            intent_id=intent_id,
            intent_text=text,
            matched_agent=self.agent_id,
            result_hash_hex=digest,
            status="ok",
        )

    def failure(self, error: BaseException, *, package_digest: str) -> None:
        """Write the row of a refusal, or of a started run that the machine failed."""
        self._place = None  # the directory is no longer read, and may be gone
        error = errors.exhausted(error) or error
        fault = errors.InternalError if isinstance(error, Exception) else errors.StoppedError
        code = error.code if isinstance(error, errors.CovenantError) else fault.code
        if self.started:
            self.finish(code)
            # What is known of it where the first try could not be written.
            self.run_ended(status="failed", code=code, message=str(error) or None, **self._known)
        elif isinstance(error, errors.CovenantError) and not isinstance(error, errors.UsageError):
            fields = events.rejection(error, agent_id=self.agent_id, package_digest=package_digest)
            if self.state in (State.PROVISIONED, State.VALIDATED):
                self.transition(State.REJECTED, code, waits=True)
            self._append("manifest_rejected", **fields)

    def _append(self, kind: str, *, waits: bool = False, **fields: Any) -> None:
        fields |= {"run_id": self._run_id, "operator": self.operator}
        if len(self._waiting) >= MOST_RECORDS:
            # An agent may make more calls at one time than one write has rows.
            self._flush()
        self._waiting.append(Record(kind, fields, int(time.time() * 1000)))
        if not waits and not self._together:
            self._flush()

    def _flush(self, meanwhile: Callable[[], None] = lambda: None, *, carried: bool = False) -> None:
        # INVARIANT: waiting rows are durable before anything is started or ended, and before any answer.
        records, self._waiting = self._waiting, []
        self._ledger.append_all(records, issuer=self._issuer, carried=carried, meanwhile=meanwhile)


def cut_off(ledger: Ledger) -> None:
    """Write the last row of each run whose process died before it did; the log would show it as running."""
    with open_runs.settling(ledger) as events_of_starts:
        for event in events_of_starts:
            rows = RunEvents(ledger, event["kind"]["run_id"], event["issuer"])
            rows.agent_id, rows.operator = event["kind"]["agent_id"], event["kind"]["operator"]
            rows.state = State(event["kind"].get("state", State.ISOLATED))
            rows.about(
                package=event["kind"]["package"],
                policy_digest=event["kind"]["policy_digest"],
                parent=event["kind"].get("parent"),
                started_ms=event["timestamp_ms"],
            )
            rows.finish(errors.CutOffError.code)
            used = open_runs.used(ledger.place.parent, event["kind"]["run_id"])
            rows.run_ended(status="failed", code=errors.CutOffError.code, usage=used)


def _stdout_bytes(finished: RunOutcome | None) -> int:
    """Return the bytes that the agent wrote to stdout: its answer, or its stream."""
    if finished is None:
        return 0
    return len(finished.stdout) if finished.totals is None else finished.totals.out_bytes


def _used(usage: contract.Usage | None) -> dict[str, Any]:
    names = ("cpu_ms", "memory_peak_bytes", "wall_ms")
    return dict.fromkeys(names) if usage is None else {name: getattr(usage, name) for name in names}
