"""The requests of one run that an operator is asked about, and the leases that were given: pure, by the caller's clock.

A request is for one target, such as a host name or one call of a tool, and is answered once. A lease answers exactly
the request that it names: of this run, under this policy, for the same target, while the request is open. For a call,
an operator may name the whole tool instead, for the run or for a time. Its nonce counts once. What it
grants lies within the policy of the run, which lies within its role and its parent: the policy has every target that
may be asked about (``policy.grants.network``, ``asked``). Times are Unix milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct, structs

from policy import errors
from policy.leases import targets
from policy.signing.lease import Duration, Kind, SignedLease

# The most open requests of one run, and the most requests of its life: an agent must not tire its operator.
MAX_OPEN: Final = 16
MAX_REQUESTS: Final = 1000
# A target that was denied, or that no operator answered for, is denied at once for so long.
QUIET_MS: Final = 60_000
_HINT: Final = "covenant approvals list shows what waits"


class RunOfLeases(Struct, frozen=True):
    """The run that a book is of."""

    run_id: str
    agent_id: str
    policy_digest: str


class HeldRequest(Struct, frozen=True):
    """A request that waits for an operator until ``ends_ms``.

    Of a call, ``side_effect`` is the class of its tool, and ``arguments`` a bounded view of them, without hidden
    characters. The view is for the operator's eyes and is in no log.
    """

    id: str
    kind: Kind
    target: str
    asked_ms: int
    ends_ms: int
    side_effect: str = ""
    arguments: str = ""


class Lease(Struct, frozen=True):
    """A lease that was given. ``spent`` says that its one use is over; what it opened may go on until ``ends_ms``."""

    id: str
    request_id: str
    kind: Kind
    target: str
    duration: Duration
    ends_ms: int
    signers: tuple[str, ...]
    sha256: str
    spent: bool = False


class LeaseBook:
    """The book of one run. ``holds`` says whether the policy lets a target of a kind be asked about at all."""

    def __init__(self, run: RunOfLeases, holds: Callable[[str, str], bool]) -> None:
        self.run = run
        self._holds = holds
        self._open: dict[str, HeldRequest] = {}
        self._leases: dict[tuple[str, str], Lease] = {}
        # Leases with a later one for their target: what they opened goes on, and they begin nothing.
        self._past: list[Lease] = []
        self._nonces: set[str] = set()
        self._quiet: dict[tuple[str, str], int] = {}
        self._count = 0

    @property
    def open(self) -> tuple[HeldRequest, ...]:
        """The requests that wait, in their order."""
        return tuple(self._open.values())

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases that have not ended."""
        return (*self._past, *self._leases.values())

    def live(self, kind: str, target: str, now_ms: int) -> Lease | None:
        """Return the lease under which a new use of a target may begin. None without one."""
        some = (self._leases.get((kind, one)) for one in targets.covering(kind, target))
        return next((one for one in some if one is not None and not one.spent and now_ms < one.ends_ms), None)

    def ask(
        self,
        kind: Kind,
        target: str,
        request_id: str,
        *,
        now_ms: int,
        ends_ms: int,
        side_effect: str = "",
        arguments: str = "",
    ) -> HeldRequest | None:
        """Open a request, or return the one that waits for the same target. None: it is denied at once."""
        for one in self._open.values():
            if (one.kind, one.target) == (kind, target):
                return one
        if not self._holds(kind, target) or self._quiet.get((kind, target), 0) > now_ms:
            return None
        if len(self._open) >= MAX_OPEN or self._count >= MAX_REQUESTS:
            return None
        self._count += 1
        made = HeldRequest(request_id, kind, target, now_ms, ends_ms, side_effect, arguments)
        self._open[request_id] = made
        return made

    def deny(self, request_id: str, *, now_ms: int) -> HeldRequest:
        """Close a request. The same target is denied at once for a while.

        Raises:
            errors.NoApprovalError: no such request waits.
        """
        held = self._open.pop(request_id, None)
        if held is None:
            raise errors.NoApprovalError(f"no request `{request_id[:64]}` waits", hint=_HINT)
        self._quiet[held.kind, held.target] = now_ms + QUIET_MS
        return held

    def check(self, signed: SignedLease, *, now_ms: int) -> HeldRequest:
        """Return the request that a verified lease answers; nothing changes.

        Raises:
            errors.NoApprovalError: no such request waits.
            errors.LeaseError: it is a lease for something else, or for the second time.
        """
        statement, run = signed.statement, self.run
        for what, here, there in (
            ("run", run.run_id, statement.run_id),
            ("agent", run.agent_id, statement.agent_id),
            ("policy digest", run.policy_digest, statement.policy_digest),
        ):
            if here != there:
                raise errors.LeaseError(f"the lease is for another {what}: {there}, and not {here}", hint=_HINT)
        if statement.nonce in self._nonces:
            raise errors.LeaseError("the lease was given before", hint="covenant approvals grant makes a new one")
        held = self._open.get(statement.request_id)
        if held is None:
            raise errors.NoApprovalError(f"no request `{statement.request_id}` waits", hint=_HINT)
        # INVARIANT: a lease for one use is for the very call that was asked about.
        wide = () if statement.duration == "once" else targets.covering(held.kind, held.target)
        if held.kind != statement.kind or statement.target not in (held.target, *wide):
            raise errors.LeaseError(
                f"the lease is for {statement.kind} `{statement.target}`, and the request for {held.kind} "
                f"`{held.target}`",
                hint=_HINT,
            )
        if not statement.not_before <= now_ms < min(held.ends_ms, statement.expires_at):
            raise errors.LeaseError("the request or the lease is over", hint=_HINT)
        if not self._holds(held.kind, held.target):
            raise errors.LeaseError(f"the policy of the run has no `{held.target}` to grant", hint=_HINT)
        return held

    def grant(self, signed: SignedLease, *, now_ms: int) -> Lease:
        """Close the request with a verified lease.

        Raises:
            errors.NoApprovalError, errors.LeaseError: as ``check``.
        """
        held, statement = self.check(signed, now_ms=now_ms), signed.statement
        self._nonces.add(statement.nonce)
        del self._open[held.id]
        made = Lease(
            statement.nonce,
            held.id,
            held.kind,
            statement.target,
            statement.duration,
            statement.expires_at,
            signed.signers,
            signed.sha256,
        )
        if (before := self._leases.get((held.kind, statement.target))) is not None:
            self._past.append(before)
        self._leases[held.kind, statement.target] = made
        return made

    def use(self, kind: str, target: str) -> Lease | None:
        """Count a use. Return the lease that it has spent, None for one that goes on."""
        found = self._leases.get((kind, target))  # one use is always of this very target
        if found is None or found.duration != "once" or found.spent:
            return None
        spent = self._leases[kind, target] = structs.replace(found, spent=True)
        return spent

    def withdraw(self, sha256: str) -> Lease | None:
        """Take a lease out before its end, by the digest of its statement. None: it has ended."""
        found = next((one for one in self.leases if one.sha256 == sha256), None)
        if found is not None:
            self._remove(found)
        return found

    def overdue(self, now_ms: int) -> tuple[tuple[HeldRequest, ...], tuple[Lease, ...]]:
        """Close the requests whose time is over, and the leases. Return both."""
        late = tuple(one for one in self._open.values() if one.ends_ms <= now_ms)
        for one in late:
            self.deny(one.id, now_ms=now_ms)
        ended = tuple(one for one in self.leases if one.ends_ms <= now_ms)
        for lease in ended:
            self._remove(lease)
        return late, ended

    def _remove(self, lease: Lease) -> None:
        if self._leases.get((lease.kind, lease.target)) is lease:
            del self._leases[lease.kind, lease.target]
        else:
            self._past.remove(lease)
