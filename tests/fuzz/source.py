"""Where the inputs come from: valid documents, changed. The same seed gives the same inputs.

Random bytes stop at the first check of a parser. So inputs are made from seeds that are accepted, by small changes and
by words of the format; JSON is changed as a tree, so that what is tried is still JSON; and an input that drew an
answer which none drew before is kept and changed further. Answers tell paths through a parser apart, which is
what an instrumented fuzzer learns from edges, without its cost.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# What breaks parsers of anything: look-alikes, marks that show nothing, halves of pairs, ends of ranges.
_WORDS = r"""
.. . / // /../ \ ~ $ % * *. [] {} [ ] { } " ' ` # = , : @ xn-- ::ffff:1.2.3.4 0x7f.1 localhost null true false
NaN Infinity 1e9 -0 0.1 00 1_000 __class__ self '''
"""
_HIDDEN = (
    "\0 \n \r\n \t \x1b[31m \x7f \u200b \u202e \ufeff \u2044 \uff0e \u0430 \ud800 \U000e0041 e\u0301 \u00e9 \u00df"
)
_BROKEN = (b'"""', b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b" ")
NASTY = (*(w.encode("utf-8", "surrogatepass") for w in (*_WORDS.split(), *_HIDDEN.split(" "))), *_BROKEN)
_BITS = (0, 7, 8, 15, 16, 31, 32, 53, 63, 64)
NUMBERS = (10**30, *(sign * (2**bits + step) for bits in _BITS for step in (-1, 0, 1) for sign in (1, -1)))
_TOKEN = re.compile(rb"[A-Za-z0-9_.]+|[^A-Za-z0-9_.\s]|\s+")
_MOST_BYTES = 20_000
_KEPT = 400


class Source:
    """Inputs for one target."""

    def __init__(self, seeds: Sequence[bytes], words: Sequence[bytes], seed: str) -> None:
        self.random = random.Random(seed)
        self.seeds = list(seeds)
        self.words = [*words, *NASTY]
        self.kept: list[bytes] = []

    def draw(self) -> bytes:
        """The next input."""
        rng = self.random
        if rng.random() < 0.02:
            return rng.randbytes(rng.randrange(64))
        data = self.base()
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
            data = rng.choice(_CHANGES)(self, data)
        return data[:_MOST_BYTES]

    def base(self) -> bytes:
        """An input to start from: a seed, or one that was kept."""
        if self.kept and self.random.random() < 0.5:
            return self.random.choice(self.kept)
        return self.random.choice(self.seeds)

    def keep(self, data: bytes) -> None:
        """Change this one further: it drew a new answer."""
        if len(self.kept) < _KEPT:
            self.kept.append(data)
        else:
            self.kept[self.random.randrange(_KEPT)] = data

    def word(self) -> bytes:
        """A word of the format, something nasty, or a number at an end of a range."""
        if self.random.random() < 0.15:
            return str(self.random.choice(NUMBERS)).encode()
        return self.random.choice(self.words)

    def span(self, data: bytes) -> tuple[int, int]:
        """A place in ``data``: whole tokens half of the time."""
        rng = self.random
        if data and rng.random() < 0.5:
            tokens = list(_TOKEN.finditer(data))
            if tokens:
                token = rng.choice(tokens)
                return token.start(), token.end()
        start = rng.randrange(len(data) + 1)
        return start, min(len(data), start + rng.choice((0, 1, 1, 2, 4, 8, 16, 64)))


def _flip(source: Source, data: bytes) -> bytes:
    if not data:
        return data
    at = source.random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << source.random.randrange(8))]) + data[at + 1 :]


def _replace(source: Source, data: bytes) -> bytes:
    start, end = source.span(data)
    return data[:start] + source.word() + data[end:]


def _insert(source: Source, data: bytes) -> bytes:
    start, _ = source.span(data)
    return data[:start] + source.word() + data[start:]


def _delete(source: Source, data: bytes) -> bytes:
    start, end = source.span(data)
    return data[:start] + data[end:]


def _double(source: Source, data: bytes) -> bytes:
    start, end = source.span(data)
    times = source.random.choice((1, 1, 2, 40))
    return data[:end] + data[start:end] * times + data[end:]


def _swap(source: Source, data: bytes) -> bytes:
    (a, b), (c, d) = sorted((source.span(data), source.span(data)))
    return data if b > c else data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _splice(source: Source, data: bytes) -> bytes:
    other = source.base()
    start, _ = source.span(data)
    from_, to = source.span(other)
    return data[:start] + (other[from_:] if source.random.random() < 0.3 else other[from_:to]) + data[start:]


def _lines(source: Source, data: bytes) -> bytes:
    """Move, double or drop a whole line."""
    lines = data.split(b"\n")
    at, to = source.random.randrange(len(lines)), source.random.randrange(len(lines))
    line = lines[at] if source.random.random() < 0.5 else lines.pop(at)
    if source.random.random() < 0.7:
        lines.insert(to, line)
    return b"\n".join(lines)


def _step(source: Source, data: bytes) -> bytes:
    """A number of the text, one up or down."""
    numbers = list(re.finditer(rb"\d{1,18}", data))
    if not numbers:
        return data
    found = source.random.choice(numbers)
    new = int(found[0]) + source.random.choice((-1, 1))
    return data[: found.start()] + str(new).encode() + data[found.end() :]


def _cut(source: Source, data: bytes) -> bytes:
    return data[: source.random.randrange(len(data) + 1)]


_CHANGES: tuple[Callable[[Source, bytes], bytes], ...] = (
    _flip,
    _replace,
    _replace,
    _replace,
    _insert,
    _insert,
    _delete,
    _double,
    _swap,
    _splice,
    _lines,
    _step,
    _step,
    _cut,
)


class JsonSource(Source):
    """JSON changed as a tree and written in one spelling; now and then its bytes are changed instead."""

    def draw(self) -> bytes:
        """The next input."""
        if self.random.random() < 0.15:
            return super().draw()
        base = self.base()
        try:
            value = json.loads(base)
        except (ValueError, RecursionError):
            return super().draw()
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            value = self._changed(value)
        ends = b"\n" if base.endswith(b"\n") else b""
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()[:200_000] + ends

    def _changed(self, value: Any) -> Any:
        """The value with one place in it changed."""
        places = list(_places(value))
        if not places:
            return self._other(value)
        parent, key = self.random.choice(places)
        if isinstance(parent, dict):
            self._change_object(parent, key)
        else:
            self._change_array(parent, key)
        return value

    def _change_object(self, parent: dict[str, Any], key: str) -> None:
        match self.random.randrange(6):
            case 0:
                del parent[key]
            case 1:
                parent[self._text(key)] = parent.pop(key)
            case 2:
                parent[self._text(key)] = parent[key]
            case _:
                parent[key] = self._other(parent[key])

    def _change_array(self, parent: list[Any], at: int) -> None:
        match self.random.randrange(8):
            case 0:
                del parent[at]
            case 1:
                parent.insert(at, parent[at])
            case 2:
                parent.insert(at, self._other(parent[at]))
            case 3:
                parent.reverse()
            case 4:
                parent.append(parent.pop(at))
            case _:
                parent[at] = self._other(parent[at])

    def _other(self, value: Any) -> Any:
        """Something in the place of a value: near to it, of its kind, or of another."""
        rng = self.random
        if isinstance(value, bool) and rng.random() < 0.7:
            return not value
        if isinstance(value, int) and rng.random() < 0.7:
            return rng.choice((value + 1, value - 1, -value, value * 2, rng.choice(NUMBERS)))
        if isinstance(value, str) and rng.random() < 0.8:
            return self._text(value)
        return rng.choice(
            (
                None,
                True,
                False,
                0,
                1,
                -1,
                443,
                2**64,
                1.5,
                "",
                "x",
                [],
                {},
                [[]],
                {"": None},
                [value],
                rng.choice(NUMBERS),
            )
        )

    def _text(self, text: str) -> str:
        changed = self.random.choice(_CHANGES)(self, text.encode("utf-8", "surrogatepass"))
        return changed[:_MOST_BYTES].decode("utf-8", "replace")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield value, key
            yield from _places(inner)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield value, at
            yield from _places(inner)
