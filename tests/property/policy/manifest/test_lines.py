"""The line scanner against tomllib, on generated documents whose places the generator knows."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policy.manifest import lines

SCALARS = (
    "1",
    "-1_000",
    "0xff",
    "1.5e-3",
    "inf",
    "true",
    "1979-05-27 07:32:00.5-07:00",
    "1979-05-27",
    "07:32:00",
    '""',
    "''",
    '"a # [b] = {c}, \\" \\\\"',
    "'a \" # [b] \\'",
    '"""one line "" \\""" """',
    '"""\ntwo\n[lines] # = "quoted" \\\n  x"""""',
    "''''''",
    "'''\n'quoted' ''\n[x]\n'''''",
)
TRAILERS = ("", " ", "\t# comment \" ' [ ] = ''' \"\"\"", "#")


class Writer:
    """Writes TOML and remembers on which line each path was put."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.out = ""
        self.expected: dict[lines.Path, int] = {}
        self.count = 0

    @property
    def line(self) -> int:
        return self.out.count("\n") + 1

    def pick(self, items: Sequence[str]) -> str:
        return str(self.draw(st.sampled_from(items)))

    def fresh(self) -> str:
        self.count += 1
        return self.pick((f"k{self.count}", f"{self.count}", f"k.{self.count}", f'k"{self.count}', f"é\t{self.count}"))

    def spell(self, key: str) -> str:
        forms = [f'"{key}"'.replace('k"', 'k\\"').replace("\t", "\\t"), f"'{key}'"]
        if key.isascii() and key.isalnum():
            forms += [key, key]
        return self.pick(forms)

    def dotted(self, parts: list[str]) -> str:
        return self.pick((".", " . ", ". ")).join(self.spell(p) for p in parts)

    def space(self, *, newlines: bool) -> None:
        self.out += self.pick(("", " ", "\n", " # c ]\n", "\n\n\t")) if newlines else self.pick(("", " ", "\t"))

    def implied(self, path: lines.Path) -> None:
        self.expected.setdefault(path, self.line)

    def value(self, path: lines.Path, depth: int, *, oneline: bool = False) -> None:
        kind = self.draw(st.integers(0, 5)) if depth < 3 else 0
        if kind == 4:
            self.array(path, depth, oneline=oneline)
        elif kind == 5:
            self.inline(path, depth)
        else:
            self.out += self.pick([s for s in SCALARS if not (oneline and "\n" in s)])

    def array(self, path: lines.Path, depth: int, *, oneline: bool) -> None:
        self.out += "["
        size = self.draw(st.integers(0, 3))
        for index in range(size):
            self.space(newlines=not oneline)
            self.expected[(*path, index)] = self.line
            self.value((*path, index), depth + 1, oneline=oneline)
            self.space(newlines=not oneline)
            if index < size - 1 or self.draw(st.booleans()):
                self.out += ","
        self.space(newlines=not oneline)
        self.out += "]"

    def inline(self, path: lines.Path, depth: int) -> None:
        self.out += "{"
        size = self.draw(st.integers(0, 3))
        for index in range(size):
            self.out += "," if index else ""
            self.space(newlines=False)
            self.pair(path, depth + 1, oneline=True)
            self.space(newlines=False)
        self.out += "}"

    def pair(self, table: lines.Path, depth: int, *, oneline: bool = False) -> None:
        parts = [self.fresh() for _ in range(self.draw(st.integers(1, 3)))]
        for length in range(1, len(parts)):
            self.implied((*table, *parts[:length]))
        path = (*table, *parts)
        self.expected[path] = self.line
        self.out += self.dotted(parts)
        self.out += self.pick(("=", " = ", "\t="))
        self.value(path, depth, oneline=oneline)

    def end(self) -> None:
        self.out += self.pick(TRAILERS) + self.pick(("\n", "\n\n", "\n# x = 1\n"))


@st.composite
def documents(draw: Any) -> tuple[str, dict[lines.Path, int]]:
    w = Writer(draw)
    tables: list[tuple[list[str], lines.Path]] = []  # as written, and with the indices of arrays
    arrays: list[tuple[list[str], lines.Path, int]] = []
    later: list[tuple[list[str], lines.Path]] = []  # implied by a longer header, not yet written
    table: lines.Path = ()
    for _ in range(draw(st.integers(0, 12))):
        step = draw(st.integers(0, 6))
        w.out += w.pick(("", "  ", "\t"))
        if step <= 3:
            w.pair(table, 0)
        elif step == 6 and later:
            written, table = later.pop(draw(st.integers(0, len(later) - 1)))
            w.expected[table] = w.line
            w.out += f"[{w.dotted(written)}]"
        else:
            if step == 5 and arrays and draw(st.booleans()):
                # The next item of the latest array; what lay below the one before is out of reach.
                written, path, n = arrays.pop()
                tables = [t for t in tables if t[1][: len(path)] != path]
                later = [t for t in later if t[1][: len(path)] != path]
                arrays.append((written, path, n + 1))
                table = (*path, n + 1)
                w.expected[table] = w.line
                w.out += f"[[{w.dotted(written)}]]"
                w.end()
                continue
            above = [([], ()), *tables, *[(a, (*p, n)) for a, p, n in arrays[-1:]]]
            around = above[draw(st.integers(0, len(above) - 1))]
            names = [w.fresh() for _ in range(draw(st.integers(1, 2)))]
            if len(names) == 2:
                between = (*around[1], names[0])
                w.implied(between)
                later.append(([*around[0], names[0]], between))
            written, path = [*around[0], *names], (*around[1], *names)
            if step == 5:
                w.expected[path] = w.line
                table = (*path, 0)
                w.expected[table] = w.line
                arrays.append((written, path, 0))
                w.out += f"[[{w.dotted(written)}]]"
            else:
                tables.append((written, path))
                table = path
                w.expected[path] = w.line
                w.out += f"[{w.pick(('', ' '))}{w.dotted(written)}{w.pick(('', ' '))}]"
        w.end()
    return w.out, w.expected


def walk(value: Any, path: lines.Path = ()) -> Iterator[lines.Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from walk(item, (*path, key))


@settings(max_examples=400, deadline=None)
@given(documents())
def test_scanner_places_every_path_of_tomllib(case: tuple[str, dict[lines.Path, int]]) -> None:
    document, expected = case
    paths = set(walk(tomllib.loads(document)))
    assert paths == set(expected), "the generator is wrong"
    scan = lines.scan(document)
    assert scan.lines == expected
    assert scan.duplicates == ()
    assert lines.scan(document.replace("\n", "\r\n")).lines == expected


@settings(max_examples=200, deadline=None)
@given(documents(), st.data())
def test_scanner_stops_at_faults_without_raising(case: tuple[str, dict[lines.Path, int]], data: st.DataObject) -> None:
    document, _ = case
    at = data.draw(st.integers(0, len(document)))
    noise = data.draw(st.text(alphabet="[]{}=.,\"'#\n\\ ak1", max_size=8))
    scan = lines.scan(document[:at] + noise + document[at:])
    assert all(line <= document.count("\n") + noise.count("\n") + 1 for line in scan.lines.values())


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="[]{}=.,\"'#\n\\ ak1", max_size=60))
def test_scanner_agrees_with_tomllib_on_what_it_accepts(document: str) -> None:
    scan = lines.scan(document)
    try:
        values = tomllib.loads(document)
    except tomllib.TOMLDecodeError:
        return
    assert set(walk(values)) == set(scan.lines)
