"""docs/console.md: its commands as typed, and its table of pages compared with the menu."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import cli_daemon_kit
from tests.cli_kit import call
from tests.house.test_docs import commands

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/console.md").read_text()
MENU = (ROOT / "covenant/adapters/console/static/app/main.js").read_text()


def test_commands_print_what_page_shows(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = commands(PAGE)
    monkeypatch.setenv("COVENANT_HOME", str(covenant_home))
    with cli_daemon_kit.running(covenant_home, http_port=0) as one:
        words = command.split()[1:]
        printed = call(*words).stdout
        assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/#code=[A-Za-z0-9_-]{43}\n", printed)
        document = json.loads(call(*words, "--json").stdout)
        assert (document["kind"], set(document)) == ("console", {"kind", "url", "expires_at"})
        assert document["url"].startswith(one.server.console.address)


def test_page_lists_the_menu() -> None:
    listed = re.findall(r"^\| ([A-Z][^|]*) \| `#/([a-z]*)`", PAGE, re.MULTILINE)
    table = re.search(r"const PAGES = \{(.*?)\n?\};", MENU, re.DOTALL)
    assert table
    menu = re.findall(r'"?([a-z]*)"?: \["([A-Z][^"]*)"', table[1])
    assert [(part, name) for name, part in listed] == menu != []
