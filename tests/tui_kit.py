"""The screens of ``covenant tui`` for tests: a fixed clock, services that answer from a table, and the text drawn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Input

from covenant.tui.app import TerminalApp
from covenant.tui.sources import Sources
from policy import errors

NOW_MS = 1_790_000_000_000
# The terminal that every view must fit.
SIZE = (80, 24)
PATIENCE_SECONDS = 60.0

Answers = Mapping[str, Any]


class Service:
    """A service that answers each kind with a document, with what a function returns, or with an error."""

    def __init__(self, answers: Answers) -> None:
        self.answers = dict(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self.asked.append((kind, fields))
        answer = self.answers.get(kind, errors.UsageError(f"the double knows no `{kind}`"))
        if isinstance(answer, Exception):
            raise answer
        found = answer(**fields) if callable(answer) else answer
        assert isinstance(found, dict)
        return found

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the fields of each request of a kind."""
        return [fields for asked, fields in self.asked if asked == kind]


NO_DAEMON = errors.DaemonSilentError("no daemon answers at `/home/op/.covenant/sock`", hint="start it: covenantd")
NO_SUPERVISOR = errors.NoSupervisorError("no supervisor listens", hint="start covenant-supervisor")


class Silent(Service):
    """A service that no process serves."""

    def __init__(self, error: errors.CovenantError) -> None:
        super().__init__({})
        self._error = error

    def __call__(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self.asked.append((kind, fields))
        raise self._error


def sources(daemon: Any, supervisor: Any, attach: Callable[[str], int] = lambda run_id: 0) -> Sources:
    """Return sources of two services; a denial is explained by a fixed line."""
    return Sources(
        daemon,
        supervisor,
        lambda denial, directory: [f"explained for {directory or 'no package'}:", '  read = ["/etc/hosts"]'],
        attach,
    )


@contextlib.asynccontextmanager
async def opened(given: Sources, *, size: tuple[int, int] = SIZE) -> AsyncIterator[Pilot[None]]:
    """The screens in a terminal that is not there, with their first view loaded."""
    app = TerminalApp(given, clock=lambda: NOW_MS)
    async with app.run_test(size=size) as pilot:
        await loaded(pilot)
        yield pilot


def app_of(pilot: Pilot[None]) -> TerminalApp:
    """Return the app of a pilot."""
    assert isinstance(pilot.app, TerminalApp)
    return pilot.app


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Wait until something holds; the text of the screen is shown where it never does."""
    for _ in range(int(PATIENCE_SECONDS / 0.02)):
        await pilot.pause(0.02)
        if holds():
            return
    raise AssertionError(text(pilot))


async def loaded(pilot: Pilot[None]) -> None:
    """Wait until the view that is shown has its rows."""
    app = app_of(pilot)
    await until(pilot, lambda: app.shown[app.view.name].has_answer)


async def show(pilot: Pilot[None], key: str) -> None:
    """Show the view of a key, with its rows."""
    app = app_of(pilot)
    await pilot.press(key)
    await until(pilot, lambda: app.view.key == key)
    await loaded(pilot)


async def says(pilot: Pilot[None], words: str) -> str:
    """Wait until these words are on the screen; the whole text of it."""
    await until(pilot, lambda: words in text(pilot))
    return text(pilot)


def text(pilot: Pilot[None]) -> str:
    """Return the characters of the screen."""
    return "\n".join(lines(pilot))


def lines(pilot: Pilot[None]) -> list[str]:
    """Return the characters of each line of the screen."""
    app = pilot.app
    update = app.screen._compositor.render_strips()
    return [strip.text for strip in update]


async def filter_by(pilot: Pilot[None], words: str) -> None:
    """Type a filter, and keep it."""
    await pilot.press("slash")
    await until(pilot, lambda: pilot.app.focused is not None and pilot.app.focused.id == "filter")
    await pilot.press(*(_KEYS.get(ch, ch) for ch in words), "enter")


async def fill(pilot: Pilot[None], key: str, *texts: str) -> None:
    """Press a key that brings a form, and fill it in."""
    await pilot.press(key)
    for at, one in enumerate(texts):
        await until(pilot, lambda at=at: pilot.app.focused is not None and pilot.app.focused.id == f"field{at}")  # type: ignore[misc]
        field = pilot.app.focused
        assert isinstance(field, Input)
        field.value = one
        await pilot.press("enter")


_KEYS = {" ": "space", "-": "minus", ":": "colon"}


def differences(double: Any, real: Any, place: str = "") -> list[str]:
    """Return where an answer of a double could not be one of the real service: a name or a type that it has not.

    A value that is null on one side, and the elements of an empty list, are compared with nothing.
    """
    if double is None or real is None:
        return []
    if type(double) is not type(real):
        return [f"{place}: {type(double).__name__}, really {type(real).__name__}"]
    if isinstance(double, dict):
        absent = [f"{place}.{name} is not there" for name in double if name not in real]
        return absent + [
            one for name in double if name in real for one in differences(double[name], real[name], f"{place}.{name}")
        ]
    if isinstance(double, list):
        # Elements may be of several kinds: each of the double is like one of the real ones.
        found = [min((differences(one, other, f"{place}[]") for other in real), key=len, default=[]) for one in double]
        return [line for lines in found for line in lines]
    return []
