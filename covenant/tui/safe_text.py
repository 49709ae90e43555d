"""Text of agents, callers and files, made safe to draw: no control character, no markup, no more than fits.

Every line of the screens becomes a strip here and nowhere else, so that no other code decides what reaches a terminal.
A strip is drawn as it is: rich and Textual read no markup in it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Final

from rich.cells import cell_len, split_text
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from covenant.visible import visible

# The most characters of one text that are looked at. A longer one is cut, and says so.
MOST_CHARACTERS: Final = 65_536
# Stacked marks beyond this number would climb into the lines above.
_MOST_MARKS: Final = 2
_ELLIPSIS: Final = "…"
# What marks a line as one of an agent's text.
QUOTE: Final = "| "
_INDENT: Final = "  "
# Terminals disagree about the width of these: variation selectors, emoji modifiers, flags, tags.
_DOUBTFUL: Final = re.compile("[\ufe00-\ufe0f\U0001f3fb-\U0001f3ff\U0001f1e6-\U0001f1ff\U000e0000-\U000e01ef]")

PLAIN: Final = Style.null()
BOLD: Final = Style(bold=True)
DIM: Final = Style(dim=True)
CHOSEN: Final = Style(reverse=True)
ALARM: Final = Style(bold=True, color="red")


def clean(text: object) -> str:
    """Return one line of text in which hidden characters, line ends and doubtful widths are written out."""
    shown = visible(str(text)[:MOST_CHARACTERS])
    if shown.isascii():
        return shown
    return _without_stacks(_DOUBTFUL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), shown))


def _without_stacks(text: str) -> str:
    """Return the text with at most two marks on each character."""
    out, marks = [], 0
    for ch in text:
        marks = marks + 1 if unicodedata.category(ch) in ("Mn", "Me") else 0
        if marks <= _MOST_MARKS:
            out.append(ch)
    return "".join(out)


def cut(text: object, width: int) -> str:
    """Return the text, cleaned, in at most ``width`` cells; an ellipsis says that something is missing."""
    shown = clean(str(text)[: 8 * max(width, 1)])
    if cell_len(shown) <= width and len(str(text)) <= 8 * max(width, 1):
        return shown
    return split_text(shown, max(0, width - 1))[0] + _ELLIPSIS if width > 0 else ""


def fitted(text: object, width: int, *, right: bool = False) -> str:
    """Return the text in exactly ``width`` cells."""
    shown = cut(text, width)
    space = " " * (width - cell_len(shown))
    return space + shown if right else shown + space


def wrapped(text: object, width: int) -> Iterator[str]:
    """Yield one line of text in pieces, each cleaned and in at most ``width`` cells.

    A line end in it is written out: a text cannot pretend to be the lines below it.
    """
    whole = str(text)
    yield from _pieces(clean(whole), width)
    if len(whole) > MOST_CHARACTERS:
        yield f"[cut: {len(whole) - MOST_CHARACTERS} more characters]"


def hanging(text: object, width: int) -> Iterator[str]:
    """Yield one line of text in pieces that fit, each after the first one indented.

    Pieces of a quoted line (``view.quoted``) all begin with its mark: no piece of an agent's text begins where a line
    of ours does.
    """
    whole = str(text)
    if whole.startswith(QUOTE):
        yield from (QUOTE + piece for piece in wrapped(whole[len(QUOTE) :], max(1, width - len(QUOTE))))
        return
    pieces = list(wrapped(whole, width))
    if len(pieces) > 1:
        pieces = list(wrapped(whole, max(1, width - len(_INDENT))))
    yield pieces[0]
    yield from (_INDENT + piece for piece in pieces[1:])


def _pieces(text: str, width: int) -> Iterator[str]:
    """Yield a line in pieces of at most ``width`` cells, broken at spaces where there are some in its second half."""
    rest = text
    # No character and its marks are more than four; only the beginning is measured, however long the line is.
    while len(rest) > 4 * width or cell_len(rest) > width:
        beginning, others = rest[: 4 * width], rest[4 * width :]
        head = split_text(beginning, width)[0]
        space = head.rfind(" ")
        at = cell_len(head[:space]) if space > width // 2 else max(1, cell_len(head))
        head, left = split_text(beginning, at)
        yield head.rstrip()
        rest = (left + others).lstrip()
    yield rest


def strip(parts: Iterable[tuple[str, Style]], width: int) -> Strip:
    """Return the strip of texts that are clean already, cut or filled to ``width`` cells."""
    return Strip([Segment(text, style) for text, style in parts]).adjust_cell_length(width)


def line(text: object, width: int, style: Style = PLAIN) -> Strip:
    """Return the strip of one text."""
    return strip([(fitted(text, width), style)], width)
