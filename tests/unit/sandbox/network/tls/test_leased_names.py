"""Leases at the TLS gate, over its real line: a second lease for a name, replays of the first, and their ends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from policy import errors
from policy.leases.book import LeaseBook, RunOfLeases
from policy.signing.lease import Duration, LeaseStatement, SignedLease
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.tls.leased_names import LeasedNames
from sandbox.network.tls.leases import LeaseLine

HOST = "a.example.com"
RUN = RunOfLeases("0b5c", "hello", "1" * 64)


class Both:
    """A desk with the supervisor's end of a TLS gate's line, and the gate's end."""

    def __init__(self) -> None:
        self.now = 1.0
        self.rows: list[tuple[str, object]] = []
        book = LeaseBook(RUN, lambda kind, target: True)
        self.desk = LeaseDesk(
            book,
            attended=True,
            tell=lambda kind, row: self.rows.append((kind, row.get("code"))),
            clock=lambda: self.now,
        )
        self.line = LeaseLine(self.desk)
        self.gate = socket.socket(fileno=socket.dup(self.line.gate_end))
        self.names = LeasedNames(self.gate)
        self.line.started()

    def signed(self, nonce: int, duration: Duration = "once", ends_ms: int = 9_000) -> SignedLease:
        """Ask, and sign a lease for what is asked."""
        self.desk.ask("network", HOST, 60, lambda granted: None)
        (held,) = self.desk.book.open
        statement = LeaseStatement(
            agent_id="hello", run_id="0b5c", policy_digest="1" * 64, request_id=held.id, kind="network", target=HOST,
            duration=duration, nonce=f"{nonce:032x}", not_before=0, expires_at=ends_ms,
        )  # fmt: skip
        return SignedLease(statement, ("op1",), f"{nonce:064x}")

    def used(self) -> int:
        """Make the one connection. Returns the number of its lease at the gate."""
        assert self.names.live(HOST)
        number, only = self.names.take(HOST)
        assert only
        assert not self.names.live(HOST)
        self.names.used(HOST)
        assert self.line.serve() is None
        return number

    def ended(self) -> list[int]:
        """Return the leases whose connections the gate ends."""
        self.names.read()
        return self.names.ended()


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    with contextlib.closing(made.line), made.gate:
        yield made


def test_second_lease_lets_one_more_connection_pass(both: Both) -> None:
    first = both.signed(1)
    both.desk.grant(first)
    both.used()
    with pytest.raises(errors.LeaseError, match="given before"):
        both.desk.grant(first)
    second = both.signed(2)
    # A replay of the first answers the second request no more than the first.
    with pytest.raises(errors.LeaseError, match="given before"):
        both.desk.grant(first)
    both.desk.grant(second)
    both.used()
    assert not both.names.live(HOST)
    with pytest.raises(errors.LeaseError, match="given before"):
        both.desk.grant(second)
    assert both.ended() == []


@pytest.mark.parametrize("how", ["expired", "revoked"])
def test_end_of_first_lease_ends_what_it_opened_alone(both: Both, how: str) -> None:
    """Neither goes its connection on until the second ends, nor ends the second with it."""
    both.desk.grant(both.signed(1, ends_ms=5_000))
    first = both.used()
    both.desk.grant(both.signed(2, ends_ms=9_000))
    if how == "expired":
        both.now = 5.0
        both.desk.tick()
    else:
        both.desk.withdraw(f"{1:064x}")
    assert both.ended() == [first]
    assert [one.sha256 for one in both.desk.book.leases] == [f"{2:064x}"]
    second = both.used()
    assert second != first
    both.now = 9.0
    both.desk.tick()
    assert both.ended() == [second]
    assert [one.sha256 for one in both.desk.book.leases] == []


def test_end_of_second_lease_leaves_what_first_opened(both: Both) -> None:
    both.desk.grant(both.signed(1, ends_ms=9_000))
    first = both.used()
    both.desk.grant(both.signed(2, "until", ends_ms=5_000))
    assert both.names.live(HOST)
    second, only = both.names.take(HOST)
    assert not only
    both.now = 5.0
    both.desk.tick()
    assert both.ended() == [second]
    assert not both.names.live(HOST)
    both.now = 9.0
    both.desk.tick()
    assert both.ended() == [first]


def test_place_of_an_ended_lease_is_not_given_back(both: Both) -> None:
    """The connection waits for its server when the lease ends."""
    both.desk.grant(both.signed(1))
    assert both.names.live(HOST)
    number, _ = both.names.take(HOST)
    both.names.give_back(HOST, number)
    assert both.names.live(HOST)
    assert both.names.take(HOST) == (number, True)
    both.now = 9.0
    both.desk.tick()
    assert both.ended() == [number]
    both.names.give_back(HOST, number)
    assert not both.names.live(HOST)


def test_connection_that_met_no_lease_is_ended(both: Both) -> None:
    both.desk.grant(both.signed(1))
    assert both.names.live(HOST)
    both.now = 9.0
    both.desk.tick()
    both.names.read()
    number, _ = both.names.take(HOST)
    assert number in both.ended()
