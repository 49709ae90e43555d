"""The desk of one run for what needs a lease: its book, and the operations `approvals`, `grant` and `deny` on the run.

The run's own process verifies each lease under the trust root that is in force, so that a revoked or expired operator
gives none. Only root reaches the operations (sandbox.shim.control_socket).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, structs

from policy import decide, errors
from policy.leases import exported
from policy.leases.book import LeaseBook, RunOfLeases
from policy.signing import lease as leases
from sandbox.audit.run_events import RunEvents
from sandbox.config import Config
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.run_io import PeriodicCheck
from sandbox.shim.control_socket import Reply
from sandbox.shim.operations import RunOperations
from sandbox.storage.trust_state import State

# Between two looks at what is overdue.
_LOOK_SECONDS: Final = 0.2
# The most leases in one answer, which has a bound (sandbox.shim.control_socket).
_SHOWN: Final = 100


class Operator(Struct, frozen=True):
    """The operators of a run: the configuration, and the state with the trust root. ``covenant dev`` has none."""

    config: Config
    state: State
    is_dev: bool


def of(
    decision: decide.Decision,
    run_id: str,
    operator: Operator,
    rows: RunEvents,
    operations: RunOperations,
    stack: contextlib.ExitStack,
) -> LeaseDesk | None:
    """Return the desk of a run, None where its policy asks about nothing.

    The desk's operations are added to those of the run. It closes with ``stack``.
    """
    manifest, network = decision.manifest, decision.effective.network
    if not network.asked:
        return None

    def holds(kind: str, target: str) -> bool:
        with contextlib.suppress(errors.ManifestError):
            return kind == "network" and bool(network.to_asked(target))
        return False

    def lines(kind: str, target: str) -> tuple[str, ...]:
        return exported.network(target, network.to_asked(target).tls) if kind == "network" else ()

    book = LeaseBook(RunOfLeases(run_id, manifest.agent.id, decision.policy_digest), holds)
    desk = LeaseDesk(
        book, attended=operator.config.ask_operators and not operator.is_dev, tell=rows.approval, lines=lines
    )
    stack.callback(desk.close)

    def approvals(request: Mapping[str, Any]) -> Reply:
        return Reply({
            "run": structs.asdict(book.run),
            "requests": [structs.asdict(one) for one in book.open],
            "leases": [structs.asdict(one) for one in book.leases[-_SHOWN:]],
        })  # fmt: skip

    def grant(request: Mapping[str, Any]) -> Reply:
        raw = _text(request, "lease")
        now_ms = desk.now_ms
        signed = leases.verify(
            raw.encode(),
            operator.state.trust_root(now_ms),
            role=manifest.agent.role,
            now_ms=now_ms,
            greatest_time_ms=operator.state.greatest_time_ms(),
        )
        return Reply({"lease": structs.asdict(desk.grant(signed))})

    def deny(request: Mapping[str, Any]) -> Reply:
        held = desk.deny(_text(request, "request"), _text(request, "by"))
        return Reply({"denied": structs.asdict(held)})

    operations.table |= {"approvals": approvals, "grant": grant, "deny": deny}
    return desk


def rounds(desk: LeaseDesk | None) -> tuple[PeriodicCheck, ...]:
    """Return the check that ends what is overdue."""
    return () if desk is None else (PeriodicCheck(_LOOK_SECONDS, desk.tick),)


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise errors.UsageError(f"the request has no `{name}`")
    return value
