"""Check that a command prints exactly one document on stdout, with its exit status, for every outcome."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import click
import pytest

from covenant.cli import main
from policy import errors


def _entry(monkeypatch: pytest.MonkeyPatch, failure: BaseException, *arguments: str) -> int:
    def fail(**_: object) -> None:
        raise failure

    monkeypatch.setattr(sys, "argv", ["covenant", *arguments])
    monkeypatch.setattr(main.cli, "main", fail)
    monkeypatch.setattr(main, "_one_command", lambda: None)
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


def test_a_mistake_of_ours_keeps_its_trace_off_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _entry(monkeypatch, RuntimeError("a mistake"), "run", "x") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "RuntimeError: a mistake" in err


def test_a_slip_in_the_first_word_is_answered_with_what_may_have_been_meant() -> None:
    for typed, meant in (("memry", "memory"), ("intnet", "intent"), ("capabilites", "capabilities")):
        with pytest.raises(click.UsageError, match=f"Did you mean '{meant}'"):
            main.cli.main([typed], standalone_mode=False)
    with pytest.raises(click.UsageError, match=r"^No such command 'qqqqq'\.$"):
        main.cli.main(["qqqqq"], standalone_mode=False)


def test_the_version_is_asked_for_as_of_any_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.cli.main(["--version"], standalone_mode=False) == 0
    assert capsys.readouterr().out == f"covenant {importlib.metadata.version('covenant-supervisor')}\n"
