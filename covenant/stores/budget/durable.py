"""The ledger and the checkpoints as journals: ``budget/ledger.jsonl`` and ``budget/checkpoints.jsonl``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

import anyio

from covenant.stores.budget import in_memory, interface, rows, state
from covenant.stores.journal import Journal


class _NothingGoes(Exception):
    """Raised to leave a file unchanged when a rewrite would remove no row."""


class DurableBudgetLedger(in_memory.InMemoryBudgetLedger):
    """``interface.BudgetLedger`` over a journal. Make it with ``open``."""

    def __init__(self, journal: Journal, path: Path, now_ms: Callable[[], int]) -> None:
        super().__init__(now_ms)
        self._journal = journal
        self._path = path

    @classmethod
    async def open(cls, path: Path, now_ms: Callable[[], int]) -> Self:
        """Open or create the ledger at ``path``.

        Raises:
            errors.StoreError: it cannot be used, or a line of it is no row.
        """
        journal = await Journal.open(path)
        ledger = cls(journal, path, now_ms)
        await journal.replay(lambda line, where: ledger._state.apply(rows.ledger_row(line, where)))
        return ledger

    @property
    def recovered(self) -> list[str]:
        """Messages about data set aside at the opening, as ``Journal.recovered``."""
        return self._journal.recovered

    async def set_clock(self, now_ms: int) -> None:
        """As ``interface.BudgetLedger.set_clock``."""
        # Memory first: a row that is decided while the file is rewritten follows it there, under the new time.
        await super().set_clock(now_ms)

        def select(lines: list[bytes]) -> list[bytes]:
            ledger = (rows.ledger_row(line, f"{self._path}:{n}") for n, line in enumerate(lines, 1))
            return [*map(rows.line, state.taken_back(ledger, now_ms))]

        with anyio.CancelScope(shield=True):
            await self._journal.rewrite(select)

    async def compact(self, before_ms: int) -> interface.BudgetCompaction:
        """As ``interface.BudgetLedger.compact``. Selects the rows to drop from the file between two writes."""
        outcome = interface.BudgetCompaction(0, 0)

        def select(lines: list[bytes]) -> list[bytes]:
            nonlocal outcome
            ledger = (rows.ledger_row(line, f"{self._path}:{n}") for n, line in enumerate(lines, 1))
            snapshots, taken, found = state.cut(ledger, before_ms)
            if not found.dropped:
                raise _NothingGoes
            outcome = found
            return [*map(rows.line, snapshots), *lines[taken:]]

        with anyio.CancelScope(shield=True), contextlib.suppress(_NothingGoes):
            await self._journal.rewrite(select)
            await super().compact(before_ms)
        return outcome

    async def close(self) -> None:
        """As ``interface.BudgetLedger.close``."""
        await self._journal.close()

    async def _keep(self, row: rows.LedgerRow) -> None:
        # Shielded: even if the caller is cancelled, the decision made in memory becomes durable or is undone.
        with anyio.CancelScope(shield=True):
            await self._journal.append(rows.line(row))


class DurableCheckpoints(in_memory.InMemoryCheckpoints):
    """``interface.Checkpoints`` over a journal. Make it with ``open``."""

    def __init__(self, journal: Journal, path: Path, now_ms: Callable[[], int]) -> None:
        super().__init__(now_ms)
        self._journal = journal
        self._path = path

    @classmethod
    async def open(cls, path: Path, now_ms: Callable[[], int]) -> Self:
        """Open or create the checkpoints at ``path``.

        Raises:
            errors.StoreError: the file cannot be used, or a line of it is no row.
        """
        journal = await Journal.open(path)
        found = cls(journal, path, now_ms)
        await journal.replay(lambda line, where: found._replay(rows.checkpoint_row(line, where)))
        return found

    @property
    def recovered(self) -> list[str]:
        """Messages about data set aside at the opening, as ``Journal.recovered``."""
        return self._journal.recovered

    async def compact(self) -> int:
        """As ``interface.Checkpoints.compact``. Reads from the file, between two writes, which checkpoints are
        active."""
        dropped = 0

        def select(lines: list[bytes]) -> list[bytes]:
            nonlocal dropped
            kept: dict[tuple[str, str], bytes] = {}
            for number, line in enumerate(lines, 1):
                row = rows.checkpoint_row(line, f"{self._path}:{number}")
                if isinstance(row, rows.PauseSaved):
                    kept[row.checkpoint.intent_id, row.checkpoint.agent.pubkey] = line
                else:
                    kept.pop((row.intent_id, row.agent.pubkey), None)
            dropped = len(lines) - len(kept)
            if not dropped:
                raise _NothingGoes
            return list(kept.values())

        with anyio.CancelScope(shield=True), contextlib.suppress(_NothingGoes):
            await self._journal.rewrite(select)
        return dropped

    async def close(self) -> None:
        """As ``interface.Checkpoints.close``."""
        await self._journal.close()

    async def _keep(self, row: rows.CheckpointRow) -> None:
        with anyio.CancelScope(shield=True):
            await self._journal.append(rows.line(row))

    def _replay(self, row: rows.CheckpointRow) -> None:
        if isinstance(row, rows.PauseSaved):
            self._active[row.checkpoint.intent_id, row.checkpoint.agent.pubkey] = row.checkpoint
        else:
            self._active.pop((row.intent_id, row.agent.pubkey), None)
