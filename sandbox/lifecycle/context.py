"""Everything a run needs besides its sandbox: admission, deadlines, the agent's broker, revocation checks, control.

``Run`` (sandbox.lifecycle.run) goes through the procedure with one context. A warm sandbox (sandbox.standby) assigns an
intent to the context a second time, when a client brings one.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, structs

from policy import clocks, contract, decide, errors
from policy.compile import mounts
from policy.grants.effective import Effective
from policy.grants.lifetime import LifetimeGrant
from policy.host import HostFacts
from policy.manifest.agent import Manifest
from policy.rules import writers
from policy.rules.case import Claimant, Unsigned
from policy.rules.succession import OnNewer
from policy.signing import authority, trust
from sandbox import config as configuration
from sandbox.audit.denials import DenialLog
from sandbox.audit.run_events import RunEvents
from sandbox.broker import children, delegation, server
from sandbox.control import revocation, revocation_watch, succession, tree_kill, withdrawn_secrets
from sandbox.host import facts
from sandbox.kernel.runsc import command
from sandbox.lifecycle import lease_desks
from sandbox.lifecycle.types import Laps, Request, RunDependencies
from sandbox.network.gate import credit_meter
from sandbox.network.inject import gate as inject_gate
from sandbox.network.publish import gate as publish_gate
from sandbox.network.publish import host_gate
from sandbox.network.reached import Reached
from sandbox.network.service import gate as service_gate
from sandbox.network.tools.ledger import ToolTerms
from sandbox.run_io import Limits, PeriodicCheck
from sandbox.rundir import admission, marks, registry
from sandbox.rundir.uid_pool import UidLease
from sandbox.runner import gvisor, prepare
from sandbox.shim.operations import RunOperations

# Called behind the gate with a package and the highest serial that was accepted of its agent id; it may refuse.
CheckSerial = Callable[[trust.TrustedPackage, trust.Accepted | None], None]

# The log's text for an agent that requests standby and has none.
_NO_STANDBY = "standby: nobody keeps instances ready here, each run starts cold (covenant-supervisor does)"
_NO_CALLER = "standby: an agent with a workspace starts cold, its directory comes with its caller"
_ONE_WRITER = "standby: an agent that writes a path of the host or a volume starts cold, one run at a time writes it"
_OF_DAEMON = "standby: an agent with tools of the daemon starts cold, their line comes with its request"
_NOT_AHEAD = "standby: an agent that may ask its supervisor for more starts cold, its rights count from its intent"


def spoken_of(decision: decide.Decision) -> contract.Contract:
    """Return the contract of the compiled policy."""
    return contract.of(decision.artefacts.json("supervision.json").get("process"))


class Assignment(Struct, frozen=True):
    """The intent of a run: the request for it, what the agent is given, and its line for stdin (contract `line`)."""

    request: Request
    intent: contract.Intent
    line: bytes


class RunContext:
    """Compose what one run needs besides its sandbox.

    - ``now_ms`` is the time of the request, and ``child`` the request of the parent's shim.
    - ``assignment`` is the run's intent; ``request``, ``intent_id``, ``intent`` and ``line`` are its parts.
    - ``root`` is the trust root of a signed package, ``place`` the place that the run claims.
    - ``standby`` is the number of instances of the agent to keep ready, once that is known. ``standby_notes`` are the
      texts for the log of an agent that wants instances and has none.

    Raises:
        errors.UsageError: the intent is not one that an agent can be given. Nothing was accepted or logged.
    """

    root: trust.TrustRoot
    place: admission.AdmissionRequest
    standby = 0
    standby_notes: tuple[str, ...] = ()

    def __init__(
        self,
        dependencies: RunDependencies,
        request: Request,
        *,
        now_ms: int,
        child: delegation.ChildContext | None = None,
    ) -> None:
        self.dependencies, self.now_ms = dependencies, now_ms
        self.child, self.lineage = child, None if child is None else child.lineage
        self.run_id = str(uuid.uuid4()) if child is None else child.run_id
        self.assignment, self.laps = self.assignment_of(request, request.intent_id or str(uuid.uuid4())), Laps()
        self.rows = RunEvents(dependencies.ledger, self.run_id, request.issuer)
        self.denials = DenialLog(self.rows.denied)
        self.reached = Reached()
        self.secrets: gvisor.Secrets | None = None
        self.below_ms: list[int] = []
        self._meter = request.meter
        self._spawn: children.Spawn | None = None
        self._broker: server.Broker | None = None
        self.commands: service_gate.CommandLineEnd | None = None
        self.secret_checks = withdrawn_secrets.SecretChecks()
        self._root_version: int | None = None

    @property
    def request(self) -> Request:
        """Return the request of the present intent."""
        return self.assignment.request

    @property
    def intent_id(self) -> str:
        """Return the id of the present intent."""
        return self.assignment.intent.id

    @property
    def intent(self) -> contract.Intent:
        """Return the present intent."""
        return self.assignment.intent

    @property
    def line(self) -> bytes:
        """Return the line that gives the present intent to the agent."""
        return self.assignment.line

    def assignment_of(self, request: Request, intent_id: str) -> Assignment:
        """Return the intent of ``request`` as of ``now_ms``.

        Raises:
            errors.UsageError: no agent can be given this text.
        """
        parent = None if self.lineage is None else self.lineage.parent.intent_id
        intent = contract.Intent(intent_id, request.text, request.reads, self.now_ms, request.priority, parent=parent)
        return Assignment(request, intent, intent.line())

    def log_failure(self, error: BaseException) -> None:
        """Write the row of a refusal, or of a started run that failed by a fault of the machine."""
        if self.rows.started:
            self.flush()
        self.rows.failure(error, package_digest=self.request.package.digest)

    def flush(self) -> None:
        """Write the last denials of a run that has ended, and the destinations that it reached."""
        self.denials.flush()
        for row in self.reached.rows():
            self.rows.reached(row.target, row.connections, row.bytes)

    def settle_standby(self, decision: decide.Decision) -> None:
        """Set ``standby`` for an agent that wants instances kept ready, or ``standby_notes`` if none are."""
        wanted = decision.manifest.sandbox.standby
        if wanted and decision.manifest.workspace.mode == "overlay":
            self.standby_notes = (_NO_CALLER,)
            return
        if wanted and self.request.daemon is not None:
            self.standby_notes = (_OF_DAEMON,)
            return
        filesystem = decision.effective.filesystem
        if wanted and (filesystem.write or filesystem.volumes.listing()):
            self.standby_notes = (_ONE_WRITER,)
            return
        if not wanted or self.child is not None or self.request.dev:
            return
        if command.BROKER_FLAG in decision.artefacts.json("runtime.json")["flags"]:
            self.standby_notes = (_NOT_AHEAD,)
        elif not self.dependencies.keeps_standby:
            self.standby_notes = (_NO_STANDBY,)
        else:
            self.standby = wanted

    def adopted(self) -> None:
        """Continue after the parent has ended."""
        self.rows.note("its parent's run has ended, and it goes on without it")

    def case(self, trusted: trust.TrustedPackage | Unsigned) -> dict[str, Any]:
        """Return the input of the rules besides the package and the host."""
        entries, lineage = registry.live(self.dependencies.path / "runs"), self.lineage
        above: dict[str, Any] = {}
        if lineage is not None:
            above = {"parent": lineage.present(entries), "on_excess": lineage.on_excess, "wanted": lineage.only}
        return {
            **above,
            "now_ms": self.now_ms,
            "identities": admission.owners(entries, admission.shown_to(self.request.issuer["display"], lineage)),
            "claimant": self._claimant(trusted),
            "package_name": self.request.package_name,
            "extra_never": dict.fromkeys(self.dependencies.never_granted, "it holds what decides"),
        }

    def _claimant(self, trusted: trust.TrustedPackage | Unsigned) -> Claimant | None:
        """Return the package's claim to its agent id. `covenant dev` has its own serials, which do not count here."""
        if not isinstance(trusted, trust.TrustedPackage) or self.request.dev or self.request.part is not None:
            return None
        return Claimant(
            serial=trusted.statement.serial,
            signers=frozenset(one.keyid for one in self.rows.signers),
            listed=trust.listed(self.root, trusted.statement.agent_id, now_ms=self.now_ms),
            above=frozenset(one.run_id for one in self.lineage.parent.line) if self.lineage else frozenset(),
        )

    def uids(self) -> UidLease:
        config = self.dependencies.config
        return UidLease(self.dependencies.path / "uids", first=config.uid_first, count=config.uid_count)

    def look(self, manifest: Manifest) -> HostFacts:
        """(2) Return the host facts, with those for this manifest."""
        dependencies = self.dependencies
        return facts.for_manifest(
            facts.probe(dependencies.config),
            manifest,
            config=dependencies.config,
            package=self.request.package.files,
            extra_never=dependencies.never_granted,
            effective=delegation.narrowed(self.lineage, manifest, dependencies.path / "runs") if self.lineage else None,
            caller=self.request.uid,
        )

    def place_for(
        self, trusted: trust.TrustedPackage | Unsigned, manifest: Manifest, effective: Effective, host: HostFacts
    ) -> admission.AdmissionRequest:
        """Return the place that the run claims. It is checked now, and again when it is taken."""
        config = self.dependencies.config
        claim = admission.AdmissionRequest(
            manifest,
            trusted,
            effective,
            self.request.package_name,
            facts.capacity_mb(),
            config.overcommit,
            self.lineage,
            admission.caller(self.dependencies.path / "runs", self.request.issuer, self.lineage),
            config.caller_requests,
            claimant=self._claimant(trusted),
            writes=writers.of(effective, host),
            rooms_mb=sum(mounts.rooms(effective, host).values()),
        )
        claim.check(registry.live(self.dependencies.path / "runs"))
        self.place = claim
        return claim

    def accept(self, trusted: trust.TrustedPackage) -> None:
        """Record durably that the package was accepted, before any of its code starts. Raises as ``succession``."""
        dependencies, place = self.dependencies, self.place
        if self.request.part is not None:
            return  # the whole of which it is a part was accepted
        setting, write, runs = dependencies.config.on_newer_serial, self.rows.runs_stopped, dependencies.path / "runs"
        succession.accept(trusted, place, dependencies.state, runs, setting=setting, write=write, now_ms=self.now_ms)

    def check_serial(self, trusted: trust.TrustedPackage) -> trust.Accepted | None:
        """Behind the gate, before the label can be seen: return the highest serial that was accepted.

        Raises:
            errors.SerialError: it is newer than that of the package.
        """
        one = trusted.statement
        if self.request.part is not None:
            return None
        last = self.dependencies.state.accepted(one.agent_id)
        trust.check_rollback(one.agent_id, one.serial, trusted.payload_digest, last)
        return last

    def label_for(
        self, claim: admission.AdmissionRequest, check_serial: CheckSerial
    ) -> tuple[dict[str, str], Callable[[], None]]:
        """Return the label of the run, and the check to make under the lock before other processes see the label.

        ``check_serial`` is the check of the run's start mode, made beside that of ``check_serial`` here.
        """
        runs, trusted = self.dependencies.path / "runs", claim.trusted
        label = claim.label(
            issuer=self.request.issuer,
            operator=self.rows.operator,
            signers=self.rows.signers,
            now_ms=self.now_ms,
        )
        signed = trusted if isinstance(trusted, trust.TrustedPackage) else None
        own = None
        if signed is not None and not self.request.dev:  # operators do not revoke dev's own root
            own = authority.Authority.of(self.run_id, signed, self.rows.signers)
        self._root_version = signed.root_version if signed else None
        label["intent_id"] = self.intent_id
        label[revocation.AUTHORITY] = revocation.line_below(runs, label["parent"], own)

        def settle() -> None:
            above = [runs / one for one in label["ancestors"].split()]
            line = label[revocation.AUTHORITY]
            revocation.refuse(self.dependencies.state, self._root_version, above, "" if self.request.dev else line)
            if signed is not None:
                check_serial(signed, self.check_serial(signed))
            claim.settle(runs)
            if self.child is not None:
                if (refused := delegation.standing(runs / label["parent"])) is not None:
                    raise refused
                self.child.admitted(label)

        return label, settle

    def outdated(self, trusted: trust.TrustedPackage) -> str | None:
        """Return why the package starts no more, None while its serial is the highest."""
        try:
            self.check_serial(trusted)
        except errors.SerialError as e:
            return e.message
        return None

    def broker(
        self, decision: decide.Decision, deadline: clocks.Deadline, stack: contextlib.ExitStack
    ) -> server.Broker | None:
        """Make the broker for the agent's requests to its supervisor."""
        dependencies, request = self.dependencies, self.request
        start = dependencies.start_child
        made = self._broker = delegation.broker(
            delegation.Delegator(self.run_id, self.intent_id, dict(request.issuer), self.lineage),
            decision,
            runs=dependencies.path / "runs",
            deadline=deadline,
            denied=self.denials.told,
            used=self.below_ms.append,
            grace_seconds=dependencies.config.grace_seconds,
            start=None if start is None else self._start_child,
            keep=(*dependencies.below, *(one for one in (request.children, self.meter(stack)) if one is not None)),
            alive=None if self.child is None else self.child.child_request.alive,
            spawns=functools.partial(self._serve_spawns, decision, stack),
        )
        if made is not None and decision.artefacts.json("credentials.json")["names"]:
            # Import it only here: its cryptography and documents take a tenth of a cold start.
            from sandbox.lifecycle import credential_terms

            terms = credential_terms.CredentialTerms(dependencies.config, self.rows, self.denials, self._is_revoked)
            self.secrets = credential_terms.of(made, decision, deadline, request, terms, stack)
        return made

    def services(self, decision: decide.Decision, stack: contextlib.ExitStack) -> service_gate.Terms | None:
        """Return the terms of the run's service gate: the granted providers with their keys, and the tools.

        Raises:
            errors.VaultError: a provider's key cannot be had.
            errors.ToolsError: the tools of the package are not as described, pinned and granted.
        """
        if not decision.effective.served:
            return None
        from sandbox.lifecycle import model_terms

        self.secret_checks.add(model_terms.KeyWatch(decision, self.dependencies.config, stack))
        terms = model_terms.of(decision, self.dependencies.config, self.rows, self.request, self.meter(stack))
        return structs.replace(terms, tools=self._tools(decision, stack), commands=self.commands)

    def meter(self, stack: contextlib.ExitStack) -> int | None:
        """Return the counter of credits that the run and its children share. None without a limit."""
        if self._meter is None and self.request.credits is not None:
            self._meter = credit_meter.create(stack)
        return self._meter

    def _serve_spawns(
        self,
        decision: decide.Decision,
        stack: contextlib.ExitStack,
        manager: children.ChildManager,
        broker: server.Broker,
    ) -> None:
        """Serve the commands of the run until ``stack`` is closed. Only runs that have some pay for the import."""
        self._spawn = functools.partial(manager.spawn_for_result, cancelled=self.rows.child_cancelled)
        if not decision.effective.skills.commands:
            return
        from sandbox.broker import command_calls

        terms = command_calls.CommandTerms(
            decision.effective.skills, decision.manifest.agent.id, self.rows.tool, self.rows.sync, self.denials.told
        )
        self.commands = stack.enter_context(contextlib.closing(command_calls.CommandDesk(terms, manager, broker)))

    def _start_child(self, child_request: children.ChildRequest, say: children.Say) -> None:
        """Start a child, which spends of the run's credits. Called in the child's own process."""
        if (start := self.dependencies.start_child) is not None:
            start(structs.replace(self.request, meter=self._meter), child_request, say)

    def _tools(self, decision: decide.Decision, stack: contextlib.ExitStack) -> ToolTerms | None:
        if not decision.effective.skills.mcp:
            return None
        from sandbox.lifecycle import tool_terms

        start = self.dependencies.start_server
        assert start is not None
        return tool_terms.of(
            decision,
            self.request,
            self.dependencies.config,
            self.rows,
            self.denials.told,
            start=functools.partial(start, self.request),
            keep=self.dependencies.below,
            spawn=self._spawn,
            broker=self._broker,
            stack=stack,
        )

    def publish(self, decision: decide.Decision) -> publish_gate.PublishTerms | None:
        """Return the terms of the run's published ports: the caller's rights, and the rows of the log."""
        if not decision.effective.publish:
            return None
        return publish_gate.PublishTerms(self.request.rights, self.rows.port_published, self.rows.publish_ended)

    def host_ports(self, decision: decide.Decision) -> host_gate.HostTerms | None:
        """Return the terms of the run's ports of this host: the rows of the log."""
        if not decision.effective.host_ports:
            return None
        return host_gate.HostTerms(self.rows.host_port_opened, self.rows.host_port_ended)

    def desk(
        self, decision: decide.Decision, operations: RunOperations, stack: contextlib.ExitStack
    ) -> lease_desks.RunOfOperators | None:
        """Return the desk for what needs a lease of an operator, None where nothing does."""
        here = self.dependencies
        operator = lease_desks.Operator(here.config, here.state, bool(self.request.dev), self.request.asks)
        return lease_desks.of(decision, self.run_id, operator, self.rows, operations, stack)

    def inject(
        self, decision: decide.Decision, deadline: clocks.Deadline, stack: contextlib.ExitStack
    ) -> inject_gate.InjectTerms | None:
        """Return the terms of the secrets that the run's gate adds.

        Raises:
            errors.VaultError: they cannot be had.
        """
        if not decision.effective.inject:
            return None
        from sandbox.lifecycle import inject_terms

        return inject_terms.of(
            *(decision, self.dependencies.config, self.rows),
            is_dev=self.request.is_dev,
            owner=self.request.secrets_of,
            revoked=self._is_revoked,
            seconds=deadline.milliseconds / 1000,
            checks=self.secret_checks,
            stack=stack,
        )

    def _is_revoked(self) -> bool:
        return marks.verdict(self.dependencies.path / "runs" / self.run_id) is not None

    def checks(self, label: Mapping[str, str]) -> tuple[PeriodicCheck, ...]:
        """Return the checks that end the run: on a mark, a revocation by a new root, a newer serial of its agent id, or
        a provider's key that was taken out of the vault.

        ``label_for`` made its label.
        """
        dependencies, path = self.dependencies, self.dependencies.path / "runs" / self.run_id
        state = None if self.request.dev else dependencies.state
        revoked = revocation_watch.RevocationWatch(
            path, label, state, self.rows.runs_revoked, version=self._root_version
        )
        newer = succession.SerialWatch(path, label, dependencies.state, self._on_newer, self.rows.runs_stopped)
        return revoked.round(), newer.round(), self.secret_checks.round()

    def _on_newer(self) -> OnNewer:
        """Read `on_newer_serial` again: a shim has the configuration of its start."""
        config = self.dependencies.config
        with contextlib.suppress(errors.ConfigError):
            config = configuration.load(config.state)
        return config.on_newer_serial

    def operations(self, lifetime: LifetimeGrant) -> RunOperations:
        made = RunOperations(
            self.rows,
            ttl_seconds=lifetime.ttl_seconds or None,
            suspends=lifetime.on_expiry == "suspend",
            shown=lambda raw: prepare.redacted(raw, self.dependencies.path),
            allow_thaw=tree_kill.allow_thaw,
            below=functools.partial(delegation.end_below, self.dependencies.path / "runs", self.run_id),
            live=self.request.live,
            idle=self.request.idle,
        )
        made.table[withdrawn_secrets.OPERATION] = self.secret_checks.answer
        return made

    def deadline(self, trusted: trust.TrustedPackage | Unsigned, manifest: Manifest) -> clocks.Deadline:
        return clocks.effective_deadline(
            now_ms=self.now_ms,
            cpu_ms_per_task=manifest.resources.cpu_ms_per_task,
            timeout_ms=self.request.timeout_ms,
            ttl_seconds=manifest.lifetime.ttl_seconds,
            parent_deadline_ms=None if self.lineage is None else self.now_ms + self.lineage.remaining_ms,
            suspends=manifest.lifetime.on_expiry == "suspend",
            expires_at_ms=trusted.statement.expires_at if isinstance(trusted, trust.TrustedPackage) else None,
        )

    def limits(self, deadline: clocks.Deadline) -> Limits:
        config = self.dependencies.config
        return Limits.until(deadline, start_seconds=config.start_deadline_seconds, grace_seconds=config.grace_seconds)
