"""Combine two rankings, by cosine and by words, into one.

Reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009): a record's value is the sum of 1 / (60 + rank) over
the rankings that contain it. ``min_relevance`` limits the cosine, also of records found by words. Records of equal
value are sorted by better cosine, then newer, then smaller id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from covenant.providers.embed import unspaced
from covenant.stores.memory.index.vectors import RESOLUTION, Near

_RRF: Final = 60
_WORDS: Final = re.compile(r"\w+")
# The most distinct words of a query that are searched.
MAX_WORDS: Final = 32
# A word in more records than this discriminates little and costs much.
COMMON: Final = 2000
# The most records in all for the ranked words of a query: a query of many words costs no more than one of few.
MOST_RANKED: Final = 4 * COMMON


def depth(limit: int) -> int:
    """Return how many items of each ranking are read for ``limit`` results."""
    return max(4 * limit, 64)


def words(text: str) -> list[str]:
    """Return the distinct words of a query in their order, then its pairs of characters, at most ``MAX_WORDS``."""
    text = text.lower()
    return list(dict.fromkeys((*_WORDS.findall(text), *unspaced.pairs(text))))[:MAX_WORDS]


def telling(holders: Mapping[str, int]) -> list[str]:
    """Select the words to rank by from each word's number of records: no common word, and the rarest first.

    The result keeps the order of the query, so that sums of weights do not depend on the counts.
    """
    kept, room = set(), MOST_RANKED
    for term, count in sorted(holders.items(), key=lambda one: one[1]):
        if 0 < count <= min(COMMON, room):
            kept.add(term)
            room -= count
    return [term for term in holders if term in kept]


def match_expression(terms: Sequence[str]) -> str:
    """Return an FTS5 expression that matches any of the words.

    Each word is in double quotes, with quotes doubled (sqlite.org/fts5.html, 3.1), so text is never parsed as syntax.
    Control characters are dropped: SQLite's API ends a text there, and they are no part of a word.
    """
    quoted = ('"' + "".join(c for c in term if c.isprintable()).replace('"', '""') + '"' for term in terms)
    return " OR ".join(one for one in quoted if one != '""')


def fused(
    by_cosine: Sequence[Near], by_words: Mapping[str, int], scores: Mapping[str, float], *, min_relevance: float | None
) -> list[tuple[str, float]]:
    """Return (id, cosine) of the records in either ranking, best first.

    ``by_words`` maps ids to creation times, in the order of that ranking; ``scores`` are their cosines.
    """
    # Code after a matrix product runs in a cold cache: read each item once and compare tuples directly.
    found = {
        near.id: (-1 / (_RRF + rank), -near.score, -near.created_at, near.id) for rank, near in enumerate(by_cosine, 1)
    }
    for rank, (record_id, created_at) in enumerate(by_words.items(), 1):
        worth, score, time, _ = found.get(record_id) or (0.0, -scores.get(record_id, 0.0), -created_at, record_id)
        found[record_id] = (worth - 1 / (_RRF + rank), score, time, record_id)
    floor = (min_relevance or 0.0) - RESOLUTION
    return [(one[3], -one[1]) for one in sorted(found.values()) if not min_relevance or -one[1] >= floor]
