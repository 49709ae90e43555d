"""The desk of a run's leases: the order in which it writes, shows and applies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from policy import errors
from policy.leases import exported
from policy.leases.book import Lease, LeaseBook, RunOfLeases
from policy.signing.lease import LeaseStatement, SignedLease
from sandbox.network.gate.lease_desk import LeaseDesk

RUN = RunOfLeases("0b5c", "hello", "1" * 64)
HOST = "a.example.com"


class Steps:
    """A desk whose steps are kept in their order."""

    def __init__(self, *, attended: bool = True) -> None:
        self.steps: list[Any] = []
        self.now, self.full = 1.0, False
        book = LeaseBook(RUN, lambda kind, target: True)
        self.desk = LeaseDesk(book, attended=attended, tell=self.tell, clock=lambda: self.now)
        self.desk.shown_by(lambda leases: self.steps.append(("show", len(leases)))).attach(self)

    def tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self.full:
            raise errors.LedgerError("the disk is full")
        self.steps.append((kind, fields.get("code")))

    def begin(self, lease: Lease) -> None:
        self.steps.append(("begin", lease.target))

    def end(self, lease: Lease) -> None:
        self.steps.append(("end", lease.target))

    def ask(self, host: str = HOST) -> None:
        self.desk.ask("network", host, 5, lambda granted: self.steps.append(("answer", granted)))

    def lease(self, duration: Any = "until", ends_ms: int = 9_000) -> SignedLease:
        (held,) = self.desk.book.open
        statement = LeaseStatement(
            agent_id="hello", run_id="0b5c", policy_digest="1" * 64, request_id=held.id, kind="network",
            target=held.target, duration=duration, nonce="0" * 32, not_before=0, expires_at=ends_ms,
        )  # fmt: skip
        return SignedLease(statement, ("op1",), "f" * 64)


def test_grant_is_written_then_shown_then_applied() -> None:
    run = Steps()
    run.ask()
    run.desk.grant(run.lease())
    run.ask()
    asked, granted = ("approval_asked", None), ("approval_granted", None)
    assert run.steps == [asked, granted, ("show", 1), ("begin", HOST), ("answer", True), ("answer", True)]
    run.steps.clear()
    run.now = 9.0
    run.desk.tick()
    assert run.steps == [("end", HOST), ("show", 0), ("lease_ended", "expired")]
    assert run.desk.seconds("network", HOST) is None


@pytest.mark.parametrize("duration", ["until", "once"])
def test_lease_without_its_key_is_taken_out(duration: str) -> None:
    """Also one that was spent: what it opened ends."""
    run = Steps()
    run.ask()
    run.desk.grant(run.lease(duration))
    run.desk.used("network", HOST)
    run.steps.clear()
    run.desk.withdraw("f" * 64)
    run.desk.withdraw("f" * 64)
    assert run.steps == [("end", HOST), ("show", 0), ("lease_ended", "revoked")]
    assert run.desk.seconds("network", HOST) is None


def test_grant_that_cannot_be_written_is_none() -> None:
    run = Steps()
    run.ask()
    lease, run.full = run.lease(), True
    with pytest.raises(errors.LedgerError):
        run.desk.grant(lease)
    assert run.steps == [("approval_asked", None)]
    assert run.desk.seconds("network", HOST) is None


def test_one_use_ends_lease_for_new_uses() -> None:
    run = Steps()
    run.ask()
    run.desk.grant(run.lease("once"))
    run.desk.used("network", HOST)
    assert run.desk.seconds("network", HOST) is None
    run.steps.clear()
    run.desk.used("network", HOST)
    run.now = 9.0
    run.desk.tick()
    assert run.steps == [("end", HOST), ("show", 0)]


def test_request_ends_denied_by_word_time_or_run() -> None:
    run = Steps()
    run.ask()
    run.desk.deny(run.desk.book.open[0].id, "ann")
    run.ask("b.example.com")
    run.now = 6.0
    run.desk.tick()
    run.ask("c.example.com")
    run.desk.close()
    answers = [step for step in run.steps if step[0] in ("approval_denied", "answer")]
    assert answers == [
        ("answer", False), ("approval_denied", "denied"), ("answer", False), ("approval_denied", "expired"),
        ("answer", False), ("approval_denied", "left"),
    ]  # fmt: skip


def test_without_operator_denial_is_at_once() -> None:
    run = Steps(attended=False)
    run.ask()
    assert run.steps == [("answer", False)]


def test_exported_lines_are_of_one_run_and_once() -> None:
    add = exported.network(HOST, ((443, 443), (8000, 8010)))
    assert add[2] == 'ports = [443, "8000-8010"]'
    rows = [{"type": "approval_granted", "run_id": run, "add": list(add)} for run in ("0b5c", "0b5c", "1111")]
    assert [lines for _, lines in exported.of_rows([*rows, {"type": "denied", "run_id": "0b5c"}], "0b")] == [add]
