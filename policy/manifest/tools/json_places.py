"""Where each key and value of a JSON document stands, for errors and for replacing one value in its place.

Values come from ``strict_json``; this scanner runs only on documents that it accepted, and only when a place is asked
for (tests/property/policy/manifest/test_json_places.py).
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from policy.manifest.lines import Path, Place

_TOKEN = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*+")|(?P<mark>[{}\[\],:])|(?P<other>[^\s{}\[\],:"]+)')


@dataclass(frozen=True)
class JsonScan:
    """Offsets in the text, by path: the first character of a key, and the first and behind the last of a value.

    ``duplicates`` are keys that stand in their object already.
    """

    document: str
    keys: Mapping[Path, int]
    values: Mapping[Path, tuple[int, int]]
    duplicates: tuple[tuple[Path, int], ...] = ()

    def place(self, path: Path, *, key: bool) -> Place:
        """The place of a value, or of its key; of what is missing, the nearest value around it."""
        if key and path in self.keys:
            return self._place_at(self.keys[path])
        around = (path[:length] for length in range(len(path), -1, -1))
        start, _ = next(self.values[part] for part in around if part in self.values)
        return self._place_at(start)

    def _place_at(self, offset: int) -> Place:
        # A document may have a finding for each of its keys: lines are counted once, and not for each finding.
        line = bisect.bisect_right(self._lines, offset)
        return Place(line, offset - self._lines[line - 1] + 1)

    @functools.cached_property
    def _lines(self) -> list[int]:
        """The offsets at which the lines begin."""
        return [0, *(match.end() for match in re.finditer("\n", self.document))]

    def replaced(self, values: Mapping[Path, str]) -> str:
        """The document with these values replaced by JSON texts, and every other character as it was."""
        out = self.document
        for path, new in sorted(values.items(), key=lambda item: self.values[item[0]], reverse=True):
            start, end = self.values[path]
            out = f"{out[:start]}{new}{out[end:]}"
        return out


@dataclass
class _Open:
    """An object or array that has not ended: its path, where it began, and the key or index that comes next."""

    path: Path
    start: int
    part: str | int = 0
    wants_key: bool = False


def scan(document: str) -> JsonScan:
    """The places of a document that is JSON; of another, nothing in particular."""
    keys: dict[Path, int] = {}
    values: dict[Path, tuple[int, int]] = {}
    duplicates: list[tuple[Path, int]] = []
    stack: list[_Open] = []
    for match in _TOKEN.finditer(document):
        mark, start = match["mark"], match.start()
        path = (*stack[-1].path, stack[-1].part) if stack else ()
        if mark in ("{", "["):
            stack.append(_Open(path, start, wants_key=mark == "{"))
        elif mark in ("}", "]") and stack:
            ended = stack.pop()
            values[ended.path] = (ended.start, match.end())
        elif mark == "," and stack:
            _next(stack[-1])
        elif mark is None and stack and stack[-1].wants_key:
            stack[-1].part, stack[-1].wants_key = _key(match[0]), False
            path = (*stack[-1].path, stack[-1].part)
            if path in keys:
                duplicates.append((path, start))
            keys[path] = start
        elif mark is None:
            values[path] = (start, match.end())
    return JsonScan(document, keys, values, tuple(duplicates))


def _key(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:  # no JSON from here on: the rest names nothing
        return token


def _next(container: _Open) -> None:
    if isinstance(container.part, int):
        container.part += 1
    else:
        container.wants_key = True
