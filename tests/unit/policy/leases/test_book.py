"""The book of a run's requests: what is held, what is denied at once, and what a lease answers."""

from __future__ import annotations

from typing import Any

import pytest

from policy import errors
from policy.leases import book as books
from policy.leases.book import LeaseBook, RunOfLeases
from policy.signing.lease import LeaseStatement, SignedLease

RUN = RunOfLeases("0b5c", "hello", "1" * 64)
FIELDS: dict[str, Any] = {
    "agent_id": "hello", "run_id": "0b5c", "policy_digest": "1" * 64, "kind": "network", "target": "a.example.com",
    "duration": "run", "nonce": "0" * 32, "not_before": 0, "expires_at": 10_000,
}  # fmt: skip


def made() -> LeaseBook:
    return LeaseBook(RUN, lambda kind, target: target.endswith("example.com"))


def signed(**changes: Any) -> SignedLease:
    return SignedLease(LeaseStatement(**{**FIELDS, "request_id": f"{1:016x}", **changes}), ("op1",), "f" * 64)


def ask(book: LeaseBook, number: int = 1, target: str = "a.example.com", now_ms: int = 0) -> books.HeldRequest | None:
    return book.ask("network", target, f"{number:016x}", now_ms=now_ms, ends_ms=now_ms + 1000)


def test_same_target_is_one_request() -> None:
    book = made()
    assert ask(book) is ask(book, 2)
    assert len(book.open) == 1


def test_target_outside_policy_is_never_held() -> None:
    book = made()
    assert ask(book, target="evil.org") is None
    assert book.open == ()


def test_open_requests_are_bounded() -> None:
    book = made()
    held = [ask(book, n, f"{n}.example.com") for n in range(books.MAX_OPEN + 1)]
    assert held[-1] is None
    assert None not in held[:-1]


def test_requests_of_a_run_are_bounded() -> None:
    book = made()
    for number in range(books.MAX_REQUESTS):
        assert ask(book, number, f"{number}.example.com") is not None
        book.deny(f"{number:016x}", now_ms=0)
    assert ask(book, 5000, "last.example.com") is None


@pytest.mark.parametrize("late", [False, True])
def test_denied_target_is_quiet_for_a_while(late: bool) -> None:
    book = made()
    ask(book)
    if late:
        book.overdue(1000)
    else:
        book.deny(f"{1:016x}", now_ms=1000)
    assert ask(book, 2, now_ms=1000 + books.QUIET_MS - 1) is None
    assert ask(book, 3, now_ms=1000 + books.QUIET_MS) is not None


def test_request_is_answered_once() -> None:
    book = made()
    ask(book)
    lease = book.grant(signed(), now_ms=1)
    assert (lease.target, lease.signers, book.open) == ("a.example.com", ("op1",), ())
    for answer in (lambda: book.grant(signed(nonce="1" * 32), now_ms=2), lambda: book.deny(f"{1:016x}", now_ms=2)):
        with pytest.raises(errors.NoApprovalError):
            answer()


@pytest.mark.parametrize(
    ("changes", "now_ms", "said"),
    [
        ({"run_id": "0b5d"}, 1, "another run"),
        ({"agent_id": "other"}, 1, "another agent"),
        ({"policy_digest": "2" * 64}, 1, "another policy digest"),
        ({"target": "b.example.com"}, 1, "the request for network `a.example.com`"),
        ({}, 1000, "is over"),
        ({"expires_at": 500}, 500, "is over"),
        ({"not_before": 2}, 1, "is over"),
    ],
)
def test_lease_for_something_else_is_refused(changes: dict[str, Any], now_ms: int, said: str) -> None:
    book = made()
    ask(book)
    with pytest.raises(errors.LeaseError, match=said):
        book.grant(signed(**changes), now_ms=now_ms)
    book.grant(signed(), now_ms=1)  # nothing of it changed the book


def test_second_lease_for_one_use_counts_once_more() -> None:
    book = made()
    for number in (1, 2):
        ask(book, number, now_ms=number)
        changes = {"nonce": f"{number:032x}", "request_id": f"{number:016x}", "duration": "once"}
        book.grant(signed(**changes), now_ms=number)
        assert book.live("network", "a.example.com", 5) is not None
        assert book.use("network", "a.example.com") is not None
        assert book.live("network", "a.example.com", 5) is None
        assert book.use("network", "a.example.com") is None
        # The same again, also in the name of another open request.
        ask(book, 9, now_ms=number)
        for request in (number, 9):
            with pytest.raises(errors.LeaseError, match="given before"):
                book.grant(signed(**changes | {"request_id": f"{request:016x}"}), now_ms=number)
        book.deny(f"{9:016x}", now_ms=-books.QUIET_MS)
    # Both are to be ended, each at its time.
    assert [one.id for one in book.leases] == [f"{1:032x}", f"{2:032x}"]
    assert len(book.overdue(10_000)[1]) == 2
    assert book.leases == ()
