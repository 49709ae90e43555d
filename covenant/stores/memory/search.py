"""One search in a durable store, by similarity and by words, in a thread of its own.

Another thread queries the words over another connection while numpy computes the product; neither holds Python's lock
meanwhile. The records are read and parsed in the thread that computed the product, so that a search makes one round
trip to a thread.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from covenant.stores.memory import rows, sqlite
from covenant.stores.memory.index import ranking, vectors
from covenant.stores.memory.index.threads import Thread
from covenant.stores.memory.index.vectors import Matrices
from covenant.stores.memory.interface import Hit
from covenant.wire.types import MemoryRecord, Tier

# Additional results, to replace records that are deleted before they are read.
_SPARE: Final = 8
# One read of the owner's rows, instead of one read for each row that has a word.
_OWNED: Final = "+f.rowid IN (SELECT rowid FROM memories WHERE owner_pubkey = ?)"
# The most words whose number of records is cached.
_MOST_COUNTED: Final = 4096
# Words are counted this far beyond the limit of common words, so that as many changes need no new count.
BEYOND: Final = 256


# The creation times of the records with the words, best first; None if there are no words.
Words = Future[dict[str, int]] | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A query, and the records that it covers."""

    text: str
    tier: Tier | None
    limit: int
    min_relevance: float | None
    owner: str | None

    def admits(self, record: MemoryRecord) -> bool:
        """Whether the search covers this record."""
        return self.tier in (None, record.tier) and self.owner in (None, record.owner.pubkey)


class Searcher:
    """Two threads, each with a read-only connection: one for words, one for the rest."""

    def __init__(self, path: Path) -> None:
        with contextlib.ExitStack() as stack:
            self._words = WordIndex(stack.enter_context(contextlib.closing(sqlite.reading(path))))
            self._records = stack.enter_context(contextlib.closing(sqlite.reading(path)))
            self.thread = stack.enter_context(contextlib.closing(Thread("memory-search")))
            self._beside = stack.enter_context(contextlib.closing(Thread("memory-words")))
            self._open = stack.pop_all()

    def close(self) -> None:
        """Close the file after the last search."""
        self._open.close()

    def committed(self, rows: int) -> None:
        """Record our commit, which wrote or deleted ``rows`` rows and changed no words of others."""
        self._words.committed(rows)

    def begin(self, asked: Asked) -> Words:
        """Start the query of the words."""
        terms = ranking.words(asked.text)
        if not terms:
            return None
        depth = ranking.depth(asked.limit)
        return self._beside.begin(lambda: self._words.best(terms, asked, depth), asked.owner)

    def hits(
        self, asked: Asked, words: Words, embedding: Sequence[float] = (), matrices: Matrices | None = None
    ) -> list[Hit]:
        """Return the records; runs in ``thread``. Uses words alone unless there are matrices and the query has a
        vector."""
        vector = vectors.query_vector(embedding)
        matrix = None if matrices is None or vector is None else matrices.matrix(len(vector))
        if matrix is None or vector is None:
            found = words.result() if words is not None else {}
            return self._hits(ranking.fused([], found, {}, min_relevance=asked.min_relevance), asked)
        # Without a second ranking this is the result, plus spare records for those deleted meanwhile.
        depth = ranking.depth(asked.limit)
        count = depth if words is not None else min(depth, asked.limit + _SPARE)
        near = matrix.best(vector, count, tier=asked.tier, owner=asked.owner, floor=asked.min_relevance or 0.0)
        if words is None:
            return self._hits([(one.id, one.score) for one in near], asked)
        found = words.result()
        order = ranking.fused(near, found, matrix.scores(vector, found), min_relevance=asked.min_relevance)
        return self._hits(order, asked)

    def _hits(self, order: Sequence[tuple[str, float]], asked: Asked) -> list[Hit]:
        """Read only the results whole; a record that was deleted or moved meanwhile is replaced by the next."""
        hits: list[Hit] = []
        room = sqlite.MOST_HELD_BYTES
        while order and len(hits) < asked.limit and room > 0:
            count = min(asked.limit - len(hits), sqlite.PAGE)
            page, order = order[:count], order[count:]
            known = records(self._records, [record_id for record_id, _ in page])
            hits += [
                Hit(known[record_id], score)
                for record_id, score in page
                if record_id in known and asked.admits(known[record_id])
            ]
            room -= sum(len(record.text) for record in known.values())
        return hits


class _Count(NamedTuple):
    """The number of records with a word, and of rows written until then. Each row written since may have changed it by
    one."""

    number: int
    at: int

    def says(self, now: int) -> bool:
        """Whether the count still decides if a word is common."""
        since = now - self.at
        return not since or self.number > ranking.COMMON + since or 0 < self.number <= ranking.COMMON - since


