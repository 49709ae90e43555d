"""A picture of each view and dialog of the screens at 80 x 24, kept in tests/golden/tui.

Regenerate with: .venv/bin/python -m tests.golden.test_tui
"""

from __future__ import annotations

import asyncio
import pathlib
import re

import pytest
from textual.widgets import Input

from covenant.tui.app import every_view
from tests import tui_kit
from tests.tui_data import DAEMON, SUPERVISOR
from tests.tui_kit import NO_DAEMON, NO_SUPERVISOR, Service, Silent

_PLACE = pathlib.Path(__file__).resolve().parent / "tui"
# Where a font would be fetched from. A picture loads nothing.
_FONTS = re.compile(r"\s*@font-face \{.*?\}|<!--.*?-->", re.DOTALL)
VIEWS = [one.name for one in every_view()]
# The keys that bring each dialog, and the words by which it is there.
DIALOGS = {
    "kill": ("t down k", "y yes"),
    "grant": ("g", "action:"),
    "denial": ("d enter", "Esc back"),
    "approval": ("o down y", "1 once"),
    "held": ("o y", "4 for 10 minutes"),
    "apply": ("w u", "y yes"),
    "help": ("question_mark", "Esc back"),
}
SILENT = {"no daemon": (True, False), "no supervisor": (False, True)}


async def picture(keys: str, words: str, *, silent: tuple[bool, bool] = (False, False)) -> str:
    """Return the picture after these keys, once the words are there."""
    daemon = Silent(NO_DAEMON) if silent[0] else Service(DAEMON)
    supervisor = Silent(NO_SUPERVISOR) if silent[1] else Service(SUPERVISOR)
    async with tui_kit.opened(tui_kit.sources(daemon, supervisor)) as pilot:
        app = tui_kit.app_of(pilot)
        await tui_kit.until(pilot, lambda: app.waiting == 2 - sum(silent))
        await tui_kit.says(pilot, "supervisor: none" if silent[1] else "supervisor: ok")
        for key in keys.split():
            await (tui_kit.show(pilot, key) if key in {one.key for one in app.views} else pilot.press(key))
        if app.view.name == "audit":
            await tui_kit.says(pilot, "chain: holds")
        await tui_kit.says(pilot, words)
        for field in app.screen.query(Input):
            # A cursor that blinks is there or not, as half seconds pass.
            field.cursor_blink = False
        await pilot.pause(0.1)
        return _FONTS.sub("", app.export_screenshot(title="covenant tui"))


def pictures() -> dict[str, tuple[str, str, tuple[bool, bool]]]:
    """Return the keys, the words and the silent services of each picture."""
    keys = {one.name: one.key for one in every_view()}
    views = {name: (keys[name], "? keys", (False, False)) for name in VIEWS}
    dialogs = {name: (*how, (False, False)) for name, how in DIALOGS.items()}
    return views | dialogs | {name: ("t", "fix:", how) for name, how in SILENT.items()}


def _file(name: str) -> pathlib.Path:
    return _PLACE / f"{name.replace(' ', '_')}.svg"


@pytest.mark.anyio
@pytest.mark.parametrize("name", sorted(pictures()))
async def test_picture_is_the_kept_one(name: str) -> None:
    assert await picture(*pictures()[name][:2], silent=pictures()[name][2]) == _file(name).read_text()


def test_pictures_load_nothing() -> None:
    kept = sorted(_PLACE.glob("*.svg"))
    assert {one.stem for one in kept} == {_file(name).stem for name in pictures()}
    for one in kept:
        # The words that are shown may hold an address: they load nothing.
        loading = re.sub(r"(<text\b[^<>]*>)[^<]*", r"\1", one.read_text())
        assert set(re.findall(r"https?://[^\"'\s)]*", loading)) <= {"http://www.w3.org/2000/svg"}
        assert "@font-face" not in one.read_text()
        assert "url(h" not in one.read_text()


if __name__ == "__main__":
    _PLACE.mkdir(exist_ok=True)
    for name, (keys, words, silent) in pictures().items():
        _file(name).write_text(asyncio.run(picture(keys, words, silent=silent)))
