"""Compare the place scanner with tomllib, on generated documents whose places the generator knows."""

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
    """Writes TOML and remembers the line and column of each key and value."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.out = ""
        self.keys: dict[lines.Path, lines.Place] = {}
        self.values: dict[lines.Path, lines.Place] = {}
        self.count = 0

    @property
    def here(self) -> lines.Place:
        return lines.Place(self.out.count("\n") + 1, len(self.out) - self.out.rfind("\n"))

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

    def dotted(self, parts: list[str]) -> list[lines.Place]:
        """Write a dotted key and return the place of each part."""
        dot = self.pick((".", " . ", ". "))
        places = []
        for index, part in enumerate(parts):
            self.out += dot if index else ""
            places.append(self.here)
            self.out += self.spell(part)
        return places

    def space(self, *, newlines: bool) -> None:
        self.out += self.pick(("", " ", "\n", " # c ]\n", "\n\n\t")) if newlines else self.pick(("", " ", "\t"))

    def value(self, path: lines.Path, depth: int, *, oneline: bool = False) -> None:
        self.values[path] = self.here
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
            self.keys[(*path, index)] = self.here
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
        path = (*table, *parts)
        for length, place in enumerate(self.dotted(parts), 1):
            self.keys.setdefault((*table, *parts[:length]), place)
        self.out += self.pick(("=", " = ", "\t="))
        self.value(path, depth, oneline=oneline)

    def end(self) -> None:
        self.out += self.pick(TRAILERS) + self.pick(("\n", "\n\n", "\n# x = 1\n"))


@st.composite
def documents(draw: Any) -> Writer:
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
            w.out += "["
            w.keys[table] = w.dotted(written)[-1]
            w.out += "]"
        else:
            if step == 5 and arrays and draw(st.booleans()):
                # The next item of the latest array; tables below the previous item are out of reach.
                written, path, n = arrays.pop()
                tables = [t for t in tables if t[1][: len(path)] != path]
                later = [t for t in later if t[1][: len(path)] != path]
                arrays.append((written, path, n + 1))
                table = (*path, n + 1)
                w.out += "[["
                w.keys[table] = w.dotted(written)[-1]
                w.out += "]]"
                w.end()
                continue
            above = [([], ()), *tables, *[(a, (*p, n)) for a, p, n in arrays[-1:]]]
            around = above[draw(st.integers(0, len(above) - 1))]
            names = [w.fresh() for _ in range(draw(st.integers(1, 2)))]
            written, path = [*around[0], *names], (*around[1], *names)
            w.out += ("[[" if step == 5 else "[") + w.pick(("", " "))
            *_, before, w.keys[path] = (None, *w.dotted(written))
            w.out += w.pick(("", " ")) + ("]]" if step == 5 else "]")
            if len(names) == 2:
                between = (*around[1], names[0])
                assert before is not None
                w.keys[between] = before
                later.append(([*around[0], names[0]], between))
            if step == 5:
                table = (*path, 0)
                w.keys[table] = w.keys[path]
                arrays.append((written, path, 0))
            else:
                tables.append((written, path))
                table = path
        w.end()
    return w


def walk(value: Any, path: lines.Path = ()) -> Iterator[lines.Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from walk(item, (*path, key))


@settings(max_examples=400, deadline=None)
@given(documents())
def test_scanner_places_every_path_of_tomllib(w: Writer) -> None:
    paths = set(walk(tomllib.loads(w.out)))
    assert paths == set(w.keys), "the generator is wrong"
    for document in (w.out, w.out.replace("\n", "\r\n")):
        scan = lines.scan(document)
        assert scan.keys == w.keys
        assert scan.values == w.values
        assert scan.duplicates == ()


def inserted(document: str, place: lines.Place, text: str, *, after: str = "") -> str:
    """Insert ``text`` at a place, or behind the character there if that is one of ``after``."""
    rows = document.split("\n")
    row, at = rows[place.line - 1], place.column - 1
    if at < len(row) and row[at] in after:
        at += 1
    rows[place.line - 1] = row[:at] + text + row[at:]
    return "\n".join(rows)


def look_up(document: Any, path: lines.Path) -> Any:
    for part in path:
        document = document[part]
    return document


@settings(max_examples=300, deadline=None)
@given(documents(), st.data())
def test_mark_where_value_stands_becomes_that_value(w: Writer, data: st.DataObject) -> None:
    values = lines.scan(w.out).values
    if not values:
        return
    path = data.draw(st.sampled_from(sorted(values, key=str)))
    inline = any(path[:length] in values for length in range(1, len(path)))
    before = tomllib.loads(w.out)
    # The old value moves to the next item, the next key of the inline table, or the next line.
    mark = "'mark', " if isinstance(path[-1], int) else "'mark', rest = " if inline else "'mark'\nrest = "
    after = tomllib.loads(inserted(w.out, values[path], mark))
    assert look_up(after, path) == "mark"
    if isinstance(path[-1], int):
        assert str(look_up(after, (*path[:-1], path[-1] + 1))) == str(look_up(before, path))
    else:
        # NaN is not equal to itself, but its text is.
        assert sorted(map(str, walk(after))) != sorted(map(str, walk(before)))


@settings(max_examples=300, deadline=None)
@given(documents(), st.data())
def test_mark_where_key_stands_changes_that_key(w: Writer, data: st.DataObject) -> None:
    """Only keys that are written once: a table's later headers repeat its name."""
    keys = {path: place for path, place in lines.scan(w.out).keys.items() if isinstance(path[-1], str)}
    values = lines.scan(w.out).values
    once = sorted((path for path in keys if path in values), key=str)
    if not once:
        return
    path = data.draw(st.sampled_from(once))
    after = set(walk(tomllib.loads(inserted(w.out, keys[path], "mark", after="\"'"))))
    renamed = (*path[:-1], f"mark{path[-1]}")
    assert after == {(*renamed, *p[len(path) :]) if p[: len(path)] == path else p for p in walk(tomllib.loads(w.out))}


