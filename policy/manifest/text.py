"""Strings of a manifest: the characters that they may hold, and the display of a refused value.

A manifest is hostile input: a string of it ends in terminals, logs and file names. So control, bidi and format
characters are refused on parsing, and text that an error quotes is made visible and cut short.
"""

from __future__ import annotations

import datetime
import json
import re
import unicodedata

from msgspec import Struct
from pydantic_core import PydanticCustomError

STRING_CHARACTERS = 1024
_SHOWN_CHARACTERS = 120

# Cc controls, Cf format (bidi, zero width), Cs surrogates, Co private use, Cn unassigned (its display is
# undefined), Zl and Zp separators.
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_ASCII_TEXT = re.compile(r"[ -~]+")


def wrong(message: str, hint: str = "", *, at: int | str | None = None) -> PydanticCustomError:
    """A refusal that a validator raises; ``at`` is the index or key below the field that is to blame."""
    context: dict[str, object] = {"message": message, "hint": hint}
    if at is not None:
        context["at"] = at
    return PydanticCustomError("manifest", "{message}", context)


def visible(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """Text with hidden characters and backticks written as escapes, cut after ``limit`` characters."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(_escape(ch) if ch == "`" or unicodedata.category(ch) in HIDDEN else ch for ch in cut)


def _escape(ch: str) -> str:
    if ch == "`":
        return "\\x60"
    return ch.encode("unicode_escape").decode("ascii")


def toml(value: str | int | float | bool) -> str:
    """A value as TOML. A string needs JSON's escapes, and one for DEL, which JSON takes as it is (TOML 1.0)."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def quote(value: object) -> str:
    """A TOML value in backticks, as an author would recognise it."""
    if isinstance(value, str):
        return f"`{visible(value)}`"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, int):
        # str() of an int of more than 4,300 digits raises; TOML itself ends at 64 bits.
        return f"`{value}`" if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return f"`{value!r}`"
    if isinstance(value, datetime.date | datetime.time):
        return f"`{value.isoformat()}`"
    return kind_of(value)


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a float"),
    (str, "a string"),
    ((datetime.datetime, datetime.date, datetime.time), "a date or time"),
    (list, "an array"),
    (dict, "a table"),
)


def kind_of(value: object) -> str:
    """The TOML word for a value's type."""
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        return "an array of tables"
    return next((word for types, word in _KINDS if isinstance(value, types)), "a value")


def plain(value: str) -> str:
    """A non-empty string of at most 1,024 characters without hidden ones.

    Raises:
        PydanticCustomError: it is empty, too long, or holds a hidden character.
    """
    if not value or value.isspace():
        raise wrong("the string is empty" if not value else "the string holds only spaces", "give it a value")
    if len(value) > STRING_CHARACTERS:
        raise wrong(f"{quote(value)} has {len(value)} characters", f"at most {STRING_CHARACTERS} are accepted")
    return unhidden(value)


def unhidden(value: str) -> str:
    """A string without control, bidi, format, private-use and unassigned characters.

    Raises:
        PydanticCustomError: it holds one.
    """
    if _ASCII_TEXT.fullmatch(value):
        return value
    for ch in value:
        if unicodedata.category(ch) in HIDDEN:
            raise wrong(f"{quote(value)} holds the hidden character U+{ord(ch):04X}", "remove the character")
    return value


class Matching(Struct, frozen=True):
    """A validator: the whole string matches ``pattern``, which ``rule`` says in words; ``what`` names the value."""

    what: str
    pattern: str
    rule: str

    def __call__(self, value: str) -> str:
        """The string as it is.

        Raises:
            PydanticCustomError: it does not match.
        """
        if re.fullmatch(self.pattern, value):
            return value
        if not value:
            raise wrong(f"the {self.what} is empty", self.rule)
        raise wrong(f"{self.what} {quote(value)} is not accepted", self.rule)


def distance(a: str, b: str) -> int:
    """Damerau-Levenshtein: insertions, deletions, substitutions and swaps of neighbours, case ignored."""
    a, b = a.casefold(), b.casefold()
    last_row: dict[str, int] = {}
    top = len(a) + len(b)
    table = [[top] * (len(b) + 2) for _ in range(len(a) + 2)]
    for i in range(len(a) + 1):
        table[i + 1][1] = i
    for j in range(len(b) + 1):
        table[1][j + 1] = j
    for i, x in enumerate(a, 1):
        last_match = 0
        for j, y in enumerate(b, 1):
            k, m = last_row.get(y, 0), last_match
            cost = 0 if x == y else 1
            if not cost:
                last_match = j
            table[i + 1][j + 1] = min(
                table[i][j] + cost,
                table[i + 1][j] + 1,
                table[i][j + 1] + 1,
                table[k][m] + (i - k - 1) + 1 + (j - m - 1),
            )
        last_row[x] = i
    return table[-1][-1]


def nearest(word: str, known: tuple[str, ...], *, within: int = 2) -> str:
    """The known word that is at most ``within`` edits away, the nearest first, or the empty string."""
    near = [(distance(word, candidate), candidate) for candidate in known if abs(len(candidate) - len(word)) <= within]
    best = min(near, default=(within + 1, ""))
    return best[1] if best[0] <= within else ""
