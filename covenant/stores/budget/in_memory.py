"""The ledger and the checkpoints without a file: for tests, and as the base of the durable ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, Final

import anyio
import anyio.lowlevel

from covenant.stores.budget import interface, rows, state
from covenant.wire import types
from policy import budget, errors

# The text of a request is not checked for paths: it may begin like one.
_TEXTS: Final = frozenset({"intent_text"})
_MOST_DEPTH: Final = 32


class _Underway:
    """Keys with a decision that is not written yet. A second request for a key waits: the decision may be undone."""

    def __init__(self) -> None:
        self._writing: dict[Hashable, anyio.Event] = {}

    @contextlib.contextmanager
    def of(self, key: Hashable) -> Iterator[None]:
        """Mark ``key`` as being written, after ``wait_for`` returned for it."""
        done = self._writing[key] = anyio.Event()
        try:
            yield
        finally:
            del self._writing[key]
            done.set()

    async def wait_for(self, key: Hashable) -> None:
        """Wait until no write of ``key`` is underway. No other task has taken the key when this returns."""
        while key in self._writing:
            await self._writing[key].wait()


class InMemoryBudgetLedger:
    """``interface.BudgetLedger`` in memory.

    A method decides and changes the buckets before its first await, so that no other task runs in between. Then it
    waits until its row is stored, and undoes the change if that fails.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._clock = now_ms
        self._state = state.LedgerState()
        self._underway = _Underway()

    async def set_capacity(self, agent: types.AgentId, per_hour: int) -> bool:
        """As ``interface.BudgetLedger.set_capacity``."""
        await self._underway.wait_for(agent.pubkey)
        before = self._state.buckets.get(agent.pubkey)
        if before is not None and before.capacity == per_hour:
            return False
        row = rows.CapacitySet(agent=agent, capacity=per_hour, at_ms=self._now())
        self._state.apply(row)
        after = self._state.buckets[agent.pubkey]
        try:
            with self._underway.of(agent.pubkey):
                await self._keep(row)
        except errors.StoreError:
            if before is None:
                del self._state.buckets[agent.pubkey]
            else:
                cut = budget.refill(before, row.at_ms).balance - after.balance
                now = budget.set_capacity(self._state.buckets[agent.pubkey], before.capacity, row.at_ms)
                self._state.buckets[agent.pubkey] = budget.give_back(now, cut, row.at_ms)
            raise
        return True

    async def try_debit(
        self,
        agent: types.AgentId,
        credits: int,  # noqa: A002
        paired_receipt: str,
        *,
        submitter: types.AgentId | None = None,
    ) -> types.BudgetDebit:
        """As ``interface.BudgetLedger.try_debit``."""
        await self._underway.wait_for(agent.pubkey)
        bucket = self._state.buckets.get(agent.pubkey)
        if bucket is None and credits:
            raise errors.BudgetUnseededError(f"no capacity was set for `{agent.display}`")
        if paired_receipt in self._state.open:
            raise errors.ReservationError(f"a reservation with receipt `{paired_receipt}` is open")
        now = self._now()
        after = budget.debit(bucket, credits, now) if bucket is not None and credits else None
        if isinstance(after, budget.Exhausted):
            raise _exhausted(agent, credits, after, now)
        row = rows.Debit(
            agent=agent,
            credits=credits,
            paired_receipt=paired_receipt,
            at_ms=now,
            reserved=True,
            submitter=submitter,
        )
        self._state.apply(row)
        try:
            await self._keep(row)
        except errors.StoreError:
            self._state.undo(row)
            raise
        return _debit(row)

    async def settle(self, agent: types.AgentId, paired_receipt: str, credits: int) -> types.BudgetDebit:  # noqa: A002
        """As ``interface.BudgetLedger.settle``."""
        reservation = self._reservation(agent, paired_receipt)
        row = rows.Debit(
            agent=agent,
            credits=credits,
            paired_receipt=paired_receipt,
            at_ms=self._now(),
            settles=True,
            submitter=reservation.submitter,
        )
        self._state.apply(row)
        try:
            await self._keep(row)
        except errors.StoreError:
            self._state.undo(row, reservation)
            raise
        return _debit(row)

    async def refund(self, agent: types.AgentId, paired_receipt: str) -> int:
        """As ``interface.BudgetLedger.refund``."""
        reservation = self._reservation(agent, paired_receipt)
        row = rows.Refund(agent=agent, credits=reservation.credits, paired_receipt=paired_receipt, at_ms=self._now())
        self._state.apply(row)
        try:
            await self._keep(row)
        except errors.StoreError:
            self._state.undo(row, reservation)
            raise
        return row.credits

    async def recent(self, limit: int, *, of: str | None = None) -> Sequence[types.BudgetDebit]:
        """As ``interface.BudgetLedger.recent``."""
        newest = (row for row in reversed(self._state.debits) if of is None or of in _whose(row))
        return tuple(_debit(row) for row, _ in zip(newest, range(max(0, limit)), strict=False))

    def tokens(self, agent: types.AgentId) -> int | None:
        """As ``interface.BudgetLedger.tokens``."""
        bucket = self._state.buckets.get(agent.pubkey)
        return None if bucket is None else budget.refill(bucket, self._now()).tokens

    def buckets(self) -> Mapping[str, budget.Bucket]:
        """As ``interface.BudgetLedger.buckets``."""
        return MappingProxyType(self._state.buckets)

    def unsettled(self) -> Sequence[interface.Reservation]:
        """As ``interface.BudgetLedger.unsettled``."""
        return tuple(
            interface.Reservation(row.agent, row.credits, row.paired_receipt, row.at_ms, row.submitter)
            for row in self._state.open.values()
        )

    async def set_clock(self, now_ms: int) -> None:
        """As ``interface.BudgetLedger.set_clock``."""
        await anyio.lowlevel.checkpoint()
        self._state.set_clock(now_ms)

    async def compact(self, before_ms: int) -> interface.BudgetCompaction:
        """As ``interface.BudgetLedger.compact``. Drops only debits: this ledger has no other rows."""
        await anyio.lowlevel.checkpoint()
        kept = [row for row in self._state.debits if row.at_ms >= before_ms]
        dropped = len(self._state.debits) - len(kept)
        self._state.debits.clear()
        self._state.debits.extend(kept)
        return interface.BudgetCompaction(dropped, len(self._state.buckets))

    async def close(self) -> None:
        """As ``interface.BudgetLedger.close``."""

    async def _keep(self, row: rows.LedgerRow) -> None:
        await anyio.lowlevel.checkpoint()

    def _now(self) -> int:
        """Return the time, never earlier than the latest row: after the clock was set back, no interval is refilled
        twice."""
        return max(self._state.latest_ms, self._clock())

    def _reservation(self, agent: types.AgentId, paired_receipt: str) -> rows.Debit:
        found = self._state.open.get(paired_receipt)
        if found is None or found.agent.pubkey != agent.pubkey:
            raise errors.ReservationError(
                f"no reservation of `{agent.display}` with receipt `{paired_receipt}` is open"
            )
        return found


