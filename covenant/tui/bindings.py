"""Every key of the screens in one table: the app binds it, `?` shows it, docs/tui.md prints it and a test compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from covenant.tui.view import View


class ScreenKey(NamedTuple):
    """A key, the action of the app that it calls, and the words that say what it does."""

    key: str
    action: str
    words: str

    @property
    def name(self) -> str:
        """The name that Textual has for the key."""
        return _NAMES.get(self.key, self.key)


# The names that Textual has for keys which are no letters.
_NAMES: Final = {
    "/": "slash",
    "?": "question_mark",
    "[": "left_square_bracket",
    "]": "right_square_bracket",
    "+": "plus",
}

# Keys of every view; those of version 1 are `i`, `s`, `g`, `?`, `q`, and `m`, `a`, `c`, `A`, `r` of the views.
EVERYWHERE: Final = (
    ScreenKey("enter", "whole", "show all of the row"),
    ScreenKey("/", "filter", "filter the rows: `word`, `-word`, `column:word`; Enter keeps it, Esc ends it"),
    ScreenKey("[", "turn(-1)", "the view before"),
    ScreenKey("]", "turn(1)", "the next view"),
    ScreenKey("+", "more", "load twice as many rows"),
    ScreenKey("f5", "reload", "load now"),
    ScreenKey("i", "draft", "write an intent, kept as a draft (at most 64)"),
    ScreenKey("s", "submit", "submit the latest draft"),
    ScreenKey("g", "grant", "grant a capability"),
    ScreenKey("?", "help", "show these keys"),
    ScreenKey("q", "quit", "quit"),
    ScreenKey("ctrl+c", "quit", "quit, from anywhere"),
)


def of_views(views: Sequence[View]) -> list[ScreenKey]:
    """Return the keys that show the views."""
    return [ScreenKey(view.key, f"show('{view.name}')", f"show {view.title}") for view in views]


def of_acts(views: Sequence[View]) -> list[ScreenKey]:
    """Return the keys of the acts, each once, with the views that it works in."""
    found: dict[str, list[tuple[str, str]]] = {}
    for view in views:
        for key, words in view.acts.items():
            found.setdefault(key, []).append((view.name, words))
    return [
        ScreenKey(key, f"act('{key}')", "; ".join(f"{name}: {words}" for name, words in uses))
        for key, uses in found.items()
    ]


def every(views: Sequence[View]) -> list[ScreenKey]:
    """Return all keys: of views, of acts, of every view."""
    return [*of_views(views), *of_acts(views), *EVERYWHERE]


def table(views: Sequence[View]) -> str:
    """Return the table of docs/tui.md."""
    rows = [f"| `{one.key}` | {one.words} |" for one in every(views)]
    return "\n".join(["| key | |", "|---|---|", *rows])
