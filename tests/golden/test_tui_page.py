"""The table of keys in docs/tui.md is the table that the app binds.

Regenerate with: .venv/bin/python -m tests.golden.test_tui_page
"""

from __future__ import annotations

import pathlib

from covenant.tui import bindings
from covenant.tui.app import TerminalApp, every_view
from tests.tui_kit import Service, sources

_PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "tui.md"
_BEGIN, _END = "<!-- keys -->\n", "<!-- end of keys -->"
# Version 1's keys, and what each did there.
VERSION_1 = {
    "i": "draft",
    "s": "submit",
    "g": "grant",
    "m": "show('memory')",
    "a": "show('audit')",
    "c": "show('capabilities')",
    "A": "show('mailbox')",
    "r": "show('receipts')",
    "?": "help",
    "q": "quit",
    "ctrl+c": "quit",
}


def page() -> str:
    """Return the page with the table of the keys."""
    head, _, rest = _PAGE.read_text().partition(_BEGIN)
    return head + _BEGIN + bindings.table(every_view()) + "\n" + _END + rest.partition(_END)[2]


def test_page_has_every_key() -> None:
    assert _PAGE.read_text() == page(), "regenerate docs/tui.md (see above)"


def test_app_binds_every_key_of_the_table() -> None:
    keys = bindings.every(every_view())
    assert len({one.key for one in keys}) == len(keys)
    app = TerminalApp(sources(Service({}), Service({})))
    bound = {(binding.key, binding.action) for _, binding in app._bindings}
    assert {(one.name, one.action) for one in keys} <= bound


def test_keys_of_version_1_are_kept() -> None:
    keys = {one.key: one.action for one in bindings.every(every_view())}
    assert {key: keys.get(key) for key in VERSION_1} == VERSION_1


if __name__ == "__main__":
    _PAGE.write_text(page())
