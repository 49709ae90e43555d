"""The interface of a memory store; ``tests/unit/covenant/stores/test_memory.py`` tests both implementations against it.

A store serves one space: the name of the embedder whose vectors may be compared with each other. Vectors of other
spaces, including version 1's, are kept unchanged and never compared; their records are still found by words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier

Mode = Literal["dry_run", "apply"]

# The names of the savepoints appear in replies and in the audit log (covenant-v1.md, sections 4 and 9).
COMPACT_SAVEPOINT = "compact_apply"
BACKFILL_SAVEPOINT = "backfill_receipt_correlation"


class Hit(NamedTuple):
    """A search result: a record and its cosine with the query; 0.0 if the two cannot be compared."""

    record: MemoryRecord
    score: float


@dataclass(frozen=True, slots=True)
class Room:
    """The limits of one owner: number of records, and bytes of text, metadata and vectors in them."""

    records: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ParentDetachment:
    """Remove a record's parent; with ``expected_parent``, only if that is the parent."""

    id: str
    expected_parent: str | None = None


@dataclass(frozen=True, slots=True)
class RecordDeletion:
    """Delete a record."""

    id: str


@dataclass(frozen=True, slots=True)
class ProvenanceBackfill:
    """Write ``metadata.provenance``; metadata that is no object moves to ``previous_metadata``."""

    id: str
    provenance: Any


Repair = ParentDetachment | RecordDeletion | ProvenanceBackfill


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no valid record: its row number, its id if it has one, and its problems."""

    row: int
    id: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of a repair: the record before and after; ``after`` is None for a deleted record.

    A row that is no valid record can only be deleted, and only without an ``owner``.
    """

    before: MemoryRecord | BadRow
    after: MemoryRecord | None
    changed: bool

    @property
    def would_change(self) -> bool:
        """Whether the command changes the record."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class CompactionCutoffs:
    """The cut-offs for deleting and marking. They are exclusive: a record made at the cut-off stays."""

    delete_working_before_ms: int | None = None
    delete_episodic_before_ms: int | None = None
    mark_longterm_stale_before_ms: int | None = None
    detach_stale_parents: bool = False
    marked_at_ms: int | None = None

    @property
    def empty(self) -> bool:
        """Whether it asks for no change."""
        cuts = (self.delete_working_before_ms, self.delete_episodic_before_ms, self.mark_longterm_stale_before_ms)
        return not self.detach_stale_parents and all(cut is None for cut in cuts)


@dataclass(frozen=True, slots=True)
class MemoryCompaction:
    """Sorted lists of ids, so that the same store and policy give the same result in a dry run or applied."""

    deleted: tuple[str, ...] = ()
    stale_marked: tuple[str, ...] = ()
    parents_detached: tuple[str, ...] = ()

    @property
    def would_change(self) -> bool:
        """Whether the plan changes any record."""
        return bool(self.deleted or self.stale_marked or self.parents_detached)


class Memory(Protocol):
    """Records by id. A change is durable when its call returns. A bad row is never returned and fails no call.

    ``owner`` is a public key in base58 and restricts every call to that owner's records; None means all owners.
    """

    @property
    def space(self) -> str:
        """The space whose vectors are compared."""
        ...

    async def put(self, record: MemoryRecord, *, room: Room | None = None) -> None:
        """Write a record, in place of one with the same id.

        Raises:
            errors.MemoryFullError: with it, its owner would have more than ``room``.
        """
        ...

    async def get(self, record_id: str) -> MemoryRecord | None:
        """Return the record with this id."""
        ...

    async def existing(self, ids: Sequence[str]) -> set[str]:
        """Return those of the ids that have rows, good or bad."""
        ...

    async def counts(self) -> dict[Tier, int]:
        """Return the number of rows of each tier, good or bad."""
        ...

    async def recent(
        self, tier: Tier | None, limit: int, *, owner: str | None = None, vectors: bool = True
    ) -> list[MemoryRecord]:
        """Return the newest first; records of the same time by id. ``vectors`` False: their embeddings are empty."""
        ...

    async def search(
        self,
        embedding: Sequence[float],
        text: str,
        tier: Tier | None,
        limit: int,
        min_relevance: float | None,
        *,
        owner: str | None = None,
    ) -> list[Hit]:
        """Return records similar to the embedding, fused with records that contain words of the text; see
        ``ranking``."""
        ...

    async def warm(self) -> None:
        """Read the data for the first search, unless it is too large. A concurrent search waits for it."""
        ...

    async def purge(self, tier: Tier | None, before_ms: int, *, owner: str | None = None) -> int:
        """Delete records created before ``before_ms``. Returns their number."""
        ...

    async def repair(
        self, command: Repair, *, apply: bool, owner: str | None = None, room: Room | None = None
    ) -> Repaired | None:
        """Plan a repair, and execute it if ``apply``. Returns None if there is no such record.

        Raises:
            errors.MemoryConflictError: the parent is not the expected one.
            errors.MemoryFullError: the record grew, and its owner would have more than ``room``.
        """
        ...

    async def compact(
        self, policy: CompactionCutoffs, *, reason: str, now_ms: int, apply: bool, owner: str | None = None
    ) -> MemoryCompaction:
        """Plan a compaction, and execute all of it or nothing if ``apply``."""
        ...

    async def promote(self, record_id: str, tier: Tier, *, at_ms: int, owner: str | None = None) -> Repaired | None:
        """Move a record up to ``tier``. Returns None if there is no such record.

        Raises:
            errors.MemoryConflictError: the record is in a higher tier already.
        """
        ...

    async def backfill(self, receipts: Sequence[SettlementReceipt], *, apply: bool) -> tuple[tuple[str, str], ...]:
        """Write to ``metadata.receipt_id`` the receipt that paid for a record. Returns (record id, receipt id); see
        ``plans``."""
        ...

    async def payables(self, *, owner: str | None = None) -> list[Payable]:
        """Return the fields of each record that settlement needs, without text and embedding."""
        ...

    async def bad_rows(self, limit: int) -> list[BadRow]:
        """Return rows that are not valid records."""
        ...

    async def close(self) -> None:
        """Close the store."""
        ...


@dataclass(frozen=True, slots=True)
class Payable:
    """The fields of a record that the backfill needs. ``receipt``: the one that its metadata already names."""

    id: str
    owner: str
    created_at: int
    receipt: str | None = None
