"""The screens over a view: a text, a question before an act with its answer, and fields to fill in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input

from covenant.tui import safe_text, sources
from covenant.tui.sources import Sources
from covenant.tui.view import Choice, Form, Question, broken, refused
from covenant.tui.widgets import Bar, Pane
from policy import errors

# A choice may be worded by a service; it must not look like several.
_WORD_CELLS: Final = 20


class TextScreen(ModalScreen[None]):
    """A text that scrolls; Esc, q and Enter close it. No key of it reaches the view below."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", show=False)]
    ALLOW_SELECT = False

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title, self._lines = title, tuple(lines)

    def compose(self) -> ComposeResult:
        head = Bar(style=safe_text.BOLD, place="head")
        head.text = self._title
        foot = Bar(place="foot")
        foot.text = "up/down, page, home, end   Esc back"
        yield head
        yield Pane(self._lines, place="text")
        yield foot

    async def action_dismiss(self, result: None = None) -> None:
        self.dismiss(result)


class QuestionScreen(ModalScreen[None]):
    """A question before an act. A key of its choices does the act; then it shows the answer, or the error and its fix,
    until a key is pressed. Esc and n leave without doing anything; while an answer is awaited Esc only closes it, and
    ``late`` gets the lines when they come."""

    DEFAULT_CSS = """
    QuestionScreen { align: center bottom; }
    QuestionScreen Vertical { height: 15; border: ascii ansi_default; }
    """
    ALLOW_SELECT = False

    def __init__(
        self,
        question: Question,
        run: Callable[[Callable[[], None]], object],
        given: Sources,
        late: Callable[[Sequence[str]], None],
    ) -> None:
        super().__init__()
        self.question, self._run, self._sources, self._late = question, run, given, late
        self.state = "asked"

    def compose(self) -> ComposeResult:
        title, foot = Bar(style=safe_text.BOLD, place="title"), Bar(style=safe_text.BOLD, place="choices")
        title.text = self.question.title
        keys = [f"{choice.key} {safe_text.cut(choice.word, _WORD_CELLS)}" for choice in self.question.choices]
        foot.text = "   ".join([*keys, "Esc no"])
        with Vertical():
            yield title
            yield Pane(self.question.lines, place="lines")
            yield foot

    def on_key(self, event: Key) -> None:
        """Do what the key chooses; every key is taken, so that none reaches the view below."""
        if event.key in ("up", "down", "pageup", "pagedown", "home", "end"):
            return
        event.stop()
        if self.state == "done" or event.key == "escape" or (self.state == "asked" and event.key == "n"):
            self.state = "closed"
            self.dismiss(None)
            return
        choice = next((one for one in self.question.choices if one.key == event.character), None)
        if self.state == "asked" and choice is not None:
            self._do(choice)

    def _do(self, choice: Choice) -> None:
        self.state = "busy"
        self.query_one("#choices", Bar).show(f"{choice.word}: asked, waiting for the answer ... (Esc does not stop it)")

        def work() -> None:
            try:
                lines = list(choice.act(self._sources))
            except errors.CovenantError as e:
                lines = refused(e)
            except Exception as e:
                lines = broken(e)
            self._run(lambda: self._said(lines))

        sources.start(work)

    def _said(self, lines: Sequence[str]) -> None:
        if self.state == "closed":
            self._late(lines)
            return
        self.state = "done"
        self.query_one("#lines", Pane).show(lines)
        self.query_one("#choices", Bar).show("any key closes this")


class FormScreen(ModalScreen[list[str] | None]):
    """Fields to fill in: Enter goes to the next one, and from the last one on; Esc leaves."""

    DEFAULT_CSS = """
    FormScreen { align: center bottom; }
    FormScreen Vertical { height: auto; border: ascii ansi_default; }
    FormScreen Input { height: 1; border: none; padding: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", show=False)]
    ALLOW_SELECT = False

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def compose(self) -> ComposeResult:
        title, foot = Bar(style=safe_text.BOLD, place="title"), Bar(place="choices")
        title.text, foot.text = self.form.title, "Enter next, on the last one: go on   Esc no"
        with Vertical():
            yield title
            for at, name in enumerate(self.form.fields):
                label = Bar()
                label.text = f"{name}:"
                yield label
                first = self.form.first[at] if at < len(self.form.first) else ""
                yield Input(value=first, id=f"field{at}", compact=True, select_on_focus=False)
            yield foot

    def on_mount(self) -> None:
        self.query_one("#field0", Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go to the next field, or close with the texts of all."""
        event.stop()
        at = int(str(event.input.id).removeprefix("field"))
        if at + 1 < len(self.form.fields):
            self.query_one(f"#field{at + 1}", Input).focus()
        else:
            self.dismiss([self.query_one(f"#field{n}", Input).value for n in range(len(self.form.fields))])

    def action_leave(self) -> None:
        """Close without the texts."""
        self.dismiss(None)
