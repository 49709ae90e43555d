"""Hold requests of a run's gates for an operator, and apply leases to the gates (policy.leases).

    a gate asks  ──▶  held, and in the log  ──▶  granted: in the log, then in every gate, then the gate is answered
                                            ──▶  denied, or its time is over: in the log, and the gate is answered
    a lease ends ──▶  taken out of every gate, which closes what it opened, and then in the log
    its key goes ──▶  the same, also where it was spent

Everything runs in the run's own loop. Without an operator (``attended``) each request is denied at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from msgspec import structs

from policy.leases.book import HeldRequest, Lease, LeaseBook
from policy.signing.lease import Kind, SignedLease

# The most parts of a gate that wait for one request: some questions about a name.
_WAITING: Final = 32
Then = Callable[[bool], None]


class LeasedGate(Protocol):
    """A gate that a lease opens. Neither call waits."""

    def begin(self, lease: Lease) -> None:
        """Let the target of a lease pass from now on."""

    def end(self, lease: Lease) -> None:
        """Let it pass no more, and end what it opened: this lease, and no later one for the same target.

        ``lease.spent``: what it opened may go on.
        """


class LeaseDesk:
    """The desk of one run. ``tell`` writes a durable row, ``lines`` are those of agent.toml that grant a request."""

    def __init__(
        self,
        book: LeaseBook,
        *,
        attended: bool,
        tell: Callable[[str, Mapping[str, Any]], None],
        lines: Callable[[HeldRequest], Sequence[str]] = lambda held: (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.book = book
        self._show: Callable[[Sequence[Lease]], None] = lambda leases: None
        self._attended, self._tell, self._lines = attended, tell, lines
        self._clock = clock or _forwards()
        self._gates: list[LeasedGate] = []
        self._waiting: dict[str, list[Then]] = {}

    def shown_by(self, show: Callable[[Sequence[Lease]], None]) -> LeaseDesk:
        """Show the leases to attestation by this, before one begins and after one has ended. Returns the desk."""
        self._show = show
        return self

    def attach(self, gate: LeasedGate) -> None:
        """Apply leases to this gate from now on."""
        self._gates.append(gate)

    @property
    def now_ms(self) -> int:
        """The time of the leases."""
        return int(self._clock() * 1000)

    def live(self, kind: Kind, target: str) -> Lease | None:
        """Return the lease under which a new use of a target may begin."""
        return self.book.live(kind, target, self.now_ms)

    def seconds(self, kind: Kind, target: str) -> float | None:
        """Return how long a new use of a target may still begin. None without a live lease."""
        found = self.live(kind, target)
        return None if found is None else (found.ends_ms - self.now_ms) / 1000

    def ask(
        self, kind: Kind, target: str, seconds: int, then: Then, *, side_effect: str = "", arguments: str = ""
    ) -> None:
        """Call ``then`` with whether a use may begin: at once, or when an operator has answered.

        ``side_effect`` and ``arguments`` say more of a call to the operator (policy.leases.book.HeldRequest).

        Raises:
            errors.LedgerError: the row cannot be written.
        """
        if self.seconds(kind, target) is not None:
            then(True)
            return
        if not self._attended:
            then(False)
            return
        now_ms = self.now_ms
        held = self.book.ask(
            kind,
            target,
            os.urandom(8).hex(),
            now_ms=now_ms,
            ends_ms=now_ms + seconds * 1000,
            side_effect=side_effect,
            arguments=arguments,
        )
        if held is None:
            then(False)
            return
        waiting = self._waiting.get(held.id)
        if waiting is None:
            waiting = self._waiting[held.id] = []
            self._tell("approval_asked", {**_about(held), "seconds": seconds})
        if len(waiting) >= _WAITING:
            then(False)
            return
        waiting.append(then)

    def grant(self, signed: SignedLease) -> Lease:
        """Apply a verified lease, and answer what waits for it.

        Raises:
            errors.NoApprovalError, errors.LeaseError: it answers no open request (policy.leases.book).
            errors.LedgerError: the row cannot be written. Nothing was granted.
        """
        statement, now_ms = signed.statement, self.now_ms
        held = self.book.check(signed, now_ms=now_ms)
        self._tell(
            "approval_granted",
            {
                **_about(held),
                "target": statement.target,
                "duration": statement.duration,
                "expires_ms": statement.expires_at,
                "signers": list(signed.signers),
                "lease": signed.sha256,
                "add": list(self._lines(held)),
            },
        )
        lease = self.book.grant(signed, now_ms=now_ms)
        self._show(self.book.leases)
        for gate in self._gates:
            gate.begin(lease)
        self._answer(held, granted=True)
        return lease

    def deny(self, request_id: str, by: str) -> HeldRequest:
        """Deny a request.

        Raises:
            errors.NoApprovalError: no such request waits.
        """
        held = self.book.deny(request_id, now_ms=self.now_ms)
        self._denied(held, "denied", by)
        return held

    def used(self, kind: Kind, target: str) -> None:
        """Count a use of a target. The lease for one use opens nothing more."""
        spent = self.book.use(kind, target)
        if spent is not None:
            self._ended(spent, "used")

    def withdraw(self, sha256: str) -> None:
        """End a lease whose signers no longer count, with what it opened. ``sha256`` is that of its statement.

        Raises:
            errors.KernelError: a gate does not take it.
            errors.LedgerError: the row cannot be written.
        """
        lease = self.book.withdraw(sha256)
        if lease is not None:
            self._ended(structs.replace(lease, spent=False), "revoked")

    def tick(self) -> None:
        """End what is overdue. Called several times a second."""
        late, ended = self.book.overdue(self.now_ms)
        for lease in ended:
            self._ended(lease, "expired")
        for held in late:
            self._denied(held, "expired", None)

    def close(self) -> None:
        """Deny what still waits at the end of the run."""
        for held in self.book.open:
            self.book.deny(held.id, now_ms=self.now_ms)
            self._denied(held, "left", None)

    def _ended(self, lease: Lease, code: str) -> None:
        for gate in self._gates:
            gate.end(lease)
        self._show(self.book.leases)
        if not (lease.spent and code == "expired"):  # its end was written when it was used
            fields = {"asks": lease.kind, "target": lease.target, "code": code, "lease": lease.sha256}
            self._tell("lease_ended", fields)

    def _denied(self, held: HeldRequest, code: str, by: str | None) -> None:
        self._answer(held, granted=False)
        self._tell("approval_denied", {**_about(held), "code": code, "by": by})

    def _answer(self, held: HeldRequest, *, granted: bool) -> None:
        for then in self._waiting.pop(held.id, ()):
            then(granted)


def _forwards() -> Callable[[], float]:
    """Return a clock of the wall that is never set back: no lease lives longer for that."""
    wall, since = time.time(), time.monotonic()
    return lambda: max(time.time(), wall + time.monotonic() - since)


def _about(held: HeldRequest) -> dict[str, Any]:
    return {"request": held.id, "asks": held.kind, "target": held.target}
