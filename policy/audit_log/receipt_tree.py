"""Receipts as leaves of a Merkle tree, the tree's root and the batch's id: the exact bytes of version 1.

A leaf is the SHA-256 of the compact JSON ``{id, payer, resource, credits_consumed, settled_at[, memory_record_id]}``
in that order, with the payer's key in base58. A node is the SHA-256 of its two children's 32 bytes; at an odd width
the last is taken twice. ``batch_id`` is the SHA-256 of ``covenant-receipts:`` and the root in hex.

Version 1's tree has two weaknesses, and what reads it here makes up for both. Taking the last one twice gives [a, b, c]
and [a, b, c, c] one root: a batch never holds a receipt twice, and a proof names the number of receipts. Leaves and
nodes are hashed alike: the names alone of a leaf's JSON are longer than the 64 bytes of a node, so that neither passes
for the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

_BATCH: Final = b"covenant-receipts:"
_HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Leaf:
    """The settled fields of a receipt. ``payer`` is the public key in base58."""

    id: str
    payer: str
    resource: str
    credits_consumed: int
    settled_at: int
    memory_record_id: str | None = None

    def json(self) -> bytes:
        """The exact bytes."""
        document: dict[str, str | int] = {
            "id": self.id,
            "payer": self.payer,
            "resource": self.resource,
            "credits_consumed": self.credits_consumed,
            "settled_at": self.settled_at,
        }
        if self.memory_record_id is not None:
            document["memory_record_id"] = self.memory_record_id
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """SHA-256 of the exact bytes."""
        return hashlib.sha256(self.json()).digest()


class ReceiptProof(Struct, frozen=True):
    """That a leaf stands at ``index`` of ``count`` in the tree with this root: its siblings from the bottom."""

    index: int
    count: int
    path: tuple[bytes, ...]
    root: bytes


def root(leaves: Sequence[bytes]) -> bytes:
    """The root of at least one leaf.

    Raises:
        ValueError: there is none, or one of them twice.
    """
    return _levels(leaves)[-1][0]


def batch_id(merkle_root: bytes) -> bytes:
    """The id of the batch with this root."""
    return hashlib.sha256(_BATCH + merkle_root.hex().encode("ascii")).digest()


def prove(leaves: Sequence[bytes], index: int) -> ReceiptProof:
    """The proof for the leaf at ``index``.

    Raises:
        ValueError: as ``root``.
        IndexError: there is no such leaf.
    """
    if not 0 <= index < len(leaves):
        raise IndexError(index)
    *below, top = _levels(leaves)
    path = tuple(level[min((index >> depth) ^ 1, len(level) - 1)] for depth, level in enumerate(below))
    return ReceiptProof(index, len(leaves), path, top[0])


def verify(leaf: bytes, proof: ReceiptProof) -> bool:
    """Whether the proof leads from the leaf to its root, with a sibling of its own wherever there is one."""
    if not 0 <= proof.index < proof.count or len(proof.path) != (proof.count - 1).bit_length():
        return False
    node, index, width = leaf, proof.index, proof.count
    for sibling in proof.path:
        alone = index == width - 1 and index % 2 == 0
        if len(sibling) != _HASH_BYTES or alone != (sibling == node):
            return False
        node = _node(sibling, node) if index % 2 else _node(node, sibling)
        index, width = index // 2, (width + 1) // 2
    return node == proof.root


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    if not leaves:
        raise ValueError("a batch holds at least one receipt")
    if len(set(leaves)) != len(leaves):
        raise ValueError("a batch holds no receipt twice")
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        row = levels[-1]
        pairs = [*row, row[-1]] if len(row) % 2 else row
        levels.append([_node(left, right) for left, right in zip(pairs[::2], pairs[1::2], strict=True)])
    return levels


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(left + right).digest()
