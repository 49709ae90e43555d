"""The three widgets that the screens are made of: a bar, a pane of lines, and a table of rows.

Each draws its lines itself (Textual's line API), through ``safe_text`` alone. A table draws only the rows that are
visible, and refreshes only the lines that changed: a thousand runs cost as much as twenty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from covenant.tui import safe_text
from covenant.tui.view import Column, Row

_INDENT: Final = "  "
# The cells of a line before its columns: the cursor, the mark, a space.
_MARGIN: Final = 3
_LEAST: Final = 8


class Bar(Widget):
    """One line of text."""

    DEFAULT_CSS = "Bar { height: 1; }"

    def __init__(self, *, style: Style = safe_text.PLAIN, place: str | None = None) -> None:
        super().__init__(id=place)
        self._style = style
        self.text = ""

    def show(self, text: str) -> None:
        """Replace the text."""
        if text != self.text:
            self.text = text
            self.refresh()

    def render_line(self, y: int) -> Strip:
        return safe_text.line(self.text, self.size.width, self._style)


class Pane(Widget, can_focus=True):
    """Lines of text, wrapped to the width, which scroll."""

    DEFAULT_CSS = "Pane { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll_by(-1)", show=False),
        Binding("down", "scroll_by(1)", show=False),
        Binding("pageup", "scroll_by(-20)", show=False),
        Binding("pagedown,space", "scroll_by(20)", show=False),
        Binding("home", "scroll_by(-1000000)", show=False),
        Binding("end", "scroll_by(1000000)", show=False),
    ]

    def __init__(self, lines: Sequence[str] = (), *, place: str | None = None) -> None:
        super().__init__(id=place)
        self.lines: tuple[str, ...] = tuple(lines)
        self.top = 0
        self._wrapped: list[tuple[str, Style]] = []
        self._width = -1

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines."""
        if tuple(lines) != self.lines:
            self.lines, self._width, self.top = tuple(lines), -1, 0
            self.refresh()

    def action_scroll_by(self, lines: int) -> None:
        """Move the text, as far as there is text."""
        last = max(0, len(self._laid_out()) - self.size.height)
        top = min(last, max(0, self.top + lines))
        if top != self.top:
            self.top = top
            self.refresh()

    def render_line(self, y: int) -> Strip:
        laid, at, width = self._laid_out(), self.top + y, self.size.width
        text, style = laid[at] if at < len(laid) else ("", safe_text.PLAIN)
        if y == self.size.height - 1 and at < len(laid) - 1:
            text = safe_text.cut(text, width - 8) + " [more]"
        return safe_text.line(text, width, style)

    def _laid_out(self) -> list[tuple[str, Style]]:
        if self._width != self.size.width:
            self._width = self.size.width
            self._wrapped = [
                (part, safe_text.ALARM if line.startswith("! ") else safe_text.PLAIN)
                for line in self.lines
                for part in safe_text.hanging(line, max(1, self._width))
            ]
        return self._wrapped


class Table(Widget, can_focus=True):
    """Heads, notes and rows. The cursor stays on its row while rows come and go."""

    DEFAULT_CSS = "Table { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row, or its row has other contents."""

    def __init__(self, *, place: str | None = None) -> None:
        super().__init__(id=place)
        self.columns: tuple[Column, ...] = ()
        self.rows: tuple[Row, ...] = ()
        self.notes: tuple[str, ...] = ()
        self.cursor = 0
        self.top = 0

    @property
    def chosen(self) -> Row | None:
        """The row below the cursor."""
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def show(self, columns: Sequence[Column], rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
        """Replace the contents, and refresh the lines that look different then."""
        before = self._lines()
        key = self.chosen.key if self.chosen is not None else None
        same = tuple(columns) == self.columns
        self.columns, self.rows, self.notes = tuple(columns), tuple(rows), tuple(notes)
        self.cursor = self._place_of(key) if same else 0
        self.top = self.top if same else 0
        self._keep_in_sight()
        after = self._lines()
        for y, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                self.refresh(Region(0, y, self.size.width, 1))
        self.post_message(self.Moved())

    def choose(self, key: str) -> None:
        """Put the cursor on the row with this key, if there is one."""
        self.cursor = self._place_of(key)
        self._keep_in_sight()
        self.refresh()
        self.post_message(self.Moved())

    def action_move(self, rows: int) -> None:
        """Move the cursor by rows."""
        cursor = min(max(0, self.cursor + rows), max(0, len(self.rows) - 1))
        if cursor != self.cursor:
            self.cursor = cursor
            self._keep_in_sight()
            self.refresh()
            self.post_message(self.Moved())

    def action_page(self, pages: int) -> None:
        """Move the cursor by what is visible at once."""
        self.action_move(pages * max(1, self._visible() - 1))

    def on_resize(self) -> None:
        """Keep the cursor visible when the terminal becomes smaller."""
        self._keep_in_sight()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        kind, content = self._line(y)
        if kind == "heads":
            return safe_text.strip([(self._laid(self._heads()), safe_text.BOLD)], width)
        if kind == "note":
            assert isinstance(content, str)
            return safe_text.line(content, width, safe_text.ALARM if content.startswith("! ") else safe_text.PLAIN)
        if kind == "row":
            assert isinstance(content, tuple)
            row, chosen = content
            style = safe_text.CHOSEN if chosen else safe_text.ALARM if row.alarm else safe_text.PLAIN
            return safe_text.strip([(self._row(row, chosen=chosen), style)], width)
        return safe_text.line("", width)

    # --- where each line is -------------------------------------------------------------------------------------

    def _lines(self) -> list[tuple[str, object]]:
        return [self._line(y) for y in range(self.size.height)]

    def _line(self, y: int) -> tuple[str, object]:
        """Return the kind of a line and its content; two equal answers look the same."""
        if y == 0:
            return "heads", self.columns
        if y <= len(self.notes):
            return "note", self.notes[y - 1]
        at = self.top + y - 1 - len(self.notes)
        return ("row", (self.rows[at], at == self.cursor)) if at < len(self.rows) else ("", None)

    def _visible(self) -> int:
        return max(1, self.size.height - 1 - len(self.notes))

    def _keep_in_sight(self) -> None:
        last = max(0, len(self.rows) - self._visible())
        self.top = min(max(self.top, self.cursor - self._visible() + 1), self.cursor, last)

    def _place_of(self, key: str | None) -> int:
        found = next((at for at, row in enumerate(self.rows) if row.key == key), None)
        return min(self.cursor, max(0, len(self.rows) - 1)) if found is None else found

    # --- how a line looks ---------------------------------------------------------------------------------------

    def _heads(self) -> list[str]:
        return [column.head for column in self.columns]

    def _row(self, row: Row, *, chosen: bool) -> str:
        indented = (_INDENT * min(row.depth, 8) + row.cells[0], *row.cells[1:])
        margin = (">" if chosen else " ") + ("!" if row.alarm else " ") + " "
        return margin + self._laid(indented, margin=False)

    def _laid(self, cells: Sequence[str], *, margin: bool = True) -> str:
        widths = self._widths()
        parts = [
            safe_text.fitted(cell, width, right=column.right)
            for cell, width, column in zip(cells, widths, self.columns, strict=True)
        ]
        return (" " * _MARGIN if margin else "") + " ".join(parts)

    def _widths(self) -> list[int]:
        fixed = sum(column.width for column in self.columns) + len(self.columns) - 1 + _MARGIN
        return [column.width or max(_LEAST, self.size.width - fixed) for column in self.columns]
