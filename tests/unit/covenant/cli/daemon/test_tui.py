"""The verb of the screens: what it needs, and what it says where that is not there."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from covenant.cli import terminal
from covenant.cli.daemon import tui
from tests import extras_kit
from tests.cli_kit import refused


def test_screens_need_a_terminal() -> None:
    assert "covenant ps --json" in refused("usage", "tui").hint


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix installs what is missing: the extra that it names brings textual."""
    monkeypatch.setattr(terminal, "on_terminal", lambda: True)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "textual" else found(name))
    error = refused("screens_missing", "tui")
    assert error.hint == extras_kit.command("tui")


def test_silent_services_are_named(covenant_home: pathlib.Path) -> None:
    from policy import errors

    with pytest.raises(errors.DaemonSilentError):
        tui.ask_daemon("ping")
    with pytest.raises(errors.NoSupervisorError) as caught:
        tui.ask_supervisor("ps")
    assert "covenant-supervisor" in caught.value.hint
