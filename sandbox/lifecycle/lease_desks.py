"""The desk of one run for what needs a lease: its book, and the operations `approvals`, `grant` and `deny` on the run.

The run's own process verifies each lease under the trust root that is in force, so that a revoked or expired operator
gives none, and again under each root that comes after: with its key a lease ends. Only root
reaches the operations (sandbox.shim.control_socket).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct, structs

from policy import decide, errors
from policy.grants.credentials import InjectSet
from policy.leases import exported, targets
from policy.leases.book import HeldRequest, Lease, LeaseBook, RunOfLeases
from policy.manifest.permissions import DEFAULT_ASK_SECONDS
from policy.signing import lease as leases
from sandbox.audit.run_events import RunEvents
from sandbox.config import Config
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.inject import gate as inject_gate
from sandbox.network.inject.holds import HeldRequestTerms
from sandbox.network.service import gate as service_gate
from sandbox.network.tools import questions
from sandbox.run_io import PeriodicCheck
from sandbox.shim.control_socket import Reply
from sandbox.shim.operations import RunOperations
from sandbox.storage.trust_state import State

# Between two looks at what is overdue, and at the trust root.
_LOOK_SECONDS: Final = 0.2
_ROOT_SECONDS: Final = 1.0
# A key may end without a new root: so many looks at the root, and every lease is verified again.
_EVERY: Final = 30
# The most requests that the client of a run is told of.
_TOLD: Final = 64
# The most leases in one answer, which has a bound (sandbox.shim.control_socket).
_SHOWN: Final = 100


class Operator(Struct, frozen=True):
    """The operators of a run: the configuration, and the state with the trust root. ``covenant dev`` has none.

    ``asks`` tells the client of the run what waits, so that it does not take the run for one that hangs.
    """

    config: Config
    state: State
    is_dev: bool
    asks: Callable[[Mapping[str, Any]], None] | None = None


class RunOfOperators:
    """The desk of a run with the leases that were given there, as signed."""

    def __init__(self, desk: LeaseDesk, operator: Operator, role: str | None) -> None:
        self.desk, self._operator, self._role = desk, operator, role
        self._given: dict[str, bytes] = {}
        self._version, self._looks = operator.state.root_version(), 0

    def grant(self, raw: bytes) -> Lease:
        """Verify a lease and apply it.

        Raises:
            errors.CovenantError: it does not hold now, or answers no open request.
        """
        lease = self.desk.grant(self._verified(raw))
        self._given[lease.sha256] = raw
        return lease

    def look(self) -> None:
        """End the leases whose keys no longer count."""
        self._looks += 1
        version = self._operator.state.root_version()
        if version == self._version and self._looks % _EVERY:
            return
        live = {lease.sha256 for lease in self.desk.book.leases if lease.ends_ms > self.desk.now_ms}
        self._given = {sha256: raw for sha256, raw in self._given.items() if sha256 in live}
        for sha256, raw in self._given.items():
            try:
                self._verified(raw)
            except errors.CovenantError:
                self.desk.withdraw(sha256)
        self._version = version

    def _verified(self, raw: bytes) -> leases.SignedLease:
        now_ms, state = self.desk.now_ms, self._operator.state
        return leases.verify(
            raw,
            state.trust_root(now_ms),
            role=self._role,
            now_ms=now_ms,
            greatest_time_ms=state.greatest_time_ms(),
        )


def of(
    decision: decide.Decision,
    run_id: str,
    operator: Operator,
    rows: RunEvents,
    operations: RunOperations,
    stack: contextlib.ExitStack,
) -> RunOfOperators | None:
    """Return the desk of a run, None where its policy asks about nothing.

    The desk's operations are added to those of the run. It closes with ``stack``.
    """
    manifest, network, skills = decision.manifest, decision.effective.network, decision.effective.skills
    inject = decision.effective.inject
    if not (network.asked or skills.asked or inject.asked):
        return None

    def holds(kind: str, target: str) -> bool:
        if kind == "tool":
            return targets.tool(target) in skills.asked
        if kind == "inject":
            return _is_asked(inject, target)
        with contextlib.suppress(errors.ManifestError):
            return kind == "network" and bool(network.to_asked(target))
        return False

    def lines(held: HeldRequest) -> tuple[str, ...]:
        if held.kind == "tool":
            return exported.tool(targets.tool(held.target) or "", held.side_effect)
        if held.kind == "inject":
            return exported.request(*(targets.requested(held.target) or ("", "", "")))
        return exported.network(held.target, network.to_asked(held.target).tls)

    book = LeaseBook(RunOfLeases(run_id, manifest.agent.id, decision.policy_digest), holds)
    attended = operator.config.ask_operators and not operator.is_dev
    desk = LeaseDesk(book, attended=attended, tell=_told(rows, operator), lines=lines)
    stack.callback(desk.close)
    run = RunOfOperators(desk, operator, manifest.agent.role)

    def approvals(request: Mapping[str, Any]) -> Reply:
        return Reply({
            "run": structs.asdict(book.run),
            "requests": [{**structs.asdict(one), "add": lines(one)} for one in book.open],
            "leases": [structs.asdict(one) for one in book.leases[-_SHOWN:]],
        })  # fmt: skip

    def grant(request: Mapping[str, Any]) -> Reply:
        return Reply({"lease": structs.asdict(run.grant(_text(request, "lease").encode()))})

    def deny(request: Mapping[str, Any]) -> Reply:
        held = desk.deny(_text(request, "request"), _text(request, "by"))
        return Reply({"denied": structs.asdict(held)})

    operations.table |= {"approvals": approvals, "grant": grant, "deny": deny}
    return run


def _told(rows: RunEvents, operator: Operator) -> Callable[[str, Mapping[str, Any]], None]:
    """Return what writes a row of the desk, and then tells the run's client what waits."""
    left = _TOLD

    def tell(kind: str, fields: Mapping[str, Any]) -> None:
        nonlocal left
        rows.approval(kind, fields)
        if kind == "approval_asked" and operator.asks is not None and left:
            left -= 1
            operator.asks(fields)

    return tell


