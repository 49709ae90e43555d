"""The interface of the receipts.

A receipt is *open* until it is in a batch. A *batch* commits to its receipts by their Merkle root and may stay off any
chain; it is *confirmed* once a chain took the root. Neither step can be undone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from covenant.wire import types
from policy import errors
from policy.audit_log import receipt_tree


@dataclass(frozen=True, slots=True)
class Batch:
    """Receipts under one root. The last five fields are null while no chain has it."""

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
    """The place on a chain of a batch's root."""

    chain: str
    cluster: str
    tx_sig: str
    slot: int
    confirmed_at: int


Keep = Callable[[types.SettlementReceipt], bool]


def every(receipt: types.SettlementReceipt) -> bool:
    """Accept every receipt."""
    return True


def leaf(receipt: types.SettlementReceipt) -> receipt_tree.Leaf:
    """Return the fields of a receipt that its batch commits to."""
    return receipt_tree.Leaf(
        id=receipt.id,
        payer=receipt.payer.pubkey,
        resource=receipt.resource,
        credits_consumed=receipt.credits_consumed,
        settled_at=receipt.settled_at,
        memory_record_id=receipt.memory_record_id,
    )


def is_stored(receipt: types.SettlementReceipt, there: types.SettlementReceipt | None) -> bool:
    """Whether a receipt that is to be appended is stored already; ``there`` is the one with its id.

    Raises:
        errors.ReceiptError: it cannot be appended.
    """
    if there is not None:
        if leaf(there) != leaf(receipt):
            raise errors.ReceiptError(f"another receipt has the id `{receipt.id}`")
        return True
    if receipt.batch_id is not None:
        raise errors.ReceiptError(f"receipt `{receipt.id}` is new and says that it is in a batch")
    return False


def batch_of(receipts: Sequence[types.SettlementReceipt]) -> Batch:
    """Return the batch of these receipts, in this order.

    Raises:
        errors.ReceiptError: there are none, or one occurs twice.
    """
    try:
        root = receipt_tree.root([leaf(receipt).digest() for receipt in receipts])
    except ValueError as e:
        raise errors.ReceiptError(str(e)) from e
    return Batch(receipt_tree.batch_id(root).hex(), root.hex(), len(receipts))


def in_batch(receipt: types.SettlementReceipt, batch: Batch) -> types.SettlementReceipt:
    """Return the receipt as one of its batch."""
    return receipt.model_copy(update={"batch_id": batch.batch_id, "merkle_root": batch.merkle_root})


def is_confirmed(batch: Batch, anchor: Anchor) -> bool:
    """Whether the batch is confirmed at this place.

    Raises:
        errors.ReceiptError: it is confirmed by another transaction.
    """
    if batch.tx_sig not in {None, anchor.tx_sig}:
        raise errors.ReceiptError(f"batch `{batch.batch_id}` is confirmed by another transaction")
    return batch.tx_sig is not None


def confirmed(receipt: types.SettlementReceipt, anchor: Anchor) -> types.SettlementReceipt:
    """Return the receipt with the place of its root. Version 1 has the signature under two names."""
    return receipt.model_copy(update={**dataclasses.asdict(anchor), "onchain_sig": anchor.tx_sig})


def proof_of(batch_id: str, leaves: Sequence[bytes], place: int, root: str | None) -> receipt_tree.ReceiptProof:
    """Prove the leaf at a place of the batch with this root.

    Raises:
        errors.ReceiptError: the leaves do not make the root.
    """
    try:
        proof = receipt_tree.prove(leaves, place)
    except ValueError as e:
        raise errors.ReceiptError(f"batch `{batch_id}` does not hold together: {e}") from e
    if proof.root.hex() != root:
        raise errors.ReceiptError(f"the receipts of batch `{batch_id}` do not make its root: one was changed")
    return proof


class Receipts(Protocol):
    """Receipts in order of arrival. A change is durable when its method returns.

    A caller that reads open receipts, writes a row about them and then marks them holds ``flushing`` meanwhile.
    """

    @property
    def flushing(self) -> anyio.Lock:
        """Held from reading open receipts until they are marked."""
        ...

    async def append(self, receipt: types.SettlementReceipt) -> None:
        """Store a receipt. An equal one again changes nothing.

        Raises:
            errors.ReceiptError: another receipt has its id.
            errors.StoreError: it could not be written and is not stored.
        """
        ...

    async def get(self, receipt_id: str) -> types.SettlementReceipt | None:
        """Return the receipt with that id."""
        ...

    async def recent(
        self, limit: int, since_ms: int | None = None, *, keep: Keep = every
    ) -> Sequence[types.SettlementReceipt]:
        """Return the newest first; with ``since_ms``, those settled then or later; of those, the ones that ``keep``
        accepts."""
        ...

    async def unsettled(self, limit: int, *, keep: Keep = every) -> Sequence[types.SettlementReceipt]:
        """Return the open ones, oldest first; of those, the ones that ``keep`` accepts."""
        ...

    async def mark_batch(self, receipt_ids: Sequence[str]) -> Batch:
        """Put open receipts into one batch, in order of arrival.

        Raises:
            errors.ReceiptError: one is unknown, in a batch already or named twice, or none is named.
            errors.StoreError: it could not be written; all of them are open.
        """
        ...

    async def mark_batch_confirmed(self, batch_id: str, anchor: Anchor) -> int:
        """Write to a batch's receipts where a chain keeps its root. Returns the number of receipts changed.

        The same anchor again changes nothing.

        Raises:
            errors.ReceiptError: there is no such batch, or it is confirmed by another transaction.
            errors.StoreError: it could not be written.
        """
        ...

    async def batches(self, limit: int) -> Sequence[Batch]:
        """Return the newest batches first."""
        ...

    async def unconfirmed(self, limit: int) -> Sequence[Batch]:
        """Return the batches that no chain has, oldest first."""
        ...

    async def prove(self, receipt_id: str) -> receipt_tree.ReceiptProof | None:
        """Prove that a receipt is in its batch; None while it is in none or does not exist.

        Raises:
            errors.ReceiptError: the batch's receipts no longer give its root: one was changed.
        """
        ...

    def copy_path(self, now_ms: int) -> str | None:
        """Return the path where ``revise`` will leave a copy of the file; None if there is no file."""
        ...

    async def revise(self, receipts: Sequence[types.SettlementReceipt], *, now_ms: int) -> None:
        """Replace the open receipts with these ids, after copying the file.

        Raises:
            errors.ReceiptError: one is unknown, in a batch, or would then be in one.
            errors.StoreError: it could not be written; nothing changed.
        """
        ...

    async def close(self) -> None:
        """Close the file."""
        ...
