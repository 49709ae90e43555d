"""Memory without a file: for tests, and for a daemon without files."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from covenant.providers.embed import unspaced
from covenant.stores.memory import interface, plans, quotas, rows
from covenant.stores.memory.index import ranking, vectors
from covenant.stores.memory.index.vectors import Matrices, Near, RecordVectors
from covenant.stores.memory.interface import (
    BadRow,
    CompactionCutoffs,
    Hit,
    MemoryCompaction,
    Repair,
    Repaired,
    Room,
)
from covenant.wire.types import MemoryRecord, SettlementReceipt, Tier

# FTS5's bm25 (sqlite.org/fts5.html, 5.1.1).
_K1: Final = 1.2
_B: Final = 0.75


class InMemory:
    """``Memory`` in dictionaries."""

    def __init__(self, *, space: str = "") -> None:
        self._space = space
        self._records: dict[str, MemoryRecord] = {}
        self._words: dict[str, Counter[str]] = {}
        self._matrices = Matrices()

    @property
    def space(self) -> str:
        """The space whose vectors are compared."""
        return self._space

    async def close(self) -> None:
        """Nothing is held."""

    async def put(self, record: MemoryRecord, *, room: Room | None = None) -> None:
        """Write a record, in the place of the one of the same id.

        Raises:
            errors.MemoryFullError: with it, its owner would have more than ``room``.
        """
        if room is not None:
            held = [*self._among(None, record.owner.pubkey), record]
            quotas.check(room, len(held), sum(quotas.size_of(rows.encode(one)) for one in held))
        self._keep(record)

    def _keep(self, record: MemoryRecord) -> None:
        # What a row would hold: numbers as float32, and what no row can hold is refused alike.
        row = rows.encode(record)
        read = rows.parse((0, *row))
        assert isinstance(read, MemoryRecord)
        self._records[record.id] = read
        self._words[record.id] = Counter(_terms(record.text) + _unspaced(record.text))
        if read.embedding:
            vector = np.asarray(read.embedding, dtype=np.float32)
            self._matrices.put(RecordVectors(read.id, read.tier, read.owner.pubkey, read.created_at, vector))
        else:
            self._matrices.discard(read.id)

    def _drop(self, record_id: str) -> None:
        del self._records[record_id], self._words[record_id]
        self._matrices.discard(record_id)

    def _of(self, record_id: str, owner: str | None) -> MemoryRecord | None:
        record = self._records.get(record_id)
        return record if record is not None and owner in (None, record.owner.pubkey) else None

    async def get(self, record_id: str) -> MemoryRecord | None:
        """The record of an id."""
        return self._records.get(record_id)

    async def existing(self, ids: Sequence[str]) -> set[str]:
        """Which of the ids are those of records."""
        return {record_id for record_id in ids if record_id in self._records}

    async def counts(self) -> dict[Tier, int]:
        """How many records each tier has."""
        return {tier: len(self._among(tier, None)) for tier in Tier}

    def _among(self, tier: Tier | None, owner: str | None) -> list[MemoryRecord]:
        return [r for r in self._records.values() if tier in (None, r.tier) and owner in (None, r.owner.pubkey)]

    async def recent(
        self, tier: Tier | None, limit: int, *, owner: str | None = None, vectors: bool = True
    ) -> list[MemoryRecord]:
        """The newest first; of the same moment, by id."""
        found = sorted(self._among(tier, owner), key=lambda r: (-r.created_at, r.id))[:limit]
        return found if vectors else [one.model_copy(update={"embedding": ()}) for one in found]

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
        """Return records similar to the embedding, fused with records that contain words of the text.

        See ``ranking``.
        """
        if limit <= 0:
            return []
        depth = ranking.depth(limit)
        by_words = self._by_words(text, tier, depth, owner)
        by_cosine: list[Near] = []
        scores: dict[str, float] = {}
        query = vectors.query_vector(embedding)
        matrix = None if query is None else self._matrices.matrix(len(query))
        if query is not None and matrix is not None:
            by_cosine = matrix.best(query, depth, tier=tier, owner=owner, floor=min_relevance or 0.0)
            scores = matrix.scores(query, by_words)
        order = ranking.fused(by_cosine, by_words, scores, min_relevance=min_relevance)
        return [Hit(self._records[record_id], score) for record_id, score in order[:limit]]

    async def warm(self) -> None:
        """Nothing has to be read."""

    def _by_words(self, text: str, tier: Tier | None, depth: int, owner: str | None) -> dict[str, int]:
        terms = [term for word in ranking.words(text) for term in _terms(word)]
        holders = {term: sum(term in counts for counts in self._words.values()) for term in terms}
        among = [self._words[record.id] for record in self._among(None, owner)]
        telling = ranking.telling({term: sum(term in counts for counts in among) for term in terms})
        total = len(self._records)
        average = sum(counts.total() for counts in self._words.values()) / total if total else 0.0
        found = []
        for record in self._among(tier, owner):
            counts = self._words[record.id]
            length = _K1 * (1 - _B + _B * counts.total() / average) if average else _K1
            worth = 0.0
            for term in telling:
                rarity = max(math.log((total - holders[term] + 0.5) / (holders[term] + 0.5)), 1e-6)
                worth += rarity * counts[term] * (_K1 + 1) / (counts[term] + length)
            if worth:
                found.append((-worth, -record.created_at, record.id))
        return {record_id: -time for _, time, record_id in sorted(found)[:depth]}

    async def purge(self, tier: Tier | None, before_ms: int, *, owner: str | None = None) -> int:
        """Delete what was made before; how many."""
        gone = [record.id for record in self._among(tier, owner) if record.created_at < before_ms]
        for record_id in gone:
            self._drop(record_id)
        return len(gone)

    async def repair(
        self, command: Repair, *, apply: bool, owner: str | None = None, room: Room | None = None
    ) -> Repaired | None:
        """Return the result of the command, and apply it if ``apply``; None when there is no such record."""
        before = self._of(command.id, owner)
        if before is None:
            return None
        after = plans.repaired(before, command)
        changed = apply and after != before
        if changed and after is None:
            self._drop(before.id)
        elif changed and after is not None:
            self._check_grown(before, after, room)
            self._keep(after)
        return Repaired(before, after, changed)

    def _check_grown(self, before: MemoryRecord, after: MemoryRecord, room: Room | None) -> None:
        by = quotas.size_of(rows.encode(after)) - quotas.size_of(rows.encode(before))
        if room is not None and by > 0:
            held = self._among(None, after.owner.pubkey)
            quotas.check(room, len(held), by + sum(quotas.size_of(rows.encode(one)) for one in held))

    async def promote(self, record_id: str, tier: Tier, *, at_ms: int, owner: str | None = None) -> Repaired | None:
        """Move a record up to ``tier``; None when there is none."""
        before = self._of(record_id, owner)
        if before is None:
            return None
        after = plans.promoted(before, tier)
        self._keep(after)
        return Repaired(before, after, after != before)

    async def compact(
        self, policy: CompactionCutoffs, *, reason: str, now_ms: int, apply: bool, owner: str | None = None
    ) -> MemoryCompaction:
        """Return the result of the policy, and apply it if ``apply``."""
        marked_at_ms = now_ms if policy.marked_at_ms is None else policy.marked_at_ms
        plan = plans.compaction(map(plans.line, self._records.values()), policy, owner=owner)
        if apply:
            for record_id in plan.deleted:
                self._drop(record_id)
            for record_id in plan.parents_detached:
                self._keep(self._records[record_id].model_copy(update={"parent": None}))
            for record_id in plan.stale_marked:
                self._keep(plans.stale(self._records[record_id], marked_at_ms=marked_at_ms, reason=reason))
        return plan

    async def backfill(self, receipts: Sequence[SettlementReceipt], *, apply: bool) -> tuple[tuple[str, str], ...]:
        """Write into ``metadata.receipt_id`` what receipt paid for a record; see ``plans``."""
        found = plans.correlations([plans.payable(r) for r in self._records.values()], receipts)
        for record_id, receipt_id in found if apply else ():
            self._keep(plans.correlated(self._records[record_id], receipt_id))
        return found

    async def payables(self, *, owner: str | None = None) -> list[interface.Payable]:
        """Return the data that settlement needs about each record."""
        return [plans.payable(one) for one in self._records.values() if owner in {None, one.owner.pubkey}]

    async def bad_rows(self, limit: int) -> list[BadRow]:
        """None: what is no record never came in."""
        return []


def _terms(text: str) -> list[str]:
    """The tokens that FTS5's unicode61 makes: runs of letters and digits, lower case, without diacritics."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))
    return "".join(c if c.isalnum() else " " for c in plain).split()


def _unspaced(text: str) -> list[str]:
    """Return the characters and pairs of scripts without spaces, which the index has beside the tokens."""
    runs = (character for character in text if unspaced.pairs(character))
    return [token for single in runs for token in _terms(single)] + [
        token for pair in _pairs_of(text) for token in _terms(pair)
    ]


def _pairs_of(text: str) -> list[str]:
    return [text[n : n + 2] for n, character in enumerate(text) if unspaced.pairs(character)]
