"""The Merkle tree over a log's rows, built on demand, and proofs from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from covenant.stores.audit import checkpoints, interface
from policy import errors
from policy.audit_log import chain, merkle, note, truncation

# Called with each new checkpoint. INVARIANT: a checkpoint must be durable before it is given out, and only then counts
# (``Notary.keep``): two checkpoints of one size must never differ.
Keep = Callable[[note.Note], None]


class RowSource(Protocol):
    """Source of the log's rows."""

    @property
    def head(self) -> chain.Head:
        """The head: how far the rows go."""

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the lines from an offset on, each with its own offset."""

    def index_of(self, event_id: str) -> int | None:
        """Return the index, counted from 0, of the line with this id."""


class Prover:
    """Builds the tree on first use and extends it later, so a log without proofs has no cost for it."""

    def __init__(self, source: RowSource, notes: checkpoints.Notary, public_key: Ed25519PublicKey) -> None:
        self._source = source
        self._notes = notes
        self._public_key = public_key
        self.forget()

    def forget(self) -> None:
        """Drop the tree; the next use builds it from the changed rows."""
        self._tree: merkle.Tree | None = None
        self._offset = 0
        self._rebased = False

    def tree(self) -> merkle.Tree:
        """Return the tree over every row acknowledged now.

        Raises:
            errors.LedgerError: the record that begins the log does not verify.
        """
        tree = self._tree
        for offset, line in self._source.lines(self._offset):
            if tree is None or offset == 0:
                begun = truncation.frontier(line, self._public_key)
                if begun is None:
                    raise errors.LedgerError("the record that begins the log does not hold")
                tree, self._rebased = merkle.Tree(begun.size, begun.hashes), begun.size > 0
                if self._rebased:
                    self._offset = offset + len(line) + 1
                    continue
            tree.append(merkle.leaf_hash(line))
            self._offset = offset + len(line) + 1
        self._tree = tree = tree or merkle.Tree()
        return tree

    def checkpoint(self, keep: Keep) -> note.Note:
        """Return the checkpoint of the whole log."""
        tree = self.tree()
        return self._checkpoint(tree, keep)

    def prove(self, event_id: str, keep: Keep) -> interface.Proof | None:
        """Prove that a row is in the log, under the newest checkpoint that covers it, or a new one."""
        tree = self.tree()
        index = self._source.index_of(event_id)
        if index is None or (self._rebased and index == 0):
            return None
        leaf = tree.cut + index - self._rebased
        found = self._notes.newest(above=leaf)
        signed = found[1] if found else self._checkpoint(tree, keep)
        size = note.Checkpoint.parse(signed.text).size
        path = tuple(tree.inclusion(leaf, size))
        proof = merkle.Inclusion(leaf, size, tree.leaf(leaf), path)
        root = tree.root(size)
        self._notes.at(size, root)
        return interface.Proof(event_id, proof, root, signed)

    def consistency(self, old: int, size: int) -> list[bytes]:
        """Return the proof that the log of ``old`` rows begins the one of ``size`` rows.

        Raises:
            errors.NoteError: the log never had such a size, or rows before it were cut.
        """
        try:
            return self.tree().consistency(old, size)
        except ValueError as e:
            raise errors.NoteError(f"there is no such proof: {e}") from e

    def _checkpoint(self, tree: merkle.Tree, keep: Keep) -> note.Note:
        root = tree.root()
        found = self._notes.at(tree.size, root)
        if found is None:
            found = self._notes.sign(tree.size, root)
            keep(found)
        return found


def origin_of(public_key: Ed25519PublicKey) -> str:
    """Return the name of the log whose heads this key signs."""
    return f"covenant.local/audit/{chain.key_id(public_key)[:16]}"
