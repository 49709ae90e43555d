"""The budget ledger and the checkpoints, as the rest of the daemon knows them.

Agents are told apart by their public key alone; the display name is for people. Times are Unix milliseconds, and a
ledger's own never goes backwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from covenant.wire import types
from policy.budget import Bucket

# What `recent` can reach back to; older rows are in the file.
MOST_RECENT: Final = 10_000


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did: rows that went, and agents whose bucket stands in their place."""

    dropped: int
    snapshots: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What was taken before a run that is not settled. ``submitter``: who asked for the run, where that was said."""

    agent: types.AgentId
    credits: int
    paired_receipt: str
    at_ms: int
    submitter: types.AgentId | None = None


class BudgetLedger(Protocol):
    """Token buckets, one an agent. What a method returned for is durable."""

    async def set_capacity(self, agent: types.AgentId, per_hour: int) -> bool:
        """Have the agent's bucket hold and regain ``per_hour`` credits; whether that changed anything.

        A new bucket is full. The same capacity again, as at every start, changes and writes nothing.
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
        """Reserve credits for a run, at once or not at all: however many ask together, no bucket is overdrawn.

        A reservation of 0 takes nothing and needs no bucket: it says that there is a run, until it is settled.

        Raises:
            errors.BudgetUnseededError: no capacity was set for the agent.
            errors.BudgetExhaustedError: it has not enough; ``details`` holds tokens_remaining and refill_eta_ms.
            errors.ReservationError: a reservation with this receipt is open.
            errors.StoreError: it could not be written; nothing was taken.
        """
        ...

    async def settle(self, agent: types.AgentId, paired_receipt: str, credits: int) -> types.BudgetDebit:  # noqa: A002
        """Take what a run measurably cost beyond its reservation (0: nothing) and close that; may leave a debt.

        Raises:
            errors.ReservationError: no such reservation of this agent is open; each is settled once.
            errors.StoreError: it could not be written; the reservation is open.
        """
        ...

    async def refund(self, agent: types.AgentId, paired_receipt: str) -> int:
        """Give a reservation back whose run never began; how many credits that were.

        Raises:
            errors.ReservationError, errors.StoreError: as ``settle``.
        """
        ...

    async def recent(self, limit: int, *, of: str | None = None) -> Sequence[types.BudgetDebit]:
        """The newest debits first, of the newest ``MOST_RECENT``; rests of 0 are left out.

        ``of``: only those of the agent with this public key, and those for runs that whoever has it asked for.
        """
        ...

    def tokens(self, agent: types.AgentId) -> int | None:
        """What the agent can spend now; None without a bucket."""
        ...

    def buckets(self) -> Mapping[str, Bucket]:
        """Every bucket by its agent's key, as it was last touched: for ``policy.budget.verdicts``."""
        ...

    def unsettled(self) -> Sequence[Reservation]:
        """The reservations that are not settled: after a start, of runs that the last daemon did not see end."""
        ...

    async def compact(self, before_ms: int) -> Compacted:
        """Put each bucket as it was in the place of the rows before ``before_ms``.

        Raises:
            errors.StoreError: it could not be written; the old rows are there.
        """
        ...

    async def close(self) -> None:
        """Let go of the file."""
        ...


class Checkpoints(Protocol):
    """Intents that wait to be resumed: at most one active for an intent and agent, and each is used once."""

    async def save(self, checkpoint: types.BudgetPauseCheckpoint) -> None:
        """Keep a checkpoint. Saving the same one again changes nothing, and returns when it is kept.

        Raises:
            errors.CheckpointError: another is active for its intent and agent, or its ``resume_state`` holds an
                absolute path, which means nothing elsewhere.
            errors.StoreError: it could not be written and is not kept.
        """
        ...

    async def claim(self, intent_id: str, agent: types.AgentId) -> types.BudgetPauseCheckpoint:
        """Take a checkpoint to resume from; nobody else gets it after that, not even after a crash.

        Raises:
            errors.NoCheckpointError: none is active for this intent and agent.
            errors.StoreError: it could not be written; the checkpoint is still active.
        """
        ...

    def active(self) -> Sequence[types.BudgetPauseCheckpoint]:
        """Those that wait, the oldest first."""
        ...

    async def compact(self) -> int:
        """Drop what was claimed; how many rows went.

        Raises:
            errors.StoreError: it could not be written; the old rows are there.
        """
        ...

    async def close(self) -> None:
        """Let go of the file."""
        ...