class WordIndex:
    """The index of words, over a separate connection used by one thread."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        # The number of an owner's records with each word, counted up to a limit.
        self._holders: dict[tuple[str | None, str], _Count] = {}
        # The number of our commits and of the rows they wrote; the loop replaces the pair in one atomic step.
        self._ours = (0, 0)
        # The state at the last count: SQLite's data_version, and our commits.
        self._seen = (-1, -1)

    def committed(self, rows: int) -> None:
        """Record our commit, and the number of rows that it wrote or deleted."""
        commits, before = self._ours
        self._ours = (commits + 1, before + rows)

    def best(self, terms: Sequence[str], asked: Asked, depth: int) -> dict[str, int]:
        """Return the creation times of the records with the words, best first."""
        now = self._count_all(terms, asked.owner)
        telling = ranking.telling({term: self._at_most(asked.owner, term, now) for term in terms})
        expression = ranking.match_expression(telling)
        if not expression:
            return {}
        where, values = sqlite.where(tier=asked.tier, owner=asked.owner, table="m")
        if asked.owner is not None and any(self._is_common(term) for term in telling):
            where, values = f"{where} AND {_OWNED}", [*values, asked.owner]
        found = self._db.execute(
            f"SELECT m.id, m.created_at FROM memory_fts f JOIN memories m ON m.rowid = f.rowid AND m.id = f.id "  # noqa: S608
            f"WHERE memory_fts MATCH ? AND {where} ORDER BY f.rank, m.created_at DESC, m.id LIMIT ?",
            (expression, *values, depth),
        )
        return {str(row[0]): row[1] for row in found.fetchall() if isinstance(row[1], int)}

    def _is_common(self, term: str) -> bool:
        """Whether a counted word is in many records of all owners together."""
        return self._holders[None, term].number > ranking.COMMON

    def _at_most(self, owner: str | None, term: str, now: int) -> int:
        """Return the most records that a counted word can be in by now."""
        number, at = self._holders[owner, term]
        return number + now - at

    def _count_all(self, terms: Sequence[str], owner: str | None) -> int:
        """Count the words up to the limit. Returns the number of our written rows that the counts include.

        With an owner only its own records count: a caller must not learn how many others have a word. A count is reused
        while later writes cannot have changed its result: one count of an owner's word takes longer than the rest of a
        search.
        """
        # INVARIANT: read our commits first: a commit after this line counts as one of another process.
        commits, now = self._ours
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if (version != self._seen[0] and commits == self._seen[1]) or len(self._holders) > _MOST_COUNTED:
            self._holders = {}
        self._seen = (version, commits)
        # How to query an owner's records depends on the number of all.
        for whose in dict.fromkeys((None, owner)):
            known = [term for term in terms if (whose, term) in self._holders and self._holders[whose, term].says(now)]
            self._count([term for term in terms if term not in known], whose, now)
            rare = [term for term in terms if self._holders[whose, term].number <= ranking.COMMON]
            if sum(self._at_most(whose, term, now) for term in rare) > ranking.MOST_RANKED:
                # The selection of ranked words may depend on one more or less, so count these exactly.
                self._count([term for term in rare if self._holders[whose, term].at != now], whose, now)
        return now

    def _count(self, terms: Sequence[str], owner: str | None, now: int) -> None:
        statements: list[str] = []
        values: list[object] = []
        for term in terms:
            held = "memory_fts f WHERE memory_fts MATCH ?"
            values.append(ranking.match_expression([term]) or '""')
            if owner is not None:
                # A rare word: read each of its rows. A common word has nearly only rows of others, so read the owner's
                # rows.
                one_by_one = "memory_fts f CROSS JOIN memories m ON m.rowid = f.rowid"
                one_by_one += " WHERE memory_fts MATCH ? AND m.owner_pubkey = ?"
                held = f"{held} AND {_OWNED}" if self._is_common(term) else one_by_one
                values.append(owner)
            statements.append(f"SELECT count(*) FROM (SELECT 1 FROM {held} LIMIT ?)")  # noqa: S608
            values.append(ranking.COMMON + BEYOND + 1)
        if statements:
            found = self._db.execute(" UNION ALL ".join(statements), values).fetchall()
            counts = (_Count(int(row[0]), now) for row in found)
            self._holders.update(zip(((owner, term) for term in terms), counts, strict=True))


def records(db: sqlite3.Connection, ids: Sequence[str]) -> dict[str, MemoryRecord]:
    """Return the records that still exist. ``ids`` has at most ``sqlite.PAGE`` items."""
    sayable = [one for one in ids if sqlite.sayable(one)]
    marks = ", ".join("?" * len(sayable))
    found = db.execute(f"{rows.SELECT} WHERE id IN ({marks})", sayable).fetchall()
    return {one.id: one for row in found if isinstance(one := rows.parse(row), MemoryRecord)}
