"""The home and the state: a place that cannot be one is refused with the setting that names another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policy import errors
from tests.cli_kit import call, refused


@pytest.mark.parametrize("variable", ["COVENANT_HOME", "COVENANT_STATE"])
def test_fix_of_unusable_home_works(variable: str, covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = covenant_home.with_name("file")
    file.touch()
    for place in (file, file / "below"):
        monkeypatch.setenv(variable, str(place))
        error = refused("home_unsafe", "models", "list") if variable == "COVENANT_STATE" else _keys()
        assert re.search(rf"set .*{variable}", error.hint)
    # The fix.
    monkeypatch.setenv(variable, str(covenant_home.with_name("other")))
    assert call("models", "list").exit_code == call("keys", "list").exit_code == 0


def _keys() -> errors.CovenantError:
    return refused("home_unsafe", "keys", "list")
