"""Everything a run needs besides its sandbox: admission, deadlines, the agent's broker, revocation checks, control.

``Run`` (sandbox.lifecycle.run) goes through the procedure with these terms. A standby instance (sandbox.standby) gets
them again once it has an intent.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from policy import clocks, decide, errors
from policy.grants.effective import Effective
from policy.grants.lifetime import Lifetime
from policy.host import HostFacts
from policy.manifest.agent import Manifest
from policy.rules.case import Claimant, Unsigned
from policy.rules.succession import OnNewer
from policy.signing import authority, trust
from sandbox import config as configuration
from sandbox.audit.denials import DenialLog
from sandbox.audit.run_events import RunEvents
from sandbox.broker import delegation, server
from sandbox.control import revocation, revocation_watch, succession, tree_kill
from sandbox.host import facts
from sandbox.lifecycle.types import Request, RunDependencies
from sandbox.run_io import Limits, PeriodicCheck
from sandbox.rundir import admission, marks, registry
from sandbox.rundir.uid_pool import UidLease
from sandbox.runner import gvisor, prepare
from sandbox.shim.operations import RunOperations


class RunContext:
    """Compose what one run needs besides its sandbox.

    ``now_ms`` is the time of the request, and ``child`` the request of the parent's shim.
    """

    # The trust root that a signed package was verified under, and the place that the run claims.
    _root: trust.TrustRoot
    _place: admission.Claim

    def __init__(
        self, dependencies: RunDependencies, request: Request, *, now_ms: int, child: delegation.Child | None = None
    ) -> None:
        self._dependencies, self._request, self._now_ms = dependencies, request, now_ms
        self._child, self._lineage = child, None if child is None else child.lineage
        self.run_id = str(uuid.uuid4()) if child is None else child.run_id
        self.intent_id = request.intent_id or str(uuid.uuid4())
        self._rows = RunEvents(dependencies.ledger, self.run_id, request.issuer)
        self._denials = DenialLog(self._rows.denied)
        self._secrets: gvisor.Secrets | None = None
        self._below_ms: list[int] = []
        self._root_version: int | None = None

    def adopted(self) -> None:
        """Continue after the parent has ended."""
        self._rows.note("its parent's run has ended, and it goes on without it")

    def _case(self, trusted: trust.TrustedPackage | Unsigned) -> dict[str, Any]:
        """Return the input of the rules besides the package and the host."""
        entries, lineage = registry.live(self._dependencies.path / "runs"), self._lineage
        above: dict[str, Any] = {}
        if lineage is not None:
            above = {"parent": lineage.present(entries), "on_excess": lineage.on_excess, "wanted": lineage.only}
        return {
            **above,
            "now_ms": self._now_ms,
            "identities": admission.owners(entries, admission.shown_to(self._request.issuer["display"], lineage)),
            "claimant": self._claimant(trusted),
            "package_name": self._request.package_name,
            "extra_never": dict.fromkeys(self._dependencies.never_granted, "it holds what decides"),
        }

    def _claimant(self, trusted: trust.TrustedPackage | Unsigned) -> Claimant | None:
        """Return the package's claim to its agent id. `covenant dev` has its own serials, which do not count here."""
        if not isinstance(trusted, trust.TrustedPackage) or self._request.dev:
            return None
        return Claimant(
            serial=trusted.statement.serial,
            signers=frozenset(one.keyid for one in self._rows.signers),
            listed=trust.listed(self._root, trusted.statement.agent_id, now_ms=self._now_ms),
            above=frozenset(one.run_id for one in self._lineage.parent.line) if self._lineage else frozenset(),
        )

    def _uids(self) -> UidLease:
        config = self._dependencies.config
        return UidLease(self._dependencies.path / "uids", first=config.uid_first, count=config.uid_count)

    def _look(self, manifest: Manifest) -> HostFacts:
        """(2) Return the host facts, with those for this manifest."""
        dependencies = self._dependencies
        return facts.for_manifest(
            facts.probe(dependencies.config),
            manifest,
            config=dependencies.config,
            package=self._request.package.files,
            extra_never=dependencies.never_granted,
            effective=delegation.narrowed(self._lineage, manifest, dependencies.path / "runs")
            if self._lineage
            else None,
        )

    def _asked(
        self, trusted: trust.TrustedPackage | Unsigned, manifest: Manifest, effective: Effective
    ) -> admission.Claim:
        """Return the place that the run claims. It is checked now, and again when it is taken."""
        config = self._dependencies.config
        claim = admission.Claim(
            manifest,
            trusted,
            effective,
            self._request.package_name,
            facts.capacity_mb(),
            config.overcommit,
            self._lineage,
            admission.caller(self._dependencies.path / "runs", self._request.issuer, self._lineage),
            config.caller_requests,
            claimant=self._claimant(trusted),
        )
        claim.check(registry.live(self._dependencies.path / "runs"))
        self._place = claim
        return claim

    def _accept(self, trusted: trust.TrustedPackage) -> None:
        """Record durably that the package was accepted, before any of its code starts. Raises as ``succession``."""
        dependencies, place = self._dependencies, self._place
        setting, write, runs = dependencies.config.on_newer_serial, self._rows.runs_stopped, dependencies.path / "runs"
        succession.accept(trusted, place, dependencies.state, runs, setting=setting, write=write, now_ms=self._now_ms)

    def _ratchet(self, trusted: trust.TrustedPackage) -> trust.Accepted | None:
        """Behind the gate, before the label can be seen: return the highest serial that was accepted.

        Raises:
            errors.SerialError: it is newer than that of the package.
        """
        one = trusted.statement
        last = self._dependencies.state.accepted(one.agent_id)
        trust.check_rollback(one.agent_id, one.serial, trusted.payload_digest, last)
        return last

    def _claim(self, claim: admission.Claim) -> tuple[dict[str, str], Callable[[], None]]:
        """Return the label of the run, and the check to make under the lock before other processes see the label."""
        runs, trusted = self._dependencies.path / "runs", claim.trusted
        label = claim.label(
            issuer=self._request.issuer,
            operator=self._rows.operator,
            signers=self._rows.signers,
            now_ms=self._now_ms,
        )
        signed = trusted if isinstance(trusted, trust.TrustedPackage) else None
        own = None
        if signed is not None and not self._request.dev:  # operators do not revoke dev's own root
            own = authority.Authority.of(self.run_id, signed, self._rows.signers)
        self._root_version = signed.root_version if signed else None
        label["intent_id"] = self.intent_id
        label[revocation.AUTHORITY] = revocation.line_below(runs, label["parent"], own)

        def settle() -> None:
            above = [runs / one for one in label["ancestors"].split()]
            line = label[revocation.AUTHORITY]
            revocation.refuse(self._dependencies.state, self._root_version, above, "" if self._request.dev else line)
            if signed is not None:
                self._ratchet(signed)
            claim.settle(runs)
            if self._child is not None:
                if (refused := delegation.standing(runs / label["parent"])) is not None:
                    raise refused
                self._child.admitted(label)

        return label, settle

    def _outdated(self, trusted: trust.TrustedPackage) -> str | None:
        """Return why the package starts no more, None while its serial is the highest."""
        try:
            RunContext._ratchet(self, trusted)
        except errors.SerialError as e:
            return e.message
        return None

    def _broker(
        self, decision: decide.Decision, deadline: clocks.Deadline, stack: contextlib.ExitStack
    ) -> server.Broker | None:
        """Make the broker for the agent's requests to its supervisor."""
        dependencies, request = self._dependencies, self._request
        elder = delegation.Elder(self.run_id, self.intent_id, dict(request.issuer), self._lineage)
        start = dependencies.start_child
        made = delegation.broker(
            elder,
            decision,
            runs=dependencies.path / "runs",
            deadline=deadline,
            denied=self._denials.told,
            used=self._below_ms.append,
            grace_seconds=dependencies.config.grace_seconds,
            start=None if start is None else functools.partial(start, request),
            keep=(*dependencies.below, *(() if request.children is None else (request.children,))),
            alive=None if self._child is None else self._child.child_request.alive,
        )
        if made is not None and decision.artefacts.json("credentials.json")["names"]:
            # Import it only here: its cryptography and documents take a tenth of a cold start.
            from sandbox.broker import credentials

            scope = credentials.Scope.of(decision, deadline)
            tell = credentials.Tellers(self._rows.credential_granted, self._denials.told, self._is_revoked)
            served = credentials.serve(
                made, scope, tell, config=dependencies.config, is_dev=bool(request.dev), stack=stack
            )
            if served is not None:
                self._secrets = functools.partial(served.put_all, seconds=dependencies.config.start_deadline_seconds)
        return made

    def _is_revoked(self) -> bool:
        return marks.verdict(self._dependencies.path / "runs" / self.run_id) is not None

    def _watch(self, label: Mapping[str, str]) -> tuple[PeriodicCheck, ...]:
        """Return the checks that end the run: on a mark, a revocation by a new root, or a newer serial of its agent id.

        ``_claim`` made its label.
        """
        dependencies, path = self._dependencies, self._dependencies.path / "runs" / self.run_id
        state = None if self._request.dev else dependencies.state
        revoked = revocation_watch.Watch(path, label, state, self._rows.runs_revoked, version=self._root_version)
        newer = succession.Watch(path, label, dependencies.state, self._on_newer, self._rows.runs_stopped)
        return revoked.round(), newer.round()

    def _on_newer(self) -> OnNewer:
        """Read `on_newer_serial` again: a shim has the configuration of its start."""
        config = self._dependencies.config
        with contextlib.suppress(errors.ConfigError):
            config = configuration.load(config.state)
        return config.on_newer_serial

    def _operations(self, lifetime: Lifetime) -> RunOperations:
        return RunOperations(
            self._rows,
            ttl_seconds=lifetime.ttl_seconds or None,
            suspends=lifetime.on_expiry == "suspend",
            shown=lambda raw: prepare.redacted(raw, self._dependencies.path),
            allow_thaw=tree_kill.allow_thaw,
            below=functools.partial(delegation.end_below, self._dependencies.path / "runs", self.run_id),
        )

    def _deadline(self, trusted: trust.TrustedPackage | Unsigned, manifest: Manifest) -> clocks.Deadline:
        return clocks.effective_deadline(
            now_ms=self._now_ms,
            cpu_ms_per_task=manifest.resources.cpu_ms_per_task,
            timeout_ms=self._request.timeout_ms,
            ttl_seconds=manifest.lifetime.ttl_seconds,
            parent_deadline_ms=None if self._lineage is None else self._now_ms + self._lineage.remaining_ms,
            suspends=manifest.lifetime.on_expiry == "suspend",
            expires_at_ms=trusted.statement.expires_at if isinstance(trusted, trust.TrustedPackage) else None,
        )

    def _limits(self, deadline: clocks.Deadline) -> Limits:
        config = self._dependencies.config
        return Limits(
            start_seconds=config.start_deadline_seconds,
            task_seconds=deadline.milliseconds / 1000,
            task_clock=deadline.clock,
            grace_seconds=config.grace_seconds,
        )
