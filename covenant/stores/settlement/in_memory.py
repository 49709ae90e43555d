"""The receipts without a file: for tests, and under the durable ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

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
    """``interface.Receipts`` in memory.

    Receipts are kept as their lines, which are a third of what the objects take. A receipt has its place from the
    moment in which it is written, so that the order here is the order in the file; it shows once it is durable.
    """

    def __init__(self) -> None:
        self._lines: dict[str, bytes] = {}
        self._pending: set[str] = set()
        # The open ones in the order of the file, with their places there; the pending ones are among them.
        self._open: dict[str, int] = {}
        self._placed = 0
        self._batches: dict[str, _Batch] = {}
        # What changes receipts that are there takes turns; what adds some does not wait for it.
        self._changing = anyio.Lock()
        self.flushing = anyio.Lock()

    async def append(self, receipt: types.SettlementReceipt) -> None:
        """As ``interface.Receipts.append``."""
        if receipt.id in self._pending:
            raise errors.ReceiptError(f"receipt `{receipt.id}` is being written")
        if receipt.id in self._lines:
            if interface.leaf(self._read(receipt.id)) != interface.leaf(receipt):
                raise errors.ReceiptError(f"another receipt has the id `{receipt.id}`")
            await anyio.lowlevel.checkpoint()
            return
        if receipt.batch_id is not None:
            raise errors.ReceiptError(f"receipt `{receipt.id}` is new and says that it is in a batch")
        line = rows.line(receipt)
        self._lines[receipt.id] = line
        self._placed += 1
        self._open[receipt.id] = self._placed
        self._pending.add(receipt.id)
        try:
            await self._keep(line)
        except errors.StoreError:
            del self._lines[receipt.id], self._open[receipt.id]
            raise
        finally:
            self._pending.discard(receipt.id)

    async def get(self, receipt_id: str) -> types.SettlementReceipt | None:
        """As ``interface.Receipts.get``."""
        await anyio.lowlevel.checkpoint()
        return self._read(receipt_id) if receipt_id in self._lines and receipt_id not in self._pending else None

    async def recent(
        self, limit: int, since_ms: int | None = None, *, keep: interface.Keep = interface.every
    ) -> Sequence[types.SettlementReceipt]:
        """As ``interface.Receipts.recent``."""
        newest = [key for key in reversed(self._lines) if key not in self._pending]
        return await anyio.to_thread.run_sync(
            self._chosen, newest, limit, lambda one: (since_ms is None or one.settled_at >= since_ms) and keep(one)
        )

    async def unsettled(
        self, limit: int, *, keep: interface.Keep = interface.every
    ) -> Sequence[types.SettlementReceipt]:
        """As ``interface.Receipts.unsettled``."""
        oldest = [key for key in self._open if key not in self._pending]
        return await anyio.to_thread.run_sync(self._chosen, oldest, limit, keep)

    async def mark_batch(self, receipt_ids: Sequence[str]) -> interface.Batch:
        """As ``interface.Receipts.mark_batch``."""
        async with self._changing:
            for key in receipt_ids:
                if key not in self._open or key in self._pending:
                    raise errors.ReceiptError(f"receipt `{key}` is in a batch already, or is not there")
            # INVARIANT: a batch has the order of the file, which is all that is left of it after a start.
            ordered = sorted(receipt_ids, key=self._open.__getitem__)
            receipts = [self._read(key) for key in ordered]
            try:
                batch = await anyio.to_thread.run_sync(interface.batch_of, receipts)
            except ValueError as e:
                raise errors.ReceiptError(str(e)) from e
            marks = {"batch_id": batch.batch_id, "merkle_root": batch.merkle_root}
            await self._change({one.id: one.model_copy(update=marks) for one in receipts})
            for one in receipts:
                del self._open[one.id]
            self._batches[batch.batch_id] = _Batch(batch, [one.id for one in receipts])
            return batch

    async def mark_batch_confirmed(self, batch_id: str, anchor: interface.Anchor) -> int:
        """As ``interface.Receipts.mark_batch_confirmed``."""
        async with self._changing:
            found = self._batches.get(batch_id)
            if found is None:
                raise errors.ReceiptError(f"there is no batch `{batch_id}`")
            if found.batch.tx_sig is not None:
                if found.batch.tx_sig != anchor.tx_sig:
                    raise errors.ReceiptError(f"batch `{batch_id}` is confirmed by another transaction")
                return 0
            where = dataclasses.asdict(anchor)
            # Version 1 has the signature under two names.
            marks = {**where, "onchain_sig": anchor.tx_sig}
            await self._change({key: self._read(key).model_copy(update=marks) for key in found.receipt_ids})
            found.batch = dataclasses.replace(found.batch, **where)
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
        try:
            proof = receipt_tree.prove(leaves, found.receipt_ids.index(receipt_id))
        except ValueError as e:
            raise errors.ReceiptError(f"batch `{batch_id}` does not hold together: {e}") from e
        if proof.root.hex() != found.batch.merkle_root:
            raise errors.ReceiptError(f"the receipts of batch `{batch_id}` do not make its root: one was changed")
        return proof

    def copy_path(self, now_ms: int) -> str | None:
        """As ``interface.Receipts.copy_path``."""
        return None

    async def revise(self, receipts: Sequence[types.SettlementReceipt], *, now_ms: int) -> None:
        """As ``interface.Receipts.revise``."""
        async with self._changing:
            for one in receipts:
                if one.id not in self._open or one.id in self._pending or one.batch_id is not None:
                    raise errors.ReceiptError(f"receipt `{one.id}` is in a batch, or is not there: it cannot change")
            await self._change({one.id: one for one in receipts}, copy=self.copy_path(now_ms))

    async def close(self) -> None:
        """As ``interface.Receipts.close``."""

    async def _change(self, changed: Mapping[str, types.SettlementReceipt], *, copy: str | None = None) -> None:
        """Replace lines where they stand, durably first, and before that make the copy that is asked for."""
        lines = {key: rows.line(receipt) for key, receipt in changed.items()}
        with anyio.CancelScope(shield=True):
            await self._replace(lines, copy)
        self._lines.update(lines)

    async def _keep(self, line: bytes) -> None:
        await anyio.lowlevel.checkpoint()

    async def _replace(self, lines: Mapping[str, bytes], copy: str | None) -> None:
        await anyio.lowlevel.checkpoint()

    def _read(self, key: str) -> types.SettlementReceipt:
        return rows.read(self._lines[key], key)

    def _chosen(self, keys: Sequence[str], limit: int, keep: interface.Keep) -> tuple[types.SettlementReceipt, ...]:
        """In a worker thread: reading many lines takes time. Those that went meanwhile were never durable."""
        lines = ((key, self._lines.get(key)) for key in keys)
        found = (rows.read(line, key) for key, line in lines if line is not None)
        return tuple(itertools.islice(filter(keep, found), max(0, limit)))

    def _restore(self, line: bytes, where: str) -> None:
        """Take in the next line of a file; a batch's order is the order of its receipts there.

        Raises:
            errors.StoreError: it is no receipt, or one with the id of another.
        """
        receipt = rows.read(line, where)
        if receipt.id in self._lines:
            raise errors.StoreError(f"receipt `{receipt.id}` stands twice in the file", where=where)
        self._lines[receipt.id] = line
        self._placed += 1
        if receipt.batch_id is None:
            self._open[receipt.id] = self._placed
            return
        batch = self._batches.setdefault(receipt.batch_id, _Batch(_batch_at(receipt, receipt.batch_id), []))
        batch.receipt_ids.append(receipt.id)
        batch.batch = dataclasses.replace(batch.batch, receipt_count=len(batch.receipt_ids))


def _batch_at(receipt: types.SettlementReceipt, batch_id: str) -> interface.Batch:
    return interface.Batch(
        batch_id=batch_id,
        merkle_root=receipt.merkle_root or "",
        receipt_count=0,
        chain=receipt.chain,
        cluster=receipt.cluster,
        tx_sig=receipt.tx_sig or receipt.onchain_sig,
        slot=receipt.slot,
        confirmed_at=receipt.confirmed_at,
    )
