"""On which line and column of a TOML document each key, table, value and array item stands.

Values come from tomllib, which keeps no places; this scanner runs only when an error is printed or ``explain`` asks.
It reads documents that tomllib accepts exactly as tomllib does (tests/property/policy/manifest/test_lines.py); of
others it reads what it can and stops. It also finds keys that are written twice, which tomllib reports without their
name.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

Path = tuple[str | int, ...]


class Place(NamedTuple):
    """Line and column, both counted from 1; a column is one character (code point), a tab too."""

    line: int
    column: int


# Every alternative of a string matches the text behind its quote, closed or not: a failed match would be tried
# again from the next quote, which is quadratic. The loops are unrolled and not possessive: Python 3.11 loses its
# place when the body of a possessive loop fails half-way (tests/unit/policy/manifest/test_lines.py has the case).
STRING = (
    r'"""[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*(?:"{3,5}|\\?\Z)'
    r"|'''[^']*+(?:'(?!'')[^']*+)*(?:'{3,5}|\Z)"
    r'|"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*"?'
    r"|'[^'\n]*+'?"
)
COMMENT = r"#[^\n]*+"
_TOKEN = re.compile(
    rf"(?P<string>{STRING})|(?P<skip>{COMMENT}|[ \t]++)|(?P<mark>[\n\[\]{{}},=.])"
    r"""|(?P<bare>[^\s"'#\[\]{},=.]++)|(?P<other>.)""",
    re.DOTALL,
)
_MAX_DEPTH = 64
_DOTTED = re.compile(r"([^.\[\]]+)|\[([0-9]+)\]")


@dataclass(frozen=True)
class TomlScan:
    """Where things stand, by path; and (path, first place, second place) of keys that are written twice.

    ``keys`` holds the key of a value, the last part of a table's header (that of an array's item likewise), the part
    of a longer key or header that implies a table, and the beginning of an array's item. ``values`` holds where the
    value of a key or an item begins; a table with a header has none.
    """

    keys: Mapping[Path, Place]
    values: Mapping[Path, Place]
    duplicates: tuple[tuple[Path, Place, Place], ...] = ()


def parse_dotted(dotted: str) -> Path:
    """``permissions.network[0].host`` as a path; keys of known sections need no quotes."""
    return tuple(int(m[2]) if m[2] else m[1] for m in _DOTTED.finditer(dotted))


def dotted(path: Path) -> str:
    """A path as it is shown; the inverse of ``parse_dotted`` for bare keys."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def scan(document: str) -> TomlScan:
    """The places of a document; of a malformed one, those before the fault."""
    scanner = _Scanner(list(_tokens(document.replace("\r\n", "\n"))))
    with contextlib.suppress(_Fault):
        scanner.document()
    return TomlScan(scanner.keys, scanner.values, tuple(scanner.duplicates))


def place_at(document: str, offset: int) -> Place:
    """The place of a character by its offset in the document."""
    start = document.rfind("\n", 0, offset) + 1
    return Place(document.count("\n", 0, offset) + 1, offset - start + 1)


class _Fault(Exception):
    """The document is not TOML from here on."""


class _Token(Struct, frozen=True):
    kind: str
    text: str
    place: Place


def _tokens(document: str) -> Iterator[_Token]:
    line, start = 1, 0
    for match in _TOKEN.finditer(document):
        kind, text = match.lastgroup or "other", match[0]
        if kind != "skip":
            yield _Token(kind, text, Place(line, match.start() - start + 1))
        if "\n" in text:
            line += text.count("\n")
            start = match.start() + text.rindex("\n") + 1
    yield _Token("end", "", Place(line, len(document) - start + 1))


# One part of a key as it is written, and where.
_Part = tuple[str, Place]


@dataclass
class _Scanner:
    tokens: list[_Token]
    at: int = 0
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    duplicates: list[tuple[Path, Place, Place]] = field(default_factory=list)
    arrays: dict[Path, int] = field(default_factory=dict)  # arrays of tables and their length so far
    defined: dict[Path, Place] = field(default_factory=dict)  # values and headers, by the place that wrote them

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def take(self, text: str) -> bool:
        """Step over a mark if it is next."""
        if self.token.kind == "mark" and self.token.text == text:
            self.at += 1
            return True
        return False

    def need(self, text: str) -> None:
        if not self.take(text):
            raise _Fault

    def blank(self) -> None:
        while self.take("\n"):
            pass

    def document(self) -> None:
        table: Path = ()
        while True:
            self.blank()
            if self.token.kind == "end":
                return
            if self.take("["):
                table = self.header()
            else:
                self.pair(table, 0)

    def header(self) -> Path:
        array = self.take("[")
        *around, (last, place) = self.key()
        self.need("]")
        if array:
            self.need("]")
        path = (*self.enter(around), last)
        if array:
            self.define(path, place, again=path in self.arrays)
            self.keys.setdefault(path, place)
            index = self.arrays.get(path, 0)
            self.arrays[path] = index + 1
            path = (*path, index)
        else:
            self.define(path, place)
        # A table that a longer header implied earlier gets the place of its own header.
        self.keys[path] = place
        return path

    def enter(self, parts: list[_Part]) -> Path:
        """The path of the tables around a header's last part; an array of tables means its last item."""
        path: Path = ()
        for part, place in parts:
            path = (*path, part)
            self.keys.setdefault(path, place)
            if path in self.arrays:
                path = (*path, self.arrays[path] - 1)
        return path

    def define(self, path: Path, place: Place, *, again: bool = False) -> None:
        first = self.defined.setdefault(path, place)
        if first != place and not again:
            self.duplicates.append((path, first, place))

    def key(self) -> list[_Part]:
        parts = [self.part()]
        while self.take("."):
            parts.append(self.part())
        return parts

    def part(self) -> _Part:
        token = self.token
        self.at += 1
        if token.kind == "bare":
            return token.text, token.place
        if token.kind != "string":
            raise _Fault
        if token.text.startswith("'"):
            return token.text[1:-1], token.place
        try:
            return str(tomllib.loads(f"v={token.text}")["v"]), token.place
        except ValueError:
            raise _Fault from None

    def pair(self, table: Path, depth: int) -> None:
        *around, (last, place) = self.key()
        self.need("=")
        # Dotted keys never step into an array of tables: tomllib refuses that.
        path = table
        for part, at in around:
            path = (*path, part)
            self.keys.setdefault(path, at)
        path = (*path, last)
        self.define(path, place)
        self.keys.setdefault(path, place)
        self.value(path, depth)

    def value(self, path: Path, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _Fault
        self.values.setdefault(path, self.token.place)
        if self.take("["):
            self.array(path, depth)
        elif self.take("{"):
            self.inline(path, depth)
        else:
            self.scalar()

    def scalar(self) -> None:
        start = self.at
        while not (self.token.kind == "end" or (self.token.kind == "mark" and self.token.text in "\n,]}")):
            if self.token.kind == "mark" and self.token.text != ".":
                raise _Fault
            self.at += 1
        if start == self.at:
            raise _Fault

    def array(self, path: Path, depth: int) -> None:
        index = 0
        self.blank()
        while not self.take("]"):
            self.keys.setdefault((*path, index), self.token.place)
            self.value((*path, index), depth + 1)
            index += 1
            self.blank()
            if not self.take(","):
                self.need("]")
                return
            self.blank()

    def inline(self, path: Path, depth: int) -> None:
        # Newlines are not TOML 1.0 here; TOML 1.1 and later Pythons allow them.
        self.blank()
        while not self.take("}"):
            self.pair(path, depth + 1)
            self.blank()
            if not self.take(","):
                self.need("}")
                return
            self.blank()


@dataclass(frozen=True)
class ManifestFile:
    """The file beyond its values: its written keys, foreign sections, its text."""

    written: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()
    file: str = field(default="agent.toml", compare=False)
    text: str = field(default="", compare=False, repr=False)

    @cached_property
    def scan(self) -> TomlScan:
        """The places of the text; scanned when first asked for."""
        return scan(self.text)

    def place(self, path: Path, *, key: bool = False) -> Place | None:
        """Where the value at a path stands; with ``key``, or for what has a header instead of a value, its key.

        For what the file did not write, the key of the nearest table around it that it wrote.
        """
        if not key and path in self.scan.values:
            return self.scan.values[path]
        around = (path[:length] for length in range(len(path), 0, -1))
        return next((self.scan.keys[part] for part in around if part in self.scan.keys), None)

    def where(self, path: Path) -> str:
        """``agent.toml:LINE`` of a key, or of the nearest table around it that the file wrote."""
        place = self.place(path)
        return f"{self.file}:{place.line}" if place else self.file

    def point(self, path: Path, *, key: bool = False) -> str:
        """``agent.toml:LINE:COLUMN``, as ``place``."""
        place = self.place(path, key=key)
        return f"{self.file}:{place.line}:{place.column}" if place else self.file
