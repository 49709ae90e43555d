"""What every store of memory does; ``tests/unit/covenant/stores/test_memory.py`` holds both implementations to it.

A store serves one space: the name of the embedder whose vectors may be compared with each other. Vectors of other
spaces, version 1's among them, are kept as they are and never compared; their records are still found by their words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier

Mode = Literal["dry_run", "apply"]

# The names of the savepoints go over the wire and into the audit log (covenant-v1.md, sections 4 and 9).
COMPACT_SAVEPOINT = "compact_apply"
BACKFILL_SAVEPOINT = "backfill_receipt_correlation"


class Hit(NamedTuple):
    """A record that was found, and its cosine with the query; 0.0 where the two cannot be compared."""

    record: MemoryRecord
    score: float


@dataclass(frozen=True, slots=True)
class Room:
    """How many records one owner may have, and how many bytes of text, metadata and vectors in them."""

    records: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DetachParent:
    """Take a record's parent away; when ``expected_parent`` is given, only if it is that one."""

    id: str
    expected_parent: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteRecord:
    """Delete a record."""

    id: str


@dataclass(frozen=True, slots=True)
class BackfillProvenance:
    """Write ``metadata.provenance``; metadata that is no object is kept as ``previous_metadata``."""

    id: str
    provenance: Any


Repair = DetachParent | DeleteRecord | BackfillProvenance


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no record: where it lies, its id as far as it has one, and what is wrong with it."""

    row: int
    id: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair does or did: the record before and after, ``after`` None where it is deleted.

    A row that is no record can be deleted, for everybody's eyes only.
    """

    before: MemoryRecord | BadRow
    after: MemoryRecord | None
    changed: bool

    @property
    def would_change(self) -> bool:
        """Whether the command makes a difference."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """What goes and what is marked. Times are exclusive: a record made at the cut-off stays."""

    delete_working_before_ms: int | None = None
    delete_episodic_before_ms: int | None = None
    mark_longterm_stale_before_ms: int | None = None
    detach_stale_parents: bool = False
    marked_at_ms: int | None = None

    @property
    def empty(self) -> bool:
        """Whether it asks for nothing."""
        cuts = (self.delete_working_before_ms, self.delete_episodic_before_ms, self.mark_longterm_stale_before_ms)
        return not self.detach_stale_parents and all(cut is None for cut in cuts)


@dataclass(frozen=True, slots=True)
class Compacted:
    """Ids, each list sorted, so that the same store and policy give the same answer dry or applied."""

    deleted: tuple[str, ...] = ()
    stale_marked: tuple[str, ...] = ()
    parents_detached: tuple[str, ...] = ()

    @property
    def would_change(self) -> bool:
        """Whether the plan does anything."""
        return bool(self.deleted or self.stale_marked or self.parents_detached)


class Memory(Protocol):
    """Records by id. What ``await`` returned for is on disk. A bad row is never answered and never stops anything.

    ``owner`` is a public key in base58 and restricts every call to that owner's records; None is everybody's.
    """

    @property
    def space(self) -> str:
        """The space whose vectors are compared."""
        ...

    async def put(self, record: MemoryRecord, *, room: Room | None = None) -> None:
        """Write a record, in the place of the one of the same id.

        Raises:
            errors.MemoryFullError: with it, its owner would have more than ``room``.
        """
        ...

    async def get(self, record_id: str) -> MemoryRecord | None:
        """The record of an id."""
        ...

    async def existing(self, ids: Sequence[str]) -> set[str]:
        """Which of the ids are those of rows, good or bad."""
        ...

    async def counts(self) -> dict[Tier, int]:
        """How many rows each tier has, good or bad."""
        ...

    async def recent(self, tier: Tier | None, limit: int, *, owner: str | None = None) -> list[MemoryRecord]:
        """The newest first; of the same moment, by id."""
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
        """What is like the embedding, fused with what has words of the text; see ``ranking``."""
        ...

    async def warm(self) -> None:
        """Read what the first search needs, unless that is much. A search that comes meanwhile waits for it."""
        ...

    async def purge(self, tier: Tier | None, before_ms: int, *, owner: str | None = None) -> int:
        """Delete what was made before; how many."""
        ...

    async def repair(
        self, command: Repair, *, apply: bool, owner: str | None = None, room: Room | None = None
    ) -> Repaired | None:
        """What the command does, done when ``apply``; None when there is no such record.

        Raises:
            errors.MemoryConflictError: the parent is not the expected one.
            errors.MemoryFullError: the record grew, and its owner would have more than ``room``.
        """
        ...

    async def compact(
        self, policy: CompactionPolicy, *, reason: str, now_ms: int, apply: bool, owner: str | None = None
    ) -> Compacted:
        """What the policy does, done when ``apply``, all of it or nothing."""
        ...

    async def promote(self, record_id: str, tier: Tier, *, at_ms: int, owner: str | None = None) -> Repaired | None:
        """Move a record up to ``tier``; None when there is none.

        Raises:
            errors.MemoryConflictError: the record stands in a higher tier already.
        """
        ...

    async def backfill(self, receipts: Sequence[SettlementReceipt], *, apply: bool) -> tuple[tuple[str, str], ...]:
        """Write into ``metadata.receipt_id`` what receipt paid for a record: (record id, receipt id); see ``plans``."""
        ...

    async def payables(self, *, owner: str | None = None) -> list[Payable]:
        """What settlement has to know of each record, without its text and embedding."""
        ...

    async def bad_rows(self, limit: int) -> list[BadRow]:
        """Rows that are no records."""
        ...

    async def close(self) -> None:
        """Let go of what is held."""
        ...


@dataclass(frozen=True, slots=True)
class Payable:
    """What the backfill has to know of a record: ``receipt`` is the one that its metadata names already."""

    id: str
    owner: str
    created_at: int
    receipt: str | None = None
