"""From bytes to TOML values: size, encoding, nesting and grammar, each refused with its line and column.

tomllib recurses on nested arrays and is quadratic in the parts of a dotted key, so both are bounded on the raw text
before it runs.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from typing import Any

from policy import errors
from policy.manifest import lines, text
from policy.package import MANIFEST_BYTES

NESTING = 16
KEYS = 10_000  # and tables, and items: bounds the time of tomllib and of the scanner
LINES = 20_000

_HIDE = re.compile(f"{lines.STRING}|{lines.COMMENT}", re.DOTALL)
_LONG_KEY = re.compile(rf"(?:\.[^.,\n=\[\]{{}}]*+){{{NESTING}}}")
# int() refuses more than 4,300 digits and tomllib passes that on without a place.
_LONG_NUMBER = re.compile(r"(?<![\w.+-])[+-]?[0-9][0-9_]{4300,}+")
# Controls, formats (bidi, zero width), line and paragraph separators. ASCII controls are not TOML anyway.
_UNREADABLE = frozenset({"Cc", "Cf", "Zl", "Zp"})
_BRACKET = re.compile(r"[\[\]{}]")
_PLACE = re.compile(r"(?P<reason>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)", re.DOTALL)
_TWICE = ("Cannot overwrite", "Cannot declare", "Duplicate inline", "Cannot mutate", "Cannot redefine")
# (how tomllib's message begins, our words, the mend): its own text repeats pieces of the document.
_REASONS = (
    ("Invalid value", "no TOML value", 'text needs quotes (key = "value"), booleans are true and false'),
    ("Invalid statement", "no TOML line", "a line is `key = value`, `[section]` or `# comment`"),
    ("Expected newline", "more than one key on a line", "write one key a line"),
    ("Expected '='", "no `=` after the key", "a line is `key = value`"),
    ("Expected ']", "a header without its closing bracket", "write `[section]` or `[[section]]`"),
    ("Expected", "a string that is not closed", "close the quotes"),
    ("Invalid initial character", "no key", "keys are letters, digits, `_` and `-`"),
    ("Unclosed array", "an array that is not closed", "close it with `]`"),
    ("Unclosed inline table", "an inline table that is not closed", "close it with `}` on the same line"),
    ("Unterminated string", "a string that is not closed", "close the quotes"),
    ("Illegal character", "a character that TOML does not allow", "close the quotes on the same line"),
    ("Found invalid character", "a character that TOML does not allow", "remove the character"),
    ("Unescaped", "an escape that TOML does not know", "write `\\\\`, or put the text in single quotes"),
    ("Escaped character", "an escape that is no character", "write a Unicode scalar value"),
    ("Invalid hex", "an escape that is no character", "write `\\u` and four hex digits"),
    ("Invalid date", "no date", 'a date that is text needs quotes: "2026-01-31"'),
    (_TWICE, "a key or table that is written twice", "keep one"),
)


def load(raw: bytes, file: str) -> tuple[str, dict[str, Any]]:
    """The text of a manifest and its values.

    Raises:
        errors.ManifestSyntaxError: too large, not UTF-8, NUL, byte order mark, too deep, too many keys, duplicate
            keys, or not TOML.
    """
    document = _decode(raw, file)
    _bound(document, file)
    try:
        return document, tomllib.loads(document)
    except (ValueError, OverflowError, RecursionError) as e:
        raise _grammar(str(e), document, file) from e


def _decode(raw: bytes, file: str) -> str:
    if len(raw) > MANIFEST_BYTES:
        raise errors.ManifestSyntaxError(
            f"the manifest is `{len(raw)}` bytes", hint=f"at most {MANIFEST_BYTES} are accepted", where=file
        )
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise errors.ManifestSyntaxError(
            f"the manifest begins with the byte order mark `{raw[:3].hex()}`",
            hint="save it as UTF-8 without a byte order mark",
            where=f"{file}:1:1",
        )
    nul = raw.find(b"\0")
    if nul >= 0:
        raise errors.ManifestSyntaxError(
            "the manifest holds the byte `0x00`",
            hint="a manifest is UTF-8 text",
            where=_at(raw, nul, file),
        )
    try:
        document = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise errors.ManifestSyntaxError(
            f"the byte `0x{raw[e.start]:02x}` is not UTF-8",
            hint="save the manifest as UTF-8",
            where=_at(raw, e.start, file),
        ) from None
    if not document.isascii():
        _refuse_unreadable(document, file)
    return document


def _refuse_unreadable(document: str, file: str) -> None:
    # In comments and sections of others too: U+2028 shows the rest of a comment as a line of its own, and a bidi
    # character turns a line round, so that a signer reads another manifest than the one that is parsed.
    found = {ch for ch in set(document) if ch not in "\t\r\n" and unicodedata.category(ch) in _UNREADABLE}
    if found:
        first = min(document.index(ch) for ch in found)
        raise errors.ManifestSyntaxError(
            f"the manifest holds the hidden character U+{ord(document[first]):04X}",
            hint="remove the character: an editor may show another text than the one that is signed",
            where=_point(document, first, file),
        )


def _point(document: str, offset: int, file: str) -> str:
    """``FILE:LINE:COLUMN`` of a character."""
    place = lines.place_at(document, offset)
    return f"{file}:{place.line}:{place.column}"


def _at(raw: bytes, offset: int, file: str) -> str:
    """``FILE:LINE:COLUMN`` of a byte; a byte before it that is no character counts as one."""
    before = raw[:offset].decode("utf-8", "replace")
    return _point(before, len(before), file)


def _bound(document: str, file: str) -> None:
    # Strings become one quote and comments vanish: what is left is structure, on the same lines except that strings of
    # several lines are folded.
    skeleton = _HIDE.sub('"', document)
    if max(skeleton.count(mark) for mark in "=[{,") > KEYS:
        raise errors.ManifestSyntaxError(
            f"the manifest has more than `{KEYS}` keys, tables or items", hint="shorten it", where=file
        )
    if document.count("\n") > LINES:
        raise errors.ManifestSyntaxError(f"the manifest has more than `{LINES}` lines", hint="shorten it", where=file)
    depth = deepest = 0
    for bracket in _BRACKET.findall(skeleton):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    if deepest > NESTING:
        raise errors.ManifestSyntaxError(
            f"tables and arrays are nested `{deepest}` deep", hint=f"at most {NESTING}", where=_deep(document, file)
        )
    if skeleton.count(".") > NESTING and _LONG_KEY.search(skeleton):
        raise errors.ManifestSyntaxError(
            f"a key has more than `{NESTING}` parts", hint="shorten it", where=_place(_LONG_KEY, document, file)
        )


def _deep(document: str, file: str) -> str:
    """The place of the first bracket that is nested too deep."""
    depth, start = 0, 0
    for match in re.finditer(rf"(?P<hidden>{_HIDE.pattern})|[\[\]{{}}]", document, re.DOTALL):
        if match["hidden"] is None:
            depth = depth + 1 if match[0] in "[{" else max(0, depth - 1)
            if depth > NESTING:
                start = match.start()
                break
    return _point(document, start, file)


def _place(pattern: re.Pattern[str], document: str, file: str) -> str:
    """The place of a match: the search again, with every string kept at its length."""
    kept = _HIDE.sub(lambda m: re.sub(r"[^\n]", '"', m[0]), document)
    match = pattern.search(kept)
    return _point(kept, match.start() if match else 0, file)


def _grammar(reason: str, document: str, file: str) -> errors.ManifestSyntaxError:
    """tomllib's error in our words: the offending line in backticks, and for a key given twice both places."""
    place = _PLACE.fullmatch(reason)
    if place is None:
        long_number = _LONG_NUMBER.search(document)
        return errors.ManifestSyntaxError(
            "a number has more than `4300` digits" if long_number else "the manifest is not TOML",
            hint="integers end at 9223372036854775807" if long_number else "see https://toml.io/en/v1.0.0",
            where=_place(_LONG_NUMBER, document, file),
        )
    if place["reason"].startswith(_TWICE):
        twice = lines.scan(document).duplicates
        if twice:
            path, first, again = twice[0]
            return errors.ManifestSyntaxError(
                f"{text.quote(lines.dotted(path))} is written twice",
                hint=f"it is first written on line {first.line}, column {first.column}: keep one",
                where=f"{file}:{again.line}:{again.column}",
            )
    rows = document.replace("\r\n", "\n").split("\n")
    number = min(int(place["line"]), len(rows)) if place["line"] else len(rows)
    column = int(place["column"]) if place["column"] else len(rows[-1]) + 1
    row = rows[number - 1].strip()
    if not row and number > 1:
        # The fault shows where an empty line begins: what lacks its end stands on the line before.
        number, row, column = number - 1, rows[number - 2].strip(), len(rows[number - 2]) + 1
    reason = place["reason"]
    if place["line"] is None and reason.startswith("Invalid value"):
        reason = "Unclosed array"
    found = next(
        ((words, hint) for start, words, hint in _REASONS if reason.startswith(start)),
        ("no TOML", "see https://toml.io/en/v1.0.0"),
    )
    where = f"{file}:{number}:{column}"
    return errors.ManifestSyntaxError(f"{text.quote(row)} holds {found[0]}", hint=found[1], where=where)
