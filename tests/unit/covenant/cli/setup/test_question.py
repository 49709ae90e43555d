"""The question of ``covenant setup`` before it changes the host.

The host is a table of three parts below the test's own directory, and the steps of the packages only write their name.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from covenant.cli import terminal
from covenant.cli.setup import commands, files, question
from tests.cli_kit import call, document


@dataclass
class Host:
    """Where the parts go, and the steps that ran."""

    path: Path
    steps: list[str]
    config: str

    def laid(self) -> list[str]:
        return sorted(one.name for one in self.path.iterdir() if one.name != "record.json")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    place = str(tmp_path).lstrip("/")
    made = Host(tmp_path, [], f"{place}/config.toml")
    parts = [
        files.Part(f"{place}/unit", b"unit\n"),
        files.Part(f"{place}/command", target="/opt/bin/command"),
        files.Part(made.config, b"# shipped\n"),
    ]
    monkeypatch.setattr(files, "parts", lambda prefix, version: iter(parts))
    monkeypatch.setattr(files, "CONFIGURATION", (made.config,))
    monkeypatch.setattr(files, "fault", lambda path, info: "")
    monkeypatch.setattr(commands, "RECORD", f"{place}/record.json")
    monkeypatch.setattr(commands, "step", lambda *words: made.steps.append(" ".join(words)))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return made


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command's stdin and stdout be a terminal."""
    monkeypatch.setattr(terminal, "on_terminal", lambda: True)


@pytest.mark.usefixtures("typed")
def test_no_at_terminal_changes_nothing(host: Host) -> None:
    (host.path / "config.toml").write_text("# mine\n")
    said = call("setup", stdin="n\n")
    assert (said.exit_code, host.laid(), host.steps) == (1, ["config.toml"], [])
    assert said.stdout == ""
    assert f"writes    {host.path}/unit\n" in said.stderr
    assert f"keeps     {host.path}/config.toml\n" in said.stderr
    assert "users covenant-agent, covenant; directories /var/lib/covenant," in said.stderr
    assert "starts    covenant-supervisor.socket" in said.stderr
    assert "restarts" not in said.stderr


@pytest.mark.usefixtures("typed")
def test_yes_at_terminal_installs_and_removes(host: Host) -> None:
    assert call("setup", stdin="y\n").exit_code == 0
    assert (host.laid(), host.steps) == (["command", "config.toml", "unit"], ["postinstall configure"])
    (host.path / "unit").write_text("other\n")
    again = call("setup", stdin="y\n")
    assert again.exit_code == 0
    assert f"replaces  {host.path}/unit\n" in again.stderr
    assert "restarts  services" in again.stderr
    (host.path / "config.toml").write_text("# mine\n")
    host.steps.clear()
    said = call("setup", "--remove", stdin="n\n")
    assert (said.exit_code, len(host.laid()), host.steps) == (1, 3, [])
    assert f"removes   {host.path}/unit\n" in said.stderr
    assert f"keeps     {host.path}/config.toml, which was changed\n" in said.stderr
    assert call("setup", "--remove", stdin="y\n").exit_code == 0
    assert (host.laid(), host.steps) == (["config.toml"], ["preremove remove", "postremove remove"])


@pytest.mark.parametrize("word", ["--yes", "--json"])
@pytest.mark.usefixtures("typed")
def test_option_asks_nothing(word: str, host: Host) -> None:
    assert call("setup", word).stderr == ""
    assert len(host.laid()) == 3


def test_script_without_terminal_is_asked_nothing(host: Host) -> None:
    assert call("setup").stderr == ""
    assert call("setup", "--remove").stderr == ""
    assert host.laid() == []


@pytest.mark.usefixtures("typed")
def test_tree_below_a_directory_asks_nothing(host: Host, tmp_path: Path) -> None:
    assert document("setup", "--root", tmp_path / "tree")["kind"] == "setup_laid"
    assert host.steps == []


@pytest.mark.usefixtures("typed")
def test_refusal_comes_before_the_question(host: Host) -> None:
    (host.path / "unit").write_text("of a package\n")
    said = call("setup", stdin="y\n")
    assert "belongs to another installation" in str(said.exception)
    assert (said.stderr, host.steps) == ("", [])


@pytest.mark.usefixtures("typed")
def test_file_that_a_version_dropped_is_named(host: Host) -> None:
    (host.path / "dropped").write_text("")
    (host.path / "record.json").write_text(json.dumps({"files": {f"{str(host.path).lstrip('/')}/dropped": ""}}))
    said = call("setup", stdin="y\n")
    assert f"removes   {host.path}/dropped\n" in said.stderr
    assert "dropped" not in host.laid()


def test_many_files_of_a_directory_are_one_line(tmp_path: Path) -> None:
    parts = [files.Part(f"usr/share/man/man1/{number}.1.gz", b"page") for number in range(9)]
    lines = list(question.installing([*parts, files.Part("usr/bin/x", target="/x")], (), tmp_path, again=False))
    assert lines[:2] == ["writes    /usr/share/man/man1/ (9 files)", "writes    /usr/bin/x"]
