"""The filter of a view: words that a row must have, ``-words`` that it must not, and ``column:word``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Term(NamedTuple):
    """One word of a filter: in any column, or in the one named ``column``; with ``absent`` it must not be there."""

    word: str
    column: str = ""
    absent: bool = False


def parse(text: str, columns: Iterable[str]) -> tuple[Term, ...]:
    """Return the terms of a filter. A word before a colon is a column only if the view has one of that name."""
    known = {name.lower() for name in columns}
    found = []
    for given in text.lower().split():
        absent = len(given) > 1 and given.startswith("-")
        word = given[1:] if absent else given
        column, colon, rest = word.partition(":")
        named = bool(colon) and column in known
        found.append(Term(rest if named else word, column if named else "", absent))
    return tuple(found)


def matches(terms: Sequence[Term], columns: Sequence[str], cells: Sequence[str]) -> bool:
    """Whether a row with these cells meets every term."""
    for term in terms:
        among = [cell for name, cell in zip(columns, cells, strict=False) if term.column in ("", name.lower())]
        if any(term.word in cell.lower() for cell in among) == term.absent:
            return False
    return True
