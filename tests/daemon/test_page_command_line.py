"""docs/command-line.md: its commands are run from the first to the last and print what stands there; its table is
every verb, with the envelope that the verb has."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from covenant.cli import main
from tests import cli_daemon_kit
from tests.cli_kit import call
from tests.daemon.test_lifecycle import process, rows
from tests.house.test_docs import commands

_FENCE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `([^`]+)` \| (?:`([^`]+)`)? ?\|(.*)\|$", re.MULTILINE)
# Verbs of these groups are about packages or files, and on other pages.
_ELSEWHERE = {
    "tools describe", "tools verify", "tools pin", "tools advertised", "tools serve",
    "audit verify", "audit purge", "audit prove", "audit checkpoint", "audit cosign", "audit cosigned",
}  # fmt: skip
_GROUPS = (
    "ping", "version", "daemon", "completion", "bootstrap", "intent", "intents", "agents", "memory", "ignore", "tools",
    "capabilities", "peers", "a2a", "receipts", "settlement", "chain", "budget", "verify", "audit",
)  # fmt: skip


def steps(page: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of the page, and the lines below it."""
    for block in _FENCE.findall(page):
        command, shown = "", list[str]()
        for line in block.splitlines():
            if line.startswith("$ "):
                if command:
                    yield command, shown
                command, shown = line[2:], []
            else:
                shown.append(line)
        yield command, shown


def test_page_can_be_followed(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    monkeypatch.delenv("COVENANT_TOKEN_FILE", raising=False)
    cli_daemon_kit.package(home, "hello")
    ran = 0
    with cli_daemon_kit.running(home):
        for command, shown in steps((clone / "docs/command-line.md").read_text()):
            words = shlex.split(command)
            assert words[0] == "covenant"
            result = call(*words[1:])
            assert result.exit_code == 0, (command, result.output, result.exception)
            said = result.stdout.splitlines()
            assert len(said) == len(shown), (command, said)
            for line, wanted in zip(said, shown, strict=True):
                pattern = re.escape(wanted).replace(re.escape("..."), ".+")
                assert re.fullmatch(pattern, line), (command, line, wanted)
            ran += 1
    assert ran >= 25


def test_daemon_of_page_is_started_reached_and_stopped(covenant_home: Path, clone: Path) -> None:
    line = "covenant daemon"
    assert line in commands((clone / "docs/command-line.md").read_text())
    program, *words = shlex.split(line)
    with process(covenant_home, clone, str(Path(sys.executable).parent / program), *words) as one:
        # It has been asked over its socket; Ctrl-C ends it as it ends covenantd.
        status, said = one.end(signal.SIGINT)
    assert status == 0, said
    assert not (covenant_home / "sock").exists()
    assert [row["reason"] for row in rows(covenant_home, "daemon_stopped")] == ["SIGINT"]


def verbs() -> set[str]:
    """Every verb of the daemon."""
    context = click.Context(main.cli, info_name="covenant")

    def below(command: click.Command, name: str) -> Iterator[str]:
        if not isinstance(command, click.Group):
            if not command.hidden:
                yield name
            return
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from below(found, f"{name} {each}")

    found = set()
    for group in _GROUPS:
        command = main.cli.get_command(context, group)
        assert command is not None
        found |= set(below(command, group))
    return found - _ELSEWHERE


def test_table_is_every_verb(clone: Path) -> None:
    rows = _ROW.findall((clone / "docs/command-line.md").read_text())
    named = {re.sub(r" [A-Z@]+\b.*| bash$", "", verb): (kind, text) for verb, kind, text in rows}
    assert set(named) == verbs()
    here = Path(__file__).parent
    recorded = {
        name.split()[0]
        for file in ("cli_envelopes.json", "cli_envelopes_mail.json")
        for name in json.loads((here / file).read_text())
    }
    listed = {kind for kind, _ in named.values() if kind} | {
        match[1] for _, text in named.values() if (match := re.search(r"`schema` (\S+)", text))
    }
    # What the tests of verbs recorded is what the page says; these are held elsewhere.
    assert listed - {"intents_resume", "audit_archived", "audit_recent", "audit_tree"} == recorded
