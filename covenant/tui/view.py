"""The parts of a view: a table of rows from the daemon and the supervisor, and the questions that it can ask.

A view knows no widget. Its methods run in a thread, so they may wait for an answer.
"""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, NamedTuple

from covenant.tui import filters, safe_text
from covenant.tui.sources import Sources
from policy import errors

# The rows that a view asks for at first, and the most; the key `+` doubles them.
FIRST_LIMIT: Final = 200
MOST_LIMIT: Final = 6400

# Does what was agreed to, and returns the lines that say what came of it.
Act = Callable[[Sources], Sequence[str]]


class Column(NamedTuple):
    """A column: its head and its width in cells; one column of a view has width 0 and takes what is left."""

    head: str
    width: int = 0
    right: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row: ``key`` tells it from others, ``depth`` indents its first cell, ``alarm`` marks it with ``!``."""

    key: str
    cells: tuple[str, ...]
    depth: int = 0
    alarm: bool = False
    data: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rows of a view, and notes above them: what could not be asked, and the fix."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    # There may be more than the limit let in.
    more: bool = False


class ViewRequest(NamedTuple):
    """A request to load a view: its filter as typed, the most rows, and the time."""

    text: str = ""
    limit: int = FIRST_LIMIT
    now_ms: int = 0


class Choice(NamedTuple):
    """One answer to a question: its key, its word, and what it does."""

    key: str
    word: str
    act: Act


@dataclass(frozen=True, slots=True)
class Question:
    """A question before an act: ``lines`` say what it will do."""

    title: str
    lines: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Fields that are filled in before a question: ``then`` makes the question from the texts."""

    title: str
    fields: tuple[str, ...]
    then: Callable[[Sequence[str]], Question | None]
    first: tuple[str, ...] = ()


class Attach(NamedTuple):
    """Instead of a question: connect this terminal to the session of a run."""

    run_id: str


class View(abc.ABC):
    """A view. Each subclass says its key, its name and its columns, and loads its rows."""

    key: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]
    columns: ClassVar[tuple[Column, ...]]
    # How often it is loaded while it is shown.
    seconds: ClassVar[float] = 2.0
    # The keys of its acts, beside those of every view.
    acts: ClassVar[Mapping[str, str]] = {}

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads of the columns."""
        return tuple(column.head for column in self.columns)

    @abc.abstractmethod
    def load(self, sources: Sources, asked: ViewRequest) -> Loaded:
        """Return the rows, the newest or the roots first.

        Raises:
            errors.CovenantError: none of what it needs can be asked.
        """

    def terms(self, text: str) -> tuple[filters.Term, ...]:
        """Return the terms of a filter that the rows must meet."""
        return filters.parse(text, self.heads)

    def about(self, row: Row) -> list[tuple[str, str]]:
        """Return what the pane below the table says about a row, as names and texts."""
        return [(name.replace("_", " "), words(value)) for name, value in row.data.items() if value not in (None, "")]

    def whole(self, sources: Sources, row: Row) -> list[str]:
        """Return the lines of a row's own screen (Enter); it may ask for more than the table has.

        Raises:
            errors.CovenantError: it cannot be asked.
        """
        return [line for name, text in self.about(row) for line in named(name, text)]

    def ask(self, sources: Sources, act: str, row: Row | None) -> Question | Form | Attach | None:
        """Return the question before an act on a row; None if the act does not fit it.

        Raises:
            errors.CovenantError: the question needs an answer that cannot be had.
        """
        return None


def named(name: str, text: str) -> list[str]:
    """Return a text after its name; one of several lines is quoted below it."""
    return [f"{name}:", *quoted(text)] if "\n" in text else [f"{name}: {text}"]


def quoted(text: Any) -> list[str]:
    """Return the lines of an agent's text, each marked as a part of it."""
    return [f"{safe_text.QUOTE}{line}" for line in str(text).split("\n")]


def words(value: Any) -> str:
    """Return a value as text: texts as they are, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def refused(error: errors.CovenantError) -> list[str]:
    """Return the lines that show an error and its fix."""
    return [f"! {error} [{error.code}]", *([f"  fix: {error.hint}"] if error.hint else [])]


def broken(error: Exception) -> list[str]:
    """Return the line about an answer that no view understands, such as that of another version."""
    return [f"! the answer cannot be shown: {type(error).__name__}: {error}"]


def first_line(text: Any) -> str:
    """Return the beginning of a text, as a cell shows it."""
    return str(text)[:400].replace("\n", " ")


def moment(ms: Any) -> str:
    """Return ``11-28 14:05:09`` (UTC) of Unix milliseconds, or the value itself where the calendar ends."""
    try:
        return datetime.fromtimestamp(ms / 1000, tz=UTC).strftime("%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return str(ms)


def age(ms: float) -> str:
    """Return a length of time in its largest whole unit, as ``covenant ps`` does."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms >= size:
            return f"{int(ms // size)}{unit}"
    return "0s"


def size(number: Any) -> str:
    """Return a number of bytes in at most five characters."""
    if not isinstance(number, int):
        return "-"
    for unit in ("B", "K", "M", "G"):
        if number < 10_000:
            return f"{number}{unit}"
        number //= 1024
    return f"{number}T"


def now_ms() -> int:
    """The clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000
