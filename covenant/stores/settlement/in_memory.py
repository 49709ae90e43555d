"""The receipts without a file: the double of the durable ones, for tests."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread

from covenant.stores.settlement import interface, rows
from covenant.wire import types
from policy import errors
from policy.audit_log import receipt_tree


@dataclasses.dataclass(slots=True)
class _Batch:
    batch: interface.Batch
    receipt_ids: list[str]


class InMemoryReceipts:
    """``interface.Receipts`` in memory, as lines. A change is complete before another task runs."""

    def __init__(self) -> None:
        self._lines: dict[str, bytes] = {}
        # The open ones in the order of arrival, with their places there.
        self._open: dict[str, int] = {}
        self._batches: dict[str, _Batch] = {}
        self.flushing = anyio.Lock()

    async def append(self, receipt: types.SettlementReceipt) -> None:
        """As ``interface.Receipts.append``."""
        await anyio.lowlevel.checkpoint()
        if interface.is_stored(receipt, self._read(receipt.id) if receipt.id in self._lines else None):
            return
        self._lines[receipt.id] = rows.line(receipt)
        self._open[receipt.id] = len(self._lines)

    async def get(self, receipt_id: str) -> types.SettlementReceipt | None:
        """As ``interface.Receipts.get``."""
        await anyio.lowlevel.checkpoint()
        return self._read(receipt_id) if receipt_id in self._lines else None

    async def recent(
        self, limit: int, since_ms: int | None = None, *, keep: interface.Keep = interface.every
    ) -> Sequence[types.SettlementReceipt]:
        """As ``interface.Receipts.recent``."""
        return await anyio.to_thread.run_sync(
            self._chosen,
            list(reversed(self._lines)),
            limit,
            lambda one: (since_ms is None or one.settled_at >= since_ms) and keep(one),
        )

    async def unsettled(
        self, limit: int, *, keep: interface.Keep = interface.every
    ) -> Sequence[types.SettlementReceipt]:
        """As ``interface.Receipts.unsettled``."""
        return await anyio.to_thread.run_sync(self._chosen, list(self._open), limit, keep)

    async def mark_batch(self, receipt_ids: Sequence[str]) -> interface.Batch:
        """As ``interface.Receipts.mark_batch``."""
        await anyio.lowlevel.checkpoint()
        for key in receipt_ids:
            if key not in self._open:
                raise errors.ReceiptError(f"receipt `{key}` is in a batch already, or is not there")
        receipts = [self._read(key) for key in sorted(receipt_ids, key=self._open.__getitem__)]
        batch = interface.batch_of(receipts)
        self._change(interface.in_batch(one, batch) for one in receipts)
        for one in receipts:
            del self._open[one.id]
        self._batches[batch.batch_id] = _Batch(batch, [one.id for one in receipts])
        return batch

    async def mark_batch_confirmed(self, batch_id: str, anchor: interface.Anchor) -> int:
        """As ``interface.Receipts.mark_batch_confirmed``."""
        await anyio.lowlevel.checkpoint()
        found = self._batches.get(batch_id)
        if found is None:
            raise errors.ReceiptError(f"there is no batch `{batch_id}`")
        if interface.is_confirmed(found.batch, anchor):
            return 0
        self._change(interface.confirmed(self._read(key), anchor) for key in found.receipt_ids)
        found.batch = dataclasses.replace(found.batch, **dataclasses.asdict(anchor))
        return len(found.receipt_ids)

    async def batches(self, limit: int) -> Sequence[interface.Batch]:
        """As ``interface.Receipts.batches``."""
        await anyio.lowlevel.checkpoint()
        newest = (self._batches[key].batch for key in reversed(self._batches))
        return tuple(itertools.islice(newest, max(0, limit)))

    async def unconfirmed(self, limit: int) -> Sequence[interface.Batch]:
        """As ``interface.Receipts.unconfirmed``."""
        await anyio.lowlevel.checkpoint()
        oldest = (found.batch for found in self._batches.values() if found.batch.tx_sig is None)
        return tuple(itertools.islice(oldest, max(0, limit)))

    async def prove(self, receipt_id: str) -> receipt_tree.ReceiptProof | None:
        """As ``interface.Receipts.prove``."""
        await anyio.lowlevel.checkpoint()
        batch_id = self._read(receipt_id).batch_id if receipt_id in self._lines else None
        if batch_id is None:
            return None
        found = self._batches[batch_id]
        leaves = [interface.leaf(self._read(key)).digest() for key in found.receipt_ids]
        return interface.proof_of(batch_id, leaves, found.receipt_ids.index(receipt_id), found.batch.merkle_root)

    def copy_path(self, now_ms: int) -> str | None:
        """As ``interface.Receipts.copy_path``."""
        return None

    async def revise(self, receipts: Sequence[types.SettlementReceipt], *, now_ms: int) -> None:
        """As ``interface.Receipts.revise``."""
        await anyio.lowlevel.checkpoint()
        for one in receipts:
            if one.id not in self._open or one.batch_id is not None:
                raise errors.ReceiptError(f"receipt `{one.id}` is in a batch, or is not there: it cannot change")
        self._change(receipts)

    async def close(self) -> None:
        """As ``interface.Receipts.close``."""

    def _change(self, changed: Iterable[types.SettlementReceipt]) -> None:
        self._lines.update({receipt.id: rows.line(receipt) for receipt in changed})

    def _read(self, key: str) -> types.SettlementReceipt:
        return rows.read(self._lines[key], key)

    def _chosen(self, keys: Sequence[str], limit: int, keep: interface.Keep) -> tuple[types.SettlementReceipt, ...]:
        """In a worker thread: reading many lines takes time."""
        return tuple(itertools.islice(filter(keep, map(self._read, keys)), max(0, limit)))
