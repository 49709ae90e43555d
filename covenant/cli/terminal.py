"""What goes to a terminal: tables that fit it, and colour where there is one.

Off a terminal nothing is cut, nothing is coloured, and nothing moves. Light: the standard library and click.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import click

from covenant.cli import common

_GAP = "  "
_NARROWEST = 6
_CUT = "…"


def cells(text: str) -> int:
    """How many columns of a terminal a text takes: wide characters two, combining ones none."""
    return sum(0 if unicodedata.combining(ch) else 2 if unicodedata.east_asian_width(ch) in "WF" else 1 for ch in text)


def clipped(text: str, width: int) -> str:
    """The text in at most ``width`` columns; one that was cut ends in an ellipsis."""
    if cells(text) <= width:
        return text
    kept, used = [], 0
    for ch in text:
        used += cells(ch)
        if used > width - 1:
            break
        kept.append(ch)
    return "".join(kept) + _CUT if width > 0 else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], *, width: int | None) -> list[str]:
    """The rows below their heads, each column as wide as it needs; with ``width``, the widest give way.

    Every cell is made visible: no row can have a second line, or steer the terminal.
    """
    shown = [[common.visible("" if cell is None else str(cell)) for cell in row] for row in (heads, *rows)]
    widths = [max(cells(row[n]) for row in shown) for n in range(len(heads))]
    if width is not None:
        _narrow(widths, width - len(_GAP) * (len(heads) - 1))
    return [_line(row, widths) for row in shown]


def _narrow(widths: list[int], room: int) -> None:
    while sum(widths) > room:
        widest = max(range(len(widths)), key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            return
        # Down to the next widest at once, or as far as is needed.
        others = [width for n, width in enumerate(widths) if n != widest]
        least = max([_NARROWEST, *(width for width in others if width < widths[widest])])
        widths[widest] = max(least, widths[widest] - (sum(widths) - room)) if least < widths[widest] else least - 1


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    fitted = [clipped(cell, width) for cell, width in zip(row, widths, strict=True)]
    padded = [cell + " " * (width - cells(cell)) for cell, width in zip(fitted, widths, strict=True)]
    return _GAP.join(padded).rstrip()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], *, nothing: str) -> None:
    """Print a table as wide as the terminal, or ``nothing`` on stderr where it has no rows."""
    if not rows:
        common.say(nothing, err=True)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    head, *lines = table(heads, rows, width=width)
    common.say(styled(head, bold=True))
    for line in lines:
        common.say(line)


def coloured(stream: Any = None) -> bool:
    """Whether colour is wanted: on a terminal, unless NO_COLOR says otherwise (no-color.org) or it is a dumb one."""
    stream = sys.stdout if stream is None else stream
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, **style: Any) -> str:
    """The text in colour, where colour is wanted."""
    return click.style(text, **style) if coloured() else text
