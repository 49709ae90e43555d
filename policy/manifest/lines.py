"""Which line of a TOML document each key, table and array item stands on.

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

Path = tuple[str | int, ...]

# Every alternative of a string matches whatever follows its quote, closed or not: a failed match would be tried
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
class Scan:
    """Lines by path, counted from 1, and (path, first line, second line) of keys that are written twice."""

    lines: Mapping[Path, int]
    duplicates: tuple[tuple[Path, int, int], ...] = ()


def parse_dotted(dotted: str) -> Path:
    """``permissions.network[0].host`` as a path; keys of known sections need no quotes."""
    return tuple(int(m[2]) if m[2] else m[1] for m in _DOTTED.finditer(dotted))


def dotted(path: Path) -> str:
    """A path as it is shown; the inverse of ``parse_dotted`` for bare keys."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def scan(document: str) -> Scan:
    """The places of a document; of a malformed one, those before the fault."""
    scanner = _Scanner(list(_tokens(document.replace("\r\n", "\n"))))
    with contextlib.suppress(_Fault):
        scanner.document()
    return Scan(scanner.lines, tuple(scanner.duplicates))


class _Fault(Exception):
    """The document is not TOML from here on."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(document: str) -> Iterator[_Token]:
    line = 1
    for match in _TOKEN.finditer(document):
        kind, text = match.lastgroup or "other", match[0]
        if kind != "skip":
            yield _Token(kind, text, line)
        line += text.count("\n")
    yield _Token("end", "", line)


@dataclass
class _Scanner:
    tokens: list[_Token]
    at: int = 0
    lines: dict[Path, int] = field(default_factory=dict)
    duplicates: list[tuple[Path, int, int]] = field(default_factory=list)
    arrays: dict[Path, int] = field(default_factory=dict)  # arrays of tables and their length so far
    defined: dict[Path, int] = field(default_factory=dict)  # values and headers, by the line that wrote them

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
        line = self.token.line
        array = self.take("[")
        *around, last = self.key()
        self.need("]")
        if array:
            self.need("]")
        path = self.enter((), tuple(around), line)
        path = (*path, last)
        if array:
            self.define(path, line, again=path in self.arrays)
            self.lines.setdefault(path, line)
            index = self.arrays.get(path, 0)
            self.arrays[path] = index + 1
            path = (*path, index)
        else:
            self.define(path, line)
        # A table that a longer header implied earlier gets the line of its own header.
        self.lines[path] = line
        return path

    def enter(self, base: Path, parts: tuple[str | int, ...], line: int) -> Path:
        """The path below ``base``; a part that names an array of tables means its last item."""
        path = base
        for part in parts:
            path = (*path, part)
            self.lines.setdefault(path, line)
            if path in self.arrays:
                path = (*path, self.arrays[path] - 1)
        return path

    def define(self, path: Path, line: int, *, again: bool = False) -> None:
        first = self.defined.setdefault(path, line)
        if first != line and not again:
            self.duplicates.append((path, first, line))

    def key(self) -> Path:
        parts = [self.part()]
        while self.take("."):
            parts.append(self.part())
        return tuple(parts)

    def part(self) -> str:
        token = self.token
        self.at += 1
        if token.kind == "bare":
            return token.text
        if token.kind != "string":
            raise _Fault
        if token.text.startswith("'"):
            return token.text[1:-1]
        try:
            return str(tomllib.loads(f"v={token.text}")["v"])
        except ValueError:
            raise _Fault from None

    def pair(self, table: Path, depth: int) -> None:
        line = self.token.line
        *around, last = self.key()
        self.need("=")
        # Dotted keys never step into an array of tables: tomllib refuses that.
        path = table
        for part in around:
            path = (*path, part)
            self.lines.setdefault(path, line)
        path = (*path, last)
        self.define(path, line)
        self.lines.setdefault(path, line)
        self.value(path, depth)

    def value(self, path: Path, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _Fault
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
            self.lines.setdefault((*path, index), self.token.line)
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