class InMemoryCheckpoints:
    """``interface.Checkpoints`` in memory."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._clock = now_ms
        self._active: dict[tuple[str, str], types.BudgetPauseCheckpoint] = {}
        self._underway = _Underway()

    async def save(self, checkpoint: types.BudgetPauseCheckpoint) -> None:
        """As ``interface.Checkpoints.save``."""
        key = (checkpoint.intent_id, checkpoint.agent.pubkey)
        await self._underway.wait_for(key)
        found = self._active.get(key)
        if found == checkpoint:
            await anyio.lowlevel.checkpoint()
            return
        if found is not None:
            raise errors.CheckpointError(f"intent `{checkpoint.intent_id}` waits already")
        _refuse_paths(checkpoint.resume_state)
        self._active[key] = checkpoint
        try:
            with self._underway.of(key):
                await self._keep(rows.PauseSaved(checkpoint=checkpoint))
        except errors.StoreError:
            self._active.pop(key, None)
            raise

    async def claim(self, intent_id: str, agent: types.AgentId) -> types.BudgetPauseCheckpoint:
        """As ``interface.Checkpoints.claim``."""
        key = (intent_id, agent.pubkey)
        await self._underway.wait_for(key)
        found = self._active.pop(key, None)
        if found is None:
            raise errors.NoCheckpointError(f"no intent `{intent_id}` of `{agent.display}` waits to be resumed")
        row = rows.ResumeClaimed(intent_id=intent_id, agent=found.agent, resumed_at_ms=max(0, self._clock()))
        try:
            await self._keep(row)
        except errors.StoreError:
            self._active.setdefault(key, found)
            raise
        return found

    def active(self) -> Sequence[types.BudgetPauseCheckpoint]:
        """As ``interface.Checkpoints.active``."""
        return tuple(self._active.values())

    async def compact(self) -> int:
        """As ``interface.Checkpoints.compact``. Always 0: claimed checkpoints are not kept in memory."""
        await anyio.lowlevel.checkpoint()
        return 0

    async def close(self) -> None:
        """As ``interface.Checkpoints.close``."""

    async def _keep(self, row: rows.CheckpointRow) -> None:
        await anyio.lowlevel.checkpoint()


def _whose(row: rows.Debit) -> tuple[str, ...]:
    """Return the public keys that a debit belongs to: the agent's and the submitter's."""
    return (row.agent.pubkey,) if row.submitter is None else (row.agent.pubkey, row.submitter.pubkey)


def _debit(row: rows.Debit) -> types.BudgetDebit:
    return types.BudgetDebit(agent=row.agent, credits=row.credits, paired_receipt=row.paired_receipt, at_ms=row.at_ms)


def _exhausted(
    agent: types.AgentId, requested: int, found: budget.Exhausted, now_ms: int
) -> errors.BudgetExhaustedError:
    when = budget.wait_in_words(found.refill_eta_ms, now_ms)
    return errors.BudgetExhaustedError(
        f"budget exhausted: `{agent.display}` has {found.tokens_remaining} credits left, {requested} needed",
        hint=f"there are enough {when}; settlement.budget_credits_per_hour of its manifest says how fast",
        tokens_remaining=found.tokens_remaining,
        refill_eta_ms=found.refill_eta_ms,
    )


def _refuse_paths(value: Any, name: str = "resume_state", depth: int = 0) -> None:
    """Refuse any text in the state that is an absolute path, or a path in a home directory."""
    if depth > _MOST_DEPTH:
        raise errors.CheckpointError(f"`{name}` is nested more than {_MOST_DEPTH} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_paths(key, name, depth + 1)
            if depth or key not in _TEXTS:
                _refuse_paths(item, f"{name}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_paths(item, name, depth + 1)
    elif isinstance(value, str) and _is_machine_local(value):
        raise errors.CheckpointError(f"`{name}` holds a path of this machine")


def _is_machine_local(text: str) -> bool:
    text = text.removeprefix("file://")
    return text.startswith("~") or PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
