"""The Merkle tree of RFC 6962 (section 2.1) over the lines of a log, and its proofs.

A leaf is SHA-256(0x00 || line), a node SHA-256(0x01 || left || right). A tree may begin with records that are no longer
there: the roots of the complete subtrees that covered them stand for them, so that every proof about what is left, and
every root from then on, is the same as if nothing had been cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(line: bytes) -> bytes:
    """The hash of one record, without its newline."""
    return hashlib.sha256(b"\x00" + line).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash over two subtrees."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """The roots of the complete subtrees over the first ``size`` leaves, largest first: all that a root needs."""

    def __init__(self, size: int = 0, hashes: Iterable[bytes] = ()) -> None:
        self.size = size
        self.hashes = list(hashes)
        if len(self.hashes) != size.bit_count() or any(len(value) != HASH_BYTES for value in self.hashes):
            raise ValueError(f"{len(self.hashes)} subtrees cannot cover {size} leaves")

    def append(self, leaf: bytes) -> None:
        """Add one leaf hash."""
        at = self.size
        while at & 1:
            leaf = node_hash(self.hashes.pop(), leaf)
            at >>= 1
        self.hashes.append(leaf)
        self.size += 1

    def root(self) -> bytes:
        """The root over all leaves so far."""
        if not self.hashes:
            return EMPTY_ROOT
        value = self.hashes[-1]
        for left in reversed(self.hashes[:-1]):
            value = node_hash(left, value)
        return value

    def copy(self) -> Frontier:
        """Another one with the same leaves."""
        return Frontier(self.size, self.hashes)


class Tree:
    """A tree that answers for any size that it ever had since ``cut``: 64 bytes a leaf.

    ``cut`` leaves are gone and stand as ``subtrees``, the ``hashes`` of their frontier.
    """

    def __init__(self, cut: int = 0, subtrees: Sequence[bytes] = ()) -> None:
        before = Frontier(cut, subtrees)
        self.cut = self.size = cut
        self._before: dict[int, bytes] = {}
        bits = [level for level in reversed(range(cut.bit_length())) if cut >> level & 1]
        self._before = dict(zip(bits, before.hashes, strict=True))
        # Complete nodes of each level, from the one on that holds or follows the first leaf that is there.
        self._levels: list[bytearray] = [bytearray()]

    def append(self, leaf: bytes) -> None:
        """Add one leaf hash."""
        index, level = self.size, 0
        self._levels[0] += leaf
        self.size += 1
        while index & 1:
            leaf = node_hash(self._node(level, index - 1), leaf)
            index >>= 1
            level += 1
            if level == len(self._levels):
                self._levels.append(bytearray())
            self._levels[level] += leaf

    def root(self, size: int | None = None) -> bytes:
        """The root over the first ``size`` leaves, by default over all.

        Raises:
            ValueError: the tree never had that size, or that part of it was cut.
        """
        size = self.size if size is None else size
        self._check(size)
        return self._range(0, size) if size else EMPTY_ROOT

    def leaf(self, index: int) -> bytes:
        """The hash of one leaf that is still there."""
        if not self.cut <= index < self.size:
            raise ValueError(f"the tree has no leaf {index}")
        return self._node(0, index)

    def inclusion(self, index: int, size: int | None = None) -> list[bytes]:
        """The audit path of a leaf in the tree of that size (RFC 6962, 2.1.1), from the leaf up.

        Raises:
            ValueError: there is no such leaf or size, or it was cut.
        """
        size = self.size if size is None else size
        self._check(size)
        if not self.cut <= index < size:
            raise ValueError(f"the tree of {size} has no leaf {index}")
        path: list[bytes] = []
        start, end = 0, size
        while end - start > 1:
            middle = start + _split(end - start)
            if index < middle:
                path.append(self._range(middle, end))
                end = middle
            else:
                path.append(self._range(start, middle))
                start = middle
        return path[::-1]

    def consistency(self, old: int, size: int | None = None) -> list[bytes]:
        """The proof that the tree of ``old`` leaves begins the one of ``size`` (RFC 6962, 2.1.2).

        Raises:
            ValueError: there is no such size, or it was cut.
        """
        size = self.size if size is None else size
        self._check(size)
        self._check(old)
        if old > size:
            raise ValueError(f"a tree of {old} cannot begin one of {size}")
        proof: list[bytes] = []
        start, end, whole = 0, size, True
        if old == 0:
            return proof
        while old != end:
            middle = start + _split(end - start)
            if old <= middle:
                proof.append(self._range(middle, end))
                end = middle
            else:
                proof.append(self._range(start, middle))
                start, whole = middle, False
        if not whole:
            proof.append(self._range(start, end))
        return proof[::-1]

    def _check(self, size: int) -> None:
        if not self.cut <= size <= self.size and size != 0:
            raise ValueError(f"the tree has sizes from {self.cut} to {self.size}, not {size}")

    def _node(self, level: int, index: int) -> bytes:
        first = self.cut >> level
        if index < first:
            # INVARIANT: of what was cut only its frontier is asked for: any other node lies below one of those.
            return self._before[level]
        at = (index - first) * HASH_BYTES
        value = bytes(self._levels[level][at : at + HASH_BYTES])
        if len(value) != HASH_BYTES:
            raise ValueError(f"the tree has no node {index} of level {level}")
        return value

    def _range(self, start: int, end: int) -> bytes:
        count = end - start
        if count & (count - 1) == 0:
            level = count.bit_length() - 1
            return self._node(level, start >> level)
        middle = start + _split(count)
        return node_hash(self._range(start, middle), self._range(middle, end))


class Inclusion(Struct, frozen=True):
    """That a leaf stands at ``index`` of the tree of ``size`` leaves."""

    index: int
    size: int
    leaf: bytes
    path: tuple[bytes, ...]


def includes(proof: Inclusion, root: bytes) -> bool:
    """Whether the proof leads to that root (RFC 9162, 2.1.3.2)."""
    if not 0 <= proof.index < proof.size:
        return False
    index, last, value = proof.index, proof.size - 1, proof.leaf
    for sibling in proof.path:
        if last == 0:
            return False
        if index & 1 or index == last:
            value = node_hash(sibling, value)
            while not index & 1 and index:
                index >>= 1
                last >>= 1
        else:
            value = node_hash(value, sibling)
        index >>= 1
        last >>= 1
    return last == 0 and value == root


def extends(old: int, size: int, old_root: bytes, root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether the tree of ``size`` leaves begins with the one of ``old`` (RFC 9162, 2.1.4.2)."""
    if old > size or old < 0:
        return False
    if old == size:
        return not proof and old_root == root
    if old == 0:
        return not proof and old_root == EMPTY_ROOT
    steps: Iterator[bytes] = iter([old_root, *proof] if old & (old - 1) == 0 else proof)
    index, last = old - 1, size - 1
    while index & 1:
        index >>= 1
        last >>= 1
    before = after = next(steps, b"")
    for sibling in steps:
        if last == 0:
            return False
        if index & 1 or index == last:
            before, after = node_hash(sibling, before), node_hash(sibling, after)
            while not index & 1 and index:
                index >>= 1
                last >>= 1
        else:
            after = node_hash(after, sibling)
        index >>= 1
        last >>= 1
    return last == 0 and before == old_root and after == root


def _split(count: int) -> int:
    """The largest power of two below ``count``."""
    return 1 << (count - 1).bit_length() - 1
