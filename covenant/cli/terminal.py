"""Terminal output: tables that fit the width, and colour if supported.

Without a terminal nothing is cut, coloured or moved. Light: the standard library and click; rich is imported only for a
table wider than the terminal.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any

import click

from covenant.cli import common

_GAP = "  "
_NARROWEST = 6
# The zero-width joiner and the selector of emoji.
_JOINERS = "\u200d\ufe0f"
# The most marks in a row that a text has (Unicode UAX #15, stream-safe text format).
_MARKS = 30


def cells(text: str) -> int:
    """Return the number of terminal columns of a text: wide characters take two, marks none."""
    return sum(0 if _joins(ch) else 2 if unicodedata.east_asian_width(ch) in "WF" else 1 for ch in text)


def _joins(ch: str) -> bool:
    """Whether a character is drawn with the one before it: a mark, or a later part of a Korean syllable (NFD).

    Not the selector of emoji: a terminal may give the character before it a second column.
    """
    return "\u1160" <= ch <= "\u11ff" or (ch != "\ufe0f" and unicodedata.category(ch) in ("Mn", "Me"))


def clipped(text: str, most: int) -> str:
    """Return at most ``most`` characters of a text: an ellipsis says that there is more, and no character loses its
    marks.

    Where more marks follow each other than a language has, the text is returned with escapes: the ellipsis would stand
    for nearly all of it.
    """
    if len(text) <= most:
        return text
    end = most - 1
    while end > 0 and _is_within(text, end):
        end -= 1
    if (end == 0 and most > 1) or most - end > _MARKS:
        return clipped(text.encode("unicode_escape", "backslashreplace").decode("ascii"), most)
    return text[:end] + "…"


def _is_within(text: str, at: int) -> bool:
    """Whether the character at a place belongs to the one before it."""
    ch = text[at]
    return _joins(ch) or ch in _JOINERS or text[at - 1] == "\u200d" or "\U0001f3fb" <= ch <= "\U0001f3ff"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[Any]], *, width: int | None, right: Collection[str] = ()
) -> list[str]:
    """Return the rows below their heads, each column as wide as it needs; with ``width``, the widest are cut.

    Every cell is made visible: no row can have a second line, or steer the terminal. The columns that ``right`` names
    end at their right edge.
    """
    shown = [[common.visible("" if cell is None else str(cell)) for cell in row] for row in (heads, *rows)]
    widths = [max(cells(row[n]) for row in shown) for n in range(len(heads))]
    if width is not None and sum(widths) + len(_GAP) * (len(heads) - 1) > width:
        return _fitted(shown, widths, width, right)
    lines = []
    for row in shown:
        spaces = [" " * (size - cells(cell)) for cell, size in zip(row, widths, strict=True)]
        padded = [
            space + cell if head in right else cell + space
            for head, cell, space in zip(heads, row, spaces, strict=True)
        ]
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _fitted(shown: list[list[str]], widths: list[int], width: int, right: Collection[str]) -> list[str]:
    """Let rich cut a table that is wider than the terminal; no column becomes narrower than six cells."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # The gap is part of each cell but the first: rich counts no other padding when it cuts.
    gaps = ["", *[_GAP] * (len(widths) - 1)]
    least = [len(gap) + min(size, _NARROWEST) for gap, size in zip(gaps, widths, strict=True)]
    made = Table(box=None, padding=0, pad_edge=False, show_header=False)
    for head, narrowest in zip(shown[0], least, strict=True):
        fixed = narrowest if width <= sum(least) else None
        made.add_column(justify="right" if head in right else "left", min_width=narrowest, width=fixed)
    for row in shown:
        # A Text is not parsed as markup.
        made.add_row(
            *(Text(gap + cell, no_wrap=True, overflow="ellipsis") for gap, cell in zip(gaps, row, strict=True))
        )
    most = max(width, sum(least))
    in_memory = Console(file=io.StringIO(), width=most, color_system=None)
    with in_memory.capture() as screen:
        in_memory.print(made)
    return [_cut(line.rstrip(), most) for line in screen.get().splitlines()]


def _cut(line: str, width: int) -> str:
    """Return a line of at most ``width`` columns: rich counts no column for an emoji modifier, a terminal two."""
    while cells(line) > width:
        line = line[:-2].rstrip() + "…"
    return line


def on_terminal() -> bool:
    """Whether a person can see and type: stdin and stdout are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def width() -> int | None:
    """Return the columns of the terminal on stdout; None if stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], *, nothing: str) -> None:
    """Print a table as wide as the terminal, or ``nothing`` on stderr if it has no rows."""
    if not rows:
        common.say(nothing, err=True)
        return
    head, *lines = table(heads, rows, width=width())
    common.say(styled(head, bold=True))
    for line in lines:
        common.say(line)


def coloured(stream: Any = None) -> bool:
    """Whether to use colour: on a terminal, unless NO_COLOR is set (no-color.org) or it is a dumb one."""
    stream = sys.stdout if stream is None else stream
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, **style: Any) -> str:
    """Return the text in colour, if colour is wanted."""
    return click.style(text, **style) if coloured() else text
