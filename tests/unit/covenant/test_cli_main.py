"""Check that a command prints exactly one document on stdout, with its exit status, for every outcome."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from covenant.cli import main
from policy import errors
from tests.house import prose


def _entry(monkeypatch: pytest.MonkeyPatch, failure: BaseException, *arguments: str) -> int:
    def fail(**_: object) -> None:
        raise failure

    monkeypatch.setattr(sys, "argv", ["covenant", *arguments])
    monkeypatch.setattr(main.cli, "main", fail)
    monkeypatch.setattr(main, "one_command", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main.entry()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (errors.UnsignedError("not signed"), 1, "unsigned"),
        (errors.UsageError("no"), 2, "usage"),
        (click.UsageError("no such option"), 2, "usage"),
        (KeyboardInterrupt(), 1, "interrupted"),
        (RuntimeError("a mistake"), 1, "internal"),
    ],
)
def test_each_failure_is_one_document(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    status: int,
    code: str,
) -> None:
    assert _entry(monkeypatch, failure, "run", "x", "--json") == status
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "error"
    assert document["code"] == code


def test_mistake_of_ours_keeps_its_trace_off_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _entry(monkeypatch, RuntimeError("a mistake"), "run", "x") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "RuntimeError: a mistake" in err


def test_slip_in_first_word_is_answered_with_what_may_have_been_meant() -> None:
    for typed, meant in (("memry", "memory"), ("intnet", "intent"), ("capabilites", "capabilities")):
        with pytest.raises(click.UsageError, match=f"Did you mean '{meant}'"):
            main.cli.main([typed], standalone_mode=False)
    with pytest.raises(click.UsageError, match=r"^No such command 'qqqqq'\.$"):
        main.cli.main(["qqqqq"], standalone_mode=False)


def test_version_is_asked_for_as_of_any_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.cli.main(["--version"], standalone_mode=False) == 0
    assert capsys.readouterr().out == f"covenant {importlib.metadata.version('covenant-supervisor')}\n"


@pytest.mark.parametrize("arguments", [["version"], ["version", "--json"], ["--help"]])
@pytest.mark.parametrize("stdout", ["full", "closed"])
def test_stdout_that_takes_nothing_is_named(stdout: str, arguments: list[str]) -> None:
    """The error goes to stderr, for --json as well, and the status is no success."""
    command = [sys.executable, "-m", "covenant", *arguments]
    to = "> /dev/full" if stdout == "full" else ">&-"
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {to}', "sh", *command], stderr=subprocess.PIPE, text=True, timeout=60, cwd=prose.ROOT
    )
    assert done.returncode == 1, done.stderr
    assert "[stdout_failed]" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@contextlib.contextmanager
def _pipe(*, reader: bool) -> Iterator[int]:
    """Yield a pipe that takes nothing: full and not blocking, or without its ``reader``."""
    taken, given = os.pipe()
    try:
        os.set_blocking(given, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(given, bytes(4096))
        if not reader:
            os.close(taken)
        yield given
    finally:
        os.close(given)
        if reader:
            os.close(taken)


@pytest.mark.parametrize("arguments", [["version", "--json"], ["--help"]])
def test_stdout_that_would_block_is_named(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "covenant", *arguments]
    with _pipe(reader=True) as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, cwd=prose.ROOT)
    assert done.returncode == 1, done.stderr
    assert "[stdout_failed]" in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("arguments", [["version", "--json"], ["--help"]])
def test_reader_that_has_ended_is_no_fault(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "covenant", *arguments]
    with _pipe(reader=False) as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, cwd=prose.ROOT)
    assert (done.returncode, done.stderr) == (1, "")


def test_text_with_dash_is_told_way(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["covenant", "run", "package", "- buy milk"])
    monkeypatch.setattr(main, "one_command", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main.entry()
    assert ended.value.code == 2
    assert "fix: write -- before a word that begins with a dash" in capsys.readouterr().err
    # The fix: after -- it is the text, and the package is what is not there.
    monkeypatch.setattr(sys, "argv", ["covenant", "run", "/nowhere", "--", "- buy milk"])
    with pytest.raises(SystemExit):
        main.entry()
    assert "No such option" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["run", "--jsno", "package"], "write --json"),
        (["audit", "recent", "--jsno"], "write --json"),
        (["ps", "--everything"], "covenant ps --help lists the options"),
        (["audit", "-x"], "covenant audit --help lists the options"),
        (["run", "package", "--json is what it asks for"], "write -- before a word that begins with a dash"),
        (["dev", "package", "good", "morning"], "put the text into quotes"),
        (
            ["vault", "put", "librarian", "mail", "planted"],
            "a secret comes from stdin: covenant vault put AGENT NAME < FILE",
        ),
        (["keys", "new", "ann", "bob"], "covenant keys new --help shows its arguments"),
        (["run", "package", "-5"], "write -- before a word that begins with a dash"),
    ],
)
def test_wrong_usage_has_the_fix_of_its_command(
    words: list[str], fix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "one_command", lambda: None)
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["covenant", *words, *more])
        with pytest.raises(SystemExit) as ended:
            main.entry()
        assert ended.value.code == 2
        said = capsys.readouterr()
        found = json.loads(said.out)["hint"] if more else said.err.rpartition("  fix: ")[2]
        assert found.startswith(fix), said


def test_help_is_in_groups_and_has_every_command_once() -> None:
    from covenant.cli.main import COMMANDS, GROUPS
    from tests.cli_kit import done

    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)
    shown = done("--help")
    for heading in GROUPS:
        assert f"{heading}:" in shown
    assert shown.index("Author") < shown.index("Run:") < shown.index("Operator") < shown.index("Daemon")


@pytest.mark.parametrize(
    ("answer", "said"), [("n\n", "the answer was not yes: nothing was changed"), ("", "give --yes")]
)
def test_answer_no_is_no_interruption(answer: str, said: str, covenant_home: Path) -> None:
    command = [sys.executable, "-m", "covenant", "state", "clock"]
    environment = os.environ | {"COVENANT_HOME": str(covenant_home)}
    done = subprocess.run(
        command, input=answer, capture_output=True, text=True, timeout=60, cwd=prose.ROOT, env=environment
    )
    assert done.returncode != 0
    assert said in done.stderr
