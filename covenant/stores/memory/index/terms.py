"""Terms of a text in the index of words.

SQLite's tokenizer makes one word of a run of Han, kana or Hangul. So the index also has each character of a run, and
each pair of neighbours. A query of such a run is searched by its pairs.
"""

from __future__ import annotations

from typing import Final

from covenant.providers.embed.unspaced import CHARACTERS

# Characters in a part of a text: SQLite finds a character by counting from the start.
PART: Final = 64
# Parts that have pairs: as many characters as the default embedder reads.
PARTS: Final = 1024
OLD_NUMBERS: Final = "DROP TABLE IF EXISTS memory_numbers"
NUMBERS: Final = f"""
CREATE TABLE memory_numbers AS WITH RECURSIVE numbers (n) AS
    (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {PARTS}) SELECT n FROM numbers"""  # noqa: S608


def indexed(column: str) -> str:
    """Return the SQL expression of what the index has for a text: the text, and its characters and pairs.

    The first ``PART`` times ``PARTS`` characters have pairs. The expression is for triggers, which take no common table
    expressions (sqlite.org/lang_with.html), so the positions come from a table. Each inner LIMIT keeps SQLite from
    computing its values again for each character.
    """
    text, most = f"CAST({column} AS TEXT)", PART * PARTS
    return f"""CASE WHEN {text} GLOB '*{CHARACTERS}*' THEN {text} || char(10) || coalesce((
        SELECT group_concat(substr(part, b.n, 1) || ' ' || substr(part, b.n, 2), ' ')
        FROM (SELECT substr(w.text, (a.n - 1) * {PART} + 1, {PART + 1}) AS part
            FROM (SELECT substr({text}, 1, {most}) AS text, min(length({text}), {most}) AS size LIMIT 1) w
            JOIN memory_numbers a WHERE (a.n - 1) * {PART} < w.size LIMIT {PARTS}) JOIN memory_numbers b
        WHERE b.n <= {PART} AND b.n <= length(part) AND substr(part, b.n, 1) GLOB '{CHARACTERS}'
    ), '') ELSE {text} END"""  # noqa: S608
