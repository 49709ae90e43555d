"""The Merkle tree over a log's rows, as far as somebody asked for it, and what is proved with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from covenant.stores.audit import checkpoints, interface
from policy import errors
from policy.audit_log import chain, merkle, note, truncation

# Told of a new checkpoint. INVARIANT: it has a place that lasts before anybody sees it, and counts (``Notary.keep``)
# only then: of one size two must never differ.
Keep = Callable[[note.Note], None]


class Source(Protocol):
    """Where the rows are."""

    @property
    def head(self) -> chain.Head:
        """How far they go."""

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """The lines from an offset on, each with its own."""

    def index_of(self, event_id: str) -> int | None:
        """Which line, counted from 0, has this id."""


class Prover:
    """Makes the tree when it is first asked, and goes on from there: nobody pays for it who does not ask."""

    def __init__(self, source: Source, notes: checkpoints.Notary, public_key: Ed25519PublicKey) -> None:
        self._source = source
        self._notes = notes
        self._public_key = public_key
        self.forget()

    def forget(self) -> None:
        """Make the tree anew: the rows are others."""
        self._tree: merkle.Tree | None = None
        self._offset = 0
        self._rebased = False

    def tree(self) -> merkle.Tree:
        """The tree over every row that is acknowledged now.

        Raises:
            errors.LedgerError: the record that begins the log does not hold.
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
        """The checkpoint of the whole log."""
        tree = self.tree()
        return self._checkpoint(tree, keep)

    def prove(self, event_id: str, keep: Keep) -> interface.Proof | None:
        """That a row is there, under the newest checkpoint that covers it, or a new one."""
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
        """The proof that the log of ``old`` rows begins the one of ``size``.

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
    """The name of a log whose heads this key signs."""
    return f"covenant.local/audit/{chain.key_id(public_key)[:16]}"