def hold_tools(
    terms: service_gate.Terms | None, decision: decide.Decision, run: RunOfOperators | None
) -> service_gate.Terms | None:
    """Return the terms of a service gate whose tools are held for the operators of a run, where its policy asks."""
    skills = decision.effective.skills
    if terms is None or run is None or not skills.asked:
        return terms
    hold = questions.HoldTerms(run.desk, frozenset(skills.asked), decision.manifest.permissions.skills.ask_seconds)
    if terms.commands is not None:
        terms.commands.hold_by(hold)
    return terms if terms.tools is None else structs.replace(terms, tools=structs.replace(terms.tools, hold=hold))


def hold_requests(
    terms: inject_gate.InjectTerms | None, decision: decide.Decision, run: RunOfOperators | None
) -> inject_gate.InjectTerms | None:
    """Return the terms of a gate that adds secrets, which holds requests where the policy of the run asks."""
    if terms is None or run is None or not decision.effective.inject.asked:
        return terms
    seconds = {host: one.ask_seconds for _, host, one in decision.manifest.permissions.injected}
    return structs.replace(terms, hold=HeldRequestTerms(run.desk, lambda host: seconds.get(host, DEFAULT_ASK_SECONDS)))


def _is_asked(inject: InjectSet, target: str) -> bool:
    """Whether an operator is asked about a request: it is not granted, and one may be."""
    found = targets.requested(target)
    if found is None:
        return False
    method, host, path = found
    granted = any(one.takes(method, path) for one in inject.at(host))
    return not granted and any(one.takes(method, path) for one in inject.asked_at(host))


def rounds(run: RunOfOperators | None) -> tuple[PeriodicCheck, ...]:
    """Return the checks that end what is overdue, and leases whose keys are gone."""
    if run is None:
        return ()
    return PeriodicCheck(_LOOK_SECONDS, run.desk.tick), PeriodicCheck(_ROOT_SECONDS, run.look)


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise errors.UsageError(f"the request has no `{name}`")
    return value
