"""The interfaces of the budget ledger and of the checkpoints.

An agent is identified by its public key alone; the display name is for people. Times are Unix milliseconds, and a
ledger's own never decrease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from covenant.wire import types
from policy.budget import Bucket

# The most debits that `recent` returns; older rows are in the file.
MOST_RECENT: Final = 10_000


@dataclass(frozen=True, slots=True)
class BudgetCompaction:
    """The result of a compaction: the number of dropped rows, and of agents whose bucket replaces them."""

    dropped: int
    snapshots: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Credits debited before a run that is not settled. ``submitter``: the peer that asked for the run, if known."""

    agent: types.AgentId
    credits: int
    paired_receipt: str
    at_ms: int
    submitter: types.AgentId | None = None


class BudgetLedger(Protocol):
    """Token buckets, one for each agent. A change is durable when its method returns."""

    async def set_capacity(self, agent: types.AgentId, per_hour: int) -> bool:
        """Set the capacity and the hourly refill of the agent's bucket. Returns True if that changed it.

        A new bucket is full. Setting the same capacity again, as at every start, changes and writes nothing.
        """
        ...

    async def try_debit(
        self,
        agent: types.AgentId,
        credits: int,  # noqa: A002
        paired_receipt: str,
        *,
        submitter: types.AgentId | None = None,
    ) -> types.BudgetDebit:
        """Reserve credits for a run, all or none. Concurrent requests never overdraw a bucket.

        A reservation of 0 takes nothing and needs no bucket: it records that a run exists until it is settled.

        Raises:
            errors.BudgetUnseededError: no capacity was set for the agent.
            errors.BudgetExhaustedError: the bucket has too few credits; ``details`` holds tokens_remaining and
                refill_eta_ms.
            errors.ReservationError: a reservation with this receipt is open.
            errors.StoreError: it could not be written; nothing was taken.
        """
        ...

    async def settle(self, agent: types.AgentId, paired_receipt: str, credits: int) -> types.BudgetDebit:  # noqa: A002
        """Close a reservation and debit the measured cost of its run beyond it (0: nothing). The balance may become
        negative.

        Raises:
            errors.ReservationError: no such reservation of this agent is open; each is settled once.
            errors.StoreError: it could not be written; the reservation is open.
        """
        ...

    async def refund(self, agent: types.AgentId, paired_receipt: str) -> int:
        """Refund the reservation of a run that never began. Returns the credits refunded.

        Raises:
            errors.ReservationError, errors.StoreError: as ``settle``.
        """
        ...

    async def recent(self, limit: int, *, of: str | None = None) -> Sequence[types.BudgetDebit]:
        """Return the newest debits first, of the newest ``MOST_RECENT``; debits of 0 and refunded ones are left out.

        ``of``: a public key; only debits of this agent, and of runs that this key submitted.
        """
        ...

    def tokens(self, agent: types.AgentId) -> int | None:
        """Return the credits that the agent can spend now; None without a bucket."""
        ...

    def buckets(self) -> Mapping[str, Bucket]:
        """Return every bucket by its agent's key, in its state after the last change: for
        ``policy.budget.verdicts``."""
        ...

    def unsettled(self) -> Sequence[Reservation]:
        """Return the open reservations; after a start, those of runs that the last daemon did not see end."""
        ...

    async def set_clock(self, now_ms: int) -> None:
        """Take times that are ahead of ``now_ms`` back to it, so that budgets refill again. Balances stay.

        Raises:
            errors.StoreError: it could not be written; the next start has the old times.
        """
        ...

    async def compact(self, before_ms: int) -> BudgetCompaction:
        """Replace the rows before ``before_ms`` by each bucket's state.

        Raises:
            errors.StoreError: it could not be written; the old rows are kept.
        """
        ...

    async def close(self) -> None:
        """Close the file."""
        ...


class Checkpoints(Protocol):
    """Paused intents that wait to be resumed: at most one active for an intent and agent, each used once."""

    async def save(self, checkpoint: types.BudgetPauseCheckpoint) -> None:
        """Store a checkpoint; it is durable when this returns. Saving an equal one again changes nothing.

        Raises:
            errors.CheckpointError: another is active for its intent and agent, or its ``resume_state`` holds an
                absolute path, which means nothing on another machine.
            errors.StoreError: it could not be written and is not stored.
        """
        ...

    async def claim(self, intent_id: str, agent: types.AgentId) -> types.BudgetPauseCheckpoint:
        """Take a checkpoint to resume from. No later claim gets it, not even after a crash.

        Raises:
            errors.NoCheckpointError: none is active for this intent and agent.
            errors.StoreError: it could not be written; the checkpoint is still active.
        """
        ...

    def active(self) -> Sequence[types.BudgetPauseCheckpoint]:
        """Return the active checkpoints, oldest first."""
        ...

    async def compact(self) -> int:
        """Drop claimed checkpoints. Returns the number of rows dropped.

        Raises:
            errors.StoreError: it could not be written; the old rows are kept.
        """
        ...

    async def close(self) -> None:
        """Close the file."""
        ...
