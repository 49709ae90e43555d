"""The receipts, as the rest of the daemon knows them.

A receipt is *open* until it is in a batch. A *batch* commits to its receipts by their Merkle root and may stay off any
chain; it is *confirmed* once a chain took the root. Neither can be changed back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from covenant.wire import types
from policy.audit_log import receipt_tree


@dataclass(frozen=True, slots=True)
class Batch:
    """Receipts under one root. The last five are null while no chain has it."""

    batch_id: str
    merkle_root: str
    receipt_count: int
    chain: str | None = None
    cluster: str | None = None
    tx_sig: str | None = None
    slot: int | None = None
    confirmed_at: int | None = None


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where a chain keeps a batch's root."""

    chain: str
    cluster: str
    tx_sig: str
    slot: int
    confirmed_at: int


Keep = Callable[[types.SettlementReceipt], bool]


def every(receipt: types.SettlementReceipt) -> bool:
    """Keep all of them."""
    return True


def leaf(receipt: types.SettlementReceipt) -> receipt_tree.Leaf:
    """What of a receipt its batch commits to."""
    return receipt_tree.Leaf(
        id=receipt.id,
        payer=receipt.payer.pubkey,
        resource=receipt.resource,
        credits_consumed=receipt.credits_consumed,
        settled_at=receipt.settled_at,
        memory_record_id=receipt.memory_record_id,
    )


def batch_of(receipts: Sequence[types.SettlementReceipt]) -> Batch:
    """The batch that these receipts make, in this order.

    Raises:
        ValueError: there is none, or one of them twice.
    """
    root = receipt_tree.root([leaf(receipt).digest() for receipt in receipts])
    return Batch(receipt_tree.batch_id(root).hex(), root.hex(), len(receipts))


class Receipts(Protocol):
    """Receipts in the order in which they came. What a method returned for is durable.

    Who looks for open receipts, writes a row about them and then marks them holds ``flushing`` meanwhile.
    """

    @property
    def flushing(self) -> anyio.Lock:
        """Held from looking for open receipts until they are marked."""
        ...

    async def append(self, receipt: types.SettlementReceipt) -> None:
        """Keep a receipt. The same one again changes nothing.

        Raises:
            errors.ReceiptError: another receipt has its id.
            errors.StoreError: it could not be written and is not kept.
        """
        ...

    async def get(self, receipt_id: str) -> types.SettlementReceipt | None:
        """The receipt with that id."""
        ...

    async def recent(
        self, limit: int, since_ms: int | None = None, *, keep: Keep = every
    ) -> Sequence[types.SettlementReceipt]:
        """The newest first; with ``since_ms``, those settled then or later; of those, what ``keep`` says."""
        ...

    async def unsettled(self, limit: int, *, keep: Keep = every) -> Sequence[types.SettlementReceipt]:
        """Those in no batch, the oldest first; of those, what ``keep`` says."""
        ...

    async def mark_batch(self, receipt_ids: Sequence[str]) -> Batch:
        """Put open receipts into one batch, in the order in which they came.

        Raises:
            errors.ReceiptError: one is not there, is in a batch already or is named twice, or none is named.
            errors.StoreError: it could not be written; all of them are open.
        """
        ...

    async def mark_batch_confirmed(self, batch_id: str, anchor: Anchor) -> int:
        """Write into a batch's receipts where a chain keeps its root; how many receipts that changed.

        The same again changes nothing.

        Raises:
            errors.ReceiptError: there is no such batch, or it is confirmed by another transaction.
            errors.StoreError: it could not be written.
        """
        ...

    async def batches(self, limit: int) -> Sequence[Batch]:
        """The newest first."""
        ...

    async def unconfirmed(self, limit: int) -> Sequence[Batch]:
        """Those that no chain has, the oldest first."""
        ...

    async def prove(self, receipt_id: str) -> receipt_tree.Proof | None:
        """That a receipt is in its batch; None while it is in none or does not exist.

        Raises:
            errors.ReceiptError: the batch's receipts no longer make its root: one was changed.
        """
        ...

    def copy_path(self, now_ms: int) -> str | None:
        """Where ``revise`` will leave the file as it was; None where there is no file."""
        ...

    async def revise(self, receipts: Sequence[types.SettlementReceipt], *, now_ms: int) -> None:
        """Put these in the place of the open receipts with their ids, after a copy of the file was made.

        Raises:
            errors.ReceiptError: one is not there, is in a batch, or would then be in one.
            errors.StoreError: it could not be written; nothing changed.
        """
        ...

    async def close(self) -> None:
        """Let go of the file."""
        ...
