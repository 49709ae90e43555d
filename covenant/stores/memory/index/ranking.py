"""Two rankings as one: by cosine, and by words.

Reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009): a record's worth is the sum of 1 / (60 + rank) over
the rankings that it stands in. ``min_relevance`` is asked of the cosine, of whatever has been found by its words too.
Of equal worth, the better cosine comes first, then the newer, then the smaller id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from covenant.stores.memory.index.vectors import RESOLUTION, Near

_RRF: Final = 60
_WORDS: Final = re.compile(r"\w+")
# How many different words of a query are looked for.
MAX_WORDS: Final = 32
# A word that stands in more records than this tells little, and costs much.
COMMON: Final = 2000
# Of so many records in all the words of a query are ranked by: a query of many words costs no more than one of few.
MOST_RANKED: Final = 4 * COMMON


def depth(limit: int) -> int:
    """How far down each ranking is read for ``limit`` answers."""
    return max(4 * limit, 64)


def words(text: str) -> list[str]:
    """The different words of a query in their order, at most ``MAX_WORDS``."""
    return list(dict.fromkeys(_WORDS.findall(text.lower())))[:MAX_WORDS]


def telling(holders: Mapping[str, int]) -> list[str]:
    """The words to rank by, of those that stand in so many records each: none that is common, and the rarest first.

    In the order of the query: sums of weights are then the same whatever else is known of the words.
    """
    kept, room = set(), MOST_RANKED
    for term, count in sorted(holders.items(), key=lambda one: one[1]):
        if 0 < count <= min(COMMON, room):
            kept.add(term)
            room -= count
    return [term for term in holders if term in kept]


def match_expression(terms: Sequence[str]) -> str:
    """An FTS5 expression for any of the words.

    Each stands in double quotes, doubled within (sqlite.org/fts5.html, 3.1), so nothing of a text is ever syntax. A
    control character ends a text at SQLite's border, and is no part of a word.
    """
    quoted = ('"' + "".join(c for c in term if c.isprintable()).replace('"', '""') + '"' for term in terms)
    return " OR ".join(one for one in quoted if one != '""')


def fused(
    by_cosine: Sequence[Near], by_words: Mapping[str, int], scores: Mapping[str, float], *, min_relevance: float | None
) -> list[tuple[str, float]]:
    """(id, cosine) of what stands in either ranking, best first.

    ``by_words`` says when each was made, in the order of that ranking; ``scores`` are their cosines.
    """
    # What follows a product runs in a cold cache: each is looked at once, and compared as it lies there.
    found = {
        near.id: (-1 / (_RRF + rank), -near.score, -near.created_at, near.id) for rank, near in enumerate(by_cosine, 1)
    }
    for rank, (record_id, created_at) in enumerate(by_words.items(), 1):
        worth, score, time, _ = found.get(record_id) or (0.0, -scores.get(record_id, 0.0), -created_at, record_id)
        found[record_id] = (worth - 1 / (_RRF + rank), score, time, record_id)
    floor = (min_relevance or 0.0) - RESOLUTION
    return [(one[3], -one[1]) for one in sorted(found.values()) if not min_relevance or -one[1] >= floor]
