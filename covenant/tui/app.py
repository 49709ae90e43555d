"""The app of ``covenant tui``: one view at a time, loaded in a thread at its interval, and acts that ask first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from textual.app import App, ComposeResult, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input

from covenant.tui import bindings, filters, safe_text, sources, view
from covenant.tui.dialogs import FormScreen, QuestionScreen, TextScreen
from covenant.tui.intent_views import ApprovalsView, IntentsView
from covenant.tui.log_views import AuditView, DenialsView
from covenant.tui.people_views import CapabilitiesView, MailboxView, PeersView
from covenant.tui.run_views import RunsView, SessionsView
from covenant.tui.service_views import ServicesView, WorkspacesView
from covenant.tui.sources import Sources
from covenant.tui.store_views import MemoryView, ReceiptsView
from covenant.tui.view import Attach, Form, Loaded, Question, Row, View, ViewRequest, broken, refused
from covenant.tui.widgets import Bar, Pane, Table
from policy import errors

# Below so many lines the pane is left out.
_LINES_FOR_PANE: Final = 18
# How often approvals are looked for while another view is shown.
_APPROVALS_SECONDS: Final = 5.0


def every_view() -> list[View]:
    """Return the views in the order in which `[` and `]` turn them."""
    return [
        RunsView(),
        IntentsView(),
        SessionsView(),
        DenialsView(),
        ApprovalsView(),
        MemoryView(),
        AuditView(),
        CapabilitiesView(),
        MailboxView(),
        ReceiptsView(),
        PeersView(),
        ServicesView(),
        WorkspacesView(),
    ]


@dataclasses.dataclass
class Shown:
    """The state of a view: its rows, its filter, its limit. ``again``: load once more when the load under way ends."""

    loaded: Loaded = dataclasses.field(default_factory=lambda: Loaded(()))
    text: str = ""
    limit: int = view.FIRST_LIMIT
    has_answer: bool = False
    busy: bool = False
    again: bool = False


class MainScreen(Screen[None]):
    """The head, the filter, the table, the pane and the foot."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    MainScreen #filter { height: 1; border: none; padding: 0; display: none; }
    MainScreen #filter.open { display: block; }
    MainScreen #about { height: 6; border-top: ascii ansi_default; }
    MainScreen.small #about { display: none; }
    """

    class Ready(Message):
        """The widgets are there."""

    def compose(self) -> ComposeResult:
        yield Bar(style=safe_text.BOLD, place="head")
        yield Bar(place="status")
        yield Input(placeholder="filter: word, -word, column:word", id="filter", compact=True, select_on_focus=False)
        yield Table(place="table")
        pane = Pane(place="about")
        pane.can_focus = False
        yield pane
        yield Bar(style=safe_text.BOLD, place="foot")

    def on_mount(self) -> None:
        self.query_one(Table).focus()
        self.post_message(self.Ready())


class TerminalApp(App[None]):
    """The screens over ``sources``. ``clock`` is the time in Unix milliseconds."""

    TITLE = "Covenant"
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]

    class Later(Message):
        """Work that a thread leaves for the app's loop."""

        def __init__(self, work: Callable[[], None]) -> None:
            super().__init__()
            self.work = work

    def __init__(self, given: Sources, *, clock: Callable[[], int] = view.now_ms) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.given, self.clock = given, clock
        self.views = every_view()
        self.shown = {one.name: Shown() for one in self.views}
        self.view = self.views[0]
        self.intents = next(one for one in self.views if isinstance(one, IntentsView))
        self.capabilities = next(one for one in self.views if isinstance(one, CapabilitiesView))
        # Approvals that wait, and the answer to an act whose question was closed before it came.
        self.waiting = 0
        self.late = ""
        self._looking = False
        self._timer: Timer | None = None
        for one in bindings.every(self.views):
            if one.key != "ctrl+c":
                self.bind(one.name, one.action)

    def get_default_screen(self) -> Screen[None]:
        return MainScreen()

    @property
    def main(self) -> Screen[Any]:
        """The screen with the table, below every dialog."""
        return self.screen_stack[0]

    def on_main_screen_ready(self) -> None:
        """Show the first view."""
        self.action_show(self.view.name)
        self.set_interval(_APPROVALS_SECONDS, self._look_for_approvals)
        self._look_for_approvals()

    def on_resize(self) -> None:
        """Leave the pane out where the terminal is low."""
        self.main.set_class(self.size.height < _LINES_FOR_PANE, "small")

    # --- loading ------------------------------------------------------------------------------------------------

    def action_show(self, name: str) -> None:
        """Show a view, with what it had when it was last shown until it is loaded anew."""
        self.view = next(one for one in self.views if one.name == name)
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_interval(self.view.seconds, self._load)
        self.main.query_one("#filter", Input).value = self.shown[name].text
        self._draw()
        self._load()

    def action_turn(self, by: int) -> None:
        """Show the next view, or the one before."""
        self.action_show(self.views[(self.views.index(self.view) + by) % len(self.views)].name)

    def action_reload(self) -> None:
        """Load now."""
        self._load()

    def action_more(self) -> None:
        """Load twice as many rows."""
        shown = self.shown[self.view.name]
        shown.limit = min(view.MOST_LIMIT, 2 * shown.limit)
        self._load()

    def _load(self) -> None:
        """Load the view in a thread, unless that goes on already."""
        one, shown = self.view, self.shown[self.view.name]
        if shown.busy:
            return
        shown.busy, shown.again = True, False
        asked = ViewRequest(shown.text, shown.limit, self.clock())

        def work() -> None:
            try:
                loaded = one.load(self.given, asked)
            except errors.CovenantError as e:
                loaded = Loaded((), tuple(refused(e)))
            except Exception as e:  # an answer of another version must not end the screens
                loaded = Loaded((), tuple(broken(e)))
            self._later(lambda: self._came(one, loaded))

        sources.start(work)

    def _later(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the app's loop; nothing once the app has ended."""
        self.post_message(self.Later(work))

    def on_terminal_app_later(self, message: Later) -> None:
        """Run it, unless the widgets are being taken away: an answer may come while the app ends."""
        if self._is_whole():
            message.work()

    def _is_whole(self) -> bool:
        parts = ("#head", "#status", "#filter", "#table", "#about", "#foot")
        return bool(self.screen_stack) and all(self.main.query(part) for part in parts)

    def _came(self, one: View, loaded: Loaded) -> None:
        shown = self.shown[one.name]
        shown.busy, shown.has_answer, shown.loaded = False, True, loaded
        if one is self.view:
            self._draw()
            if shown.again:
                self._load()

    def _load_again(self) -> None:
        """Load now, and once more if a load is under way that does not know of what has changed."""
        self.shown[self.view.name].again = True
        self._load()

    def _look_for_approvals(self) -> None:
        """Count the approvals that wait, so that every view says so."""
        if self._looking:
            return
        self._looking = True

        def work() -> None:
            count = 0
            with contextlib.suppress(errors.CovenantError):
                count += len(self.given.daemon("list_approvals")["approvals"])
            with contextlib.suppress(errors.CovenantError):
                count += len(self.given.supervisor("approvals", verb="list")["requests"])
            self._later(lambda: counted(count))

        def counted(count: int) -> None:
            self._looking = False
            if count != self.waiting:
                self.waiting = count
                self._draw_head()

        sources.start(work)

    # --- drawing ------------------------------------------------------------------------------------------------

    def rows(self) -> tuple[Row, ...]:
        """The rows of the view that meet its filter."""
        shown = self.shown[self.view.name]
        heads, terms = self.view.heads, self.view.terms(shown.text)
        return tuple(row for row in shown.loaded.rows if filters.matches(terms, heads, row.cells))

    def _draw(self) -> None:
        shown, rows = self.shown[self.view.name], self.rows()
        loaded = shown.loaded
        self._draw_head()
        count = f"rows: {len(rows)}" + (f" of {len(loaded.rows)}" if shown.text else "")
        more = ", the newest (+ loads more)" if loaded.more else ""
        text = f", filter: {shown.text}" if shown.text else ""
        known = f"{count}{more}{text}" if shown.has_answer else "asking ..."
        self._bar("status").show(f"{self.view.title}; {known}")
        keys = [f"{key} {words}" for key, words in self.view.acts.items()]
        self._bar("foot").show("   ".join(["? keys", "/ filter", "q quit", *keys]))
        self.main.query_one(Table).show(self.view.columns, rows, loaded.notes)

    def _draw_head(self) -> None:
        states = "   ".join(f"{name}: {self.given.states.get(name, 'asked')}" for name in ("daemon", "supervisor"))
        waiting = f"   ! approvals: {self.waiting} (o)" if self.waiting else ""
        late = f"   {self.late}" if self.late else ""
        self._bar("head").show(f"Covenant  {self.view.name}  {states}{waiting}{late}")

    def _bar(self, name: str) -> Bar:
        return self.main.query_one(f"#{name}", Bar)

    def on_table_moved(self) -> None:
        """Show in the pane what the row below the cursor is."""
        if not self._is_whole():
            return
        row = self._row()
        about = [] if row is None else self.view.about(row)
        self.main.query_one("#about", Pane).show([f"{name}: {view.first_line(text)}" for name, text in about])

    def _row(self) -> Row | None:
        return self.main.query_one(Table).chosen

    # --- the filter ---------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Open the filter."""
        field = self.main.query_one("#filter", Input)
        field.add_class("open")
        self.call_after_refresh(field.focus)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        if event.input.id == "filter" and event.value != self.shown[self.view.name].text:
            self.shown[self.view.name].text = event.value
            self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter, and go back to the table."""
        if event.input.id == "filter":
            self._close_filter()

    def key_escape(self) -> None:
        """End the filter."""
        self.main.query_one("#filter", Input).value = ""
        self.shown[self.view.name].text = ""
        self._close_filter()

    def _close_filter(self) -> None:
        self.main.query_one("#filter", Input).remove_class("open")
        self.main.query_one(Table).focus()
        self._draw()
        self._load_again()

    # --- acts ---------------------------------------------------------------------------------------------------

    def action_act(self, key: str) -> None:
        """Ask before an act of the view on the row below the cursor."""
        one, row = self.view, self._row()
        if key in one.acts:
            self._ask(lambda: one.ask(self.given, key, row))

    def action_draft(self) -> None:
        """Write a draft of an intent."""
        self.action_show(self.intents.name)
        self._asked(self.intents.form())

    def action_submit(self) -> None:
        """Ask before the latest draft is submitted."""
        self._ask(self.intents.submit)

    def action_grant(self) -> None:
        """Write a grant."""
        self._asked(self.capabilities.form())

    def _ask(self, made: Callable[[], Question | Form | Attach | None]) -> None:
        """Make a question in a thread, since it may need an answer itself, and show it."""

        def work() -> None:
            try:
                question = made()
            except errors.CovenantError as e:
                lines = refused(e)
            except Exception as e:
                lines = broken(e)
            else:
                self._later(lambda: self._asked(question))
                return
            self._later(lambda: self._show_text("it cannot be asked for", lines))

        sources.start(work)

    def _asked(self, asked: Question | Form | Attach | None) -> None:
        if len(self.screen_stack) > 1:
            return  # a key that was pressed twice asks once
        if isinstance(asked, Question):
            self.late = ""
            self.push_screen(QuestionScreen(asked, self._later, self.given, self._came_late), self._after_question)
        elif isinstance(asked, Form):
            then = asked.then

            def filled(texts: Sequence[str] | None) -> None:
                if texts is not None:
                    self._ask(lambda: then(texts))

            self.push_screen(FormScreen(asked), filled)
        elif isinstance(asked, Attach):
            self._lend_terminal(asked.run_id)
        if asked is None or isinstance(asked, Attach):
            self._load_again()

    def _lend_terminal(self, run_id: str) -> None:
        """Give the terminal to ``covenant attach`` until it ends."""
        try:
            with self.suspend():
                self.given.attach(run_id)
        except SuspendNotSupported:
            self._show_text(
                "not attached", ["! this terminal cannot be given away", f"  fix: covenant attach {run_id}"]
            )

    def _after_question(self, _: None) -> None:
        self._load_again()
        self._look_for_approvals()

    def _came_late(self, lines: Sequence[str]) -> None:
        self.late = view.first_line(" ".join(lines))
        self._draw_head()
        self._load_again()

    def action_whole(self) -> None:
        """Show all of the row below the cursor."""
        one, row = self.view, self._row()
        if row is None:
            return

        def work() -> None:
            try:
                lines = one.whole(self.given, row)
            except errors.CovenantError as e:
                lines = [*(f"{name}: {text}" for name, text in one.about(row)), "", *refused(e)]
            except Exception as e:
                lines = broken(e)
            self._later(lambda: self._show_text(f"{one.name}: {row.cells[0]}", lines))

        sources.start(work)

    def _show_text(self, title: str, lines: Sequence[str]) -> None:
        if len(self.screen_stack) > 1:
            return
        self.push_screen(TextScreen(title, lines))

    def action_help(self) -> None:
        """Show the keys."""
        self._show_text("keys", [f"{one.key:>7}  {one.words}" for one in bindings.every(self.views)])