@settings(max_examples=200, deadline=None)
@given(documents(), st.data())
def test_mark_where_header_stands_changes_that_header(w: Writer, data: st.DataObject) -> None:
    scan = lines.scan(w.out)
    headers = [p for p in scan.keys if p not in scan.values]
    # A header that other headers extend cannot be renamed alone: TOML would refuse those headers.
    below = {p[:n] for p in headers for n in range(1, len(p)) if isinstance(p[-1], str) or p[-1] > 0}
    tables = sorted((p for p in headers if isinstance(p[-1], str) and p not in below), key=str)
    if not tables:
        return
    path = data.draw(st.sampled_from(tables))
    before, after = tomllib.loads(w.out), tomllib.loads(inserted(w.out, scan.keys[path], "mark", after="\"'"))
    assert (*path[:-1], f"mark{path[-1]}") in set(walk(after)) - set(walk(before))


@settings(max_examples=200, deadline=None)
@given(documents(), st.data())
def test_scanner_stops_at_faults_without_raising(w: Writer, data: st.DataObject) -> None:
    document = w.out
    at = data.draw(st.integers(0, len(document)))
    noise = data.draw(st.text(alphabet="[]{}=.,\"'#\n\\ ak1", max_size=8))
    spoilt = document[:at] + noise + document[at:]
    rows = spoilt.split("\n")
    for place in (*lines.scan(spoilt).keys.values(), *lines.scan(spoilt).values.values()):
        assert 1 <= place.column <= len(rows[place.line - 1]) + 1


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="[]{}=.,\"'#\n\\ ak1", max_size=60))
def test_scanner_agrees_with_tomllib_on_what_it_accepts(document: str) -> None:
    scan = lines.scan(document)
    try:
        values = tomllib.loads(document)
    except tomllib.TOMLDecodeError:
        return
    assert set(walk(values)) == set(scan.keys)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="a\n\t é", max_size=30), st.integers(0, 30))
def test_place_of_offset(document: str, offset: int) -> None:
    place = lines.place_at(document, offset := min(offset, len(document)))
    rows = document.split("\n")
    assert sum(len(row) + 1 for row in rows[: place.line - 1]) + place.column - 1 == offset
