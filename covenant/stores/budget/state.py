"""The state that results from the rows of a ledger. Both ledgers use it; reading the file again gives the same
state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from msgspec import structs

from covenant.stores.budget import interface, rows
from covenant.wire import types
from policy import budget

Row = TypeVar("Row", bound=rows.LedgerRow)


class LedgerState:
    """Buckets, open reservations and the newest debits after some rows. No file and no clock."""

    def __init__(self) -> None:
        self.latest_ms = 0
        self.buckets: dict[str, budget.Bucket] = {}
        self.agents: dict[str, types.AgentId] = {}
        self.open: dict[str, rows.Debit] = {}
        self.debits: deque[rows.Debit] = deque(maxlen=interface.MOST_RECENT)

    def apply(self, row: rows.LedgerRow) -> None:
        """Update the state by one more row."""
        key = row.agent.pubkey
        self.latest_ms = max(self.latest_ms, row.at_ms)
        self.agents[key] = row.agent
        match row:
            case rows.CapacitySet():
                self.buckets[key] = budget.set_capacity(self.buckets.get(key), row.capacity, row.at_ms)
            case rows.Debit():
                self._debit(key, row)
            case rows.Refund():
                self.open.pop(row.paired_receipt, None)
                self._forget(row.paired_receipt)
                if key in self.buckets:
                    self.buckets[key] = budget.give_back(self.buckets[key], row.credits, row.at_ms)
            case rows.Snapshot():
                self._restore(key, row)

    def undo(self, row: rows.Debit | rows.Refund, reservation: rows.Debit | None = None) -> None:
        """Undo a row that could not be written, and reopen the reservation that it closed."""
        key = row.agent.pubkey
        turn = budget.give_back if isinstance(row, rows.Debit) else budget.charge
        if key in self.buckets:
            self.buckets[key] = turn(self.buckets[key], row.credits, row.at_ms)
        if isinstance(row, rows.Debit) and row in self.debits:
            self.debits.remove(row)
        if reservation is not None:
            self.open[reservation.paired_receipt] = reservation
            if isinstance(row, rows.Refund) and reservation.credits:
                self.debits.append(reservation)
        else:
            self.open.pop(row.paired_receipt, None)

    def set_clock(self, now_ms: int) -> None:
        """Take times that are ahead of ``now_ms`` back to it. Balances stay."""
        self.latest_ms = min(self.latest_ms, now_ms)
        for key, bucket in self.buckets.items():
            if bucket.last_refill_ms > now_ms:
                self.buckets[key] = structs.replace(bucket, last_refill_ms=now_ms, owed=0)
        self.open = {receipt: back(row, now_ms) for receipt, row in self.open.items()}
        self.debits = deque((back(row, now_ms) for row in self.debits), maxlen=interface.MOST_RECENT)

    def snapshots(self) -> list[rows.Snapshot]:
        """Return every bucket as a row, with its agent's open reservations."""
        return [self._snapshot(key, bucket) for key, bucket in self.buckets.items()]

    def without_bucket(self) -> list[rows.Debit]:
        """Return the open reservations of 0 credits that belong to agents without a bucket."""
        return [one for one in self.open.values() if one.agent.pubkey not in self.buckets]

    def _forget(self, receipt: str) -> None:
        """Take the debit of a refunded reservation, one of the newest, off the list of debits."""
        for row in reversed(self.debits):
            if row.reserved and row.paired_receipt == receipt:
                self.debits.remove(row)
                return

    def _debit(self, key: str, row: rows.Debit) -> None:
        if row.settles:
            was = self.open.pop(row.paired_receipt, None)
            if was is not None and was.submitter is not None and row.submitter is None:
                # A row of an older version: settling debits did not name the submitter then.
                row = row.model_copy(update={"submitter": was.submitter})
        elif row.reserved:
            self.open[row.paired_receipt] = row
        if row.credits:
            self.debits.append(row)
        if key in self.buckets:
            self.buckets[key] = budget.charge(self.buckets[key], row.credits, row.at_ms)

    def _restore(self, key: str, row: rows.Snapshot) -> None:
        owed = row.owed if row.owed < row.capacity else 0
        balance = min(row.tokens_remaining, row.capacity) - row.debt
        self.buckets[key] = budget.Bucket(row.capacity, balance, row.last_refill_ms, owed)
        for one in row.open:
            self.open[one.paired_receipt] = rows.Debit(agent=row.agent, reserved=True, **one.model_dump())

    def _snapshot(self, key: str, bucket: budget.Bucket) -> rows.Snapshot:
        mine = (one for one in self.open.values() if one.agent.pubkey == key)
        return rows.Snapshot(
            agent=self.agents[key],
            capacity=bucket.capacity,
            tokens_remaining=bucket.tokens,
            last_refill_ms=bucket.last_refill_ms,
            at_ms=self.latest_ms,
            owed=bucket.owed,
            debt=bucket.debt,
            open=tuple(
                rows.Open(
                    credits=one.credits,
                    paired_receipt=one.paired_receipt,
                    at_ms=one.at_ms,
                    submitter=one.submitter,
                )
                for one in mine
            ),
        )


def back(row: Row, now_ms: int) -> Row:
    """Return a row whose time is not ahead of ``now_ms``."""
    times: dict[str, Any] = {"at_ms": min(row.at_ms, now_ms)}
    if isinstance(row, rows.Snapshot):
        opened = tuple(one.model_copy(update={"at_ms": min(one.at_ms, now_ms)}) for one in row.open)
        times |= {"last_refill_ms": min(row.last_refill_ms, now_ms), "open": opened}
    return cast("Row", row.model_copy(update=times))


def taken_back(ledger: Iterable[rows.LedgerRow], now_ms: int) -> list[rows.LedgerRow]:
    """Return the rows of a ledger with no time ahead of ``now_ms``, and the buckets that result from the old ones."""
    found, kept = LedgerState(), []
    for row in ledger:
        found.apply(row)
        kept.append(back(row, now_ms))
    found.set_clock(now_ms)
    return [*kept, *found.snapshots()]


def cut(
    ledger: Iterable[rows.LedgerRow], before_ms: int
) -> tuple[list[rows.Snapshot | rows.Debit], int, interface.BudgetCompaction]:
    """Fold the rows before ``before_ms`` into snapshots. Returns these, the number of rows folded and the outcome.

    Only the beginning of the file is folded, and no row after it is read. Version 1 may have written an earlier time
    after a later one when its clock was set back. Such a row keeps its place, because the order of rows gives them
    their meaning.
    """
    before = LedgerState()
    taken = dropped = 0
    for row in ledger:
        if row.at_ms >= before_ms:
            break
        before.apply(row)
        taken += 1
        dropped += not isinstance(row, rows.Snapshot)
    snapshots, open_ = before.snapshots(), before.without_bucket()
    return [*snapshots, *open_], taken, interface.BudgetCompaction(dropped - len(open_), len(snapshots))
