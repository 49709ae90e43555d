"""A supervisor without its state names the command that makes the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import errors
from sandbox.serve import main
from sandbox.serve.api import paths


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [("COVENANT_HOME", "/srv/a b", "'/srv/a b/supervisor'"), ("COVENANT_STATE", "/srv/s", "/srv/s")],
)
def test_absent_state_names_that_of_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: str
) -> None:
    for name in ("COVENANT_HOME", "COVENANT_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(errors.HomeError) as caught:
        main.serve(tmp_path / "absent")
    assert caught.value.hint.endswith(f"or name another: covenant-supervisor --state {named}")


@pytest.mark.parametrize(
    ("candidates", "hint"),
    [
        (["/srv/a b/supervisor.sock"], "start covenant-supervisor --state '/srv/a b'"),
        (["/srv/h/supervisor.sock", paths.SYSTEM_SOCKET], "start covenant-supervisor"),
        ([paths.SYSTEM_SOCKET], "start covenant-supervisor"),
        (["/srv/named.socket"], "start covenant-supervisor"),
        ([], "start covenant-supervisor"),
    ],
)
def test_hint_names_state_of_socket(candidates: list[str], hint: str) -> None:
    assert paths.start(candidates) == hint


def test_absent_state_is_refused_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COVENANT_HOME", "COVENANT_STATE"):
        monkeypatch.delenv(name, raising=False)
    state = tmp_path / "absent"
    with pytest.raises(errors.HomeError) as caught:
        main.serve(state)
    assert caught.value.message == f"there is no directory `{state}`"
    assert caught.value.hint == f"install -d -m 0700 {state}, or name another: covenant-supervisor --state DIRECTORY"
