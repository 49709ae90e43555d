"""Every verb that may take long says on the terminal that it goes on; nothing of it stands in pipes and documents."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from covenant.cli import common, long, main
from sandbox import attest_runs, progress
from tests.cli_kit import call

CLI = Path(common.__file__).parent


def verbs() -> Iterator[tuple[str, ...]]:
    """The words of each verb, all of the tree."""
    waiting: list[tuple[tuple[str, ...], click.Command]] = [((), main.cli)]
    while waiting:
        words, command = waiting.pop()
        if not isinstance(command, click.Group):
            yield words
            continue
        context = click.Context(command, info_name="covenant")
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            waiting.append(((*words, name), found))


def test_every_verb_has_its_words_or_the_reason_why_it_has_none() -> None:
    listed = list(verbs())
    assert ("vault", "rotate") in listed
    assert ("memory", "repair", "delete") in listed
    for verb in listed:
        assert (long.words(verb) is None) is (verb[0] in long.SILENT), verb
    # and nothing else is listed
    said = {" ".join(verb[:1]) for verb in listed} | {" ".join(verb[:2]) for verb in listed}
    assert set(long.WORDS) | set(long.SILENT) <= said
    assert not set(long.WORDS) & set(long.SILENT)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["vault", "list"], "opening the vault"),
        (["vault", "grant-log", "librarian"], "reading the log"),
        (["run", "agents/hello", "good morning"], "the agent is at work"),
        (["run", "agents/hello", "good morning", "--json"], None),
        (["ps", "--watch"], None),
        (["logs", "6f1f64c0", "--follow"], None),
        (["trust", "--help"], None),
        (["-h"], None),
        (["top"], None),
        (["no-such-verb"], None),
        ([], None),
    ],
)
def test_what_is_said_of_a_command(arguments: list[str], wanted: str | None) -> None:
    assert long.words(arguments) == wanted


@pytest.mark.parametrize(
    ("arguments", "wanted"), [(["doctor"], [(2, "checking this host")]), (["doctor", "--json"], [])]
)
def test_it_is_said_around_the_whole_command(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], wanted: list[tuple[int, str]]
) -> None:
    said, within = list[tuple[int, str]](), list[int]()

    @contextlib.contextmanager
    def shown(fd: int, what: str) -> Iterator[None]:
        said.append((fd, what))
        yield
        within.append(0)

    def work(**_: object) -> int:
        assert said == wanted
        assert not within
        return 3

    monkeypatch.setattr(progress, "shown", shown)
    monkeypatch.setattr(sys, "argv", ["covenant", *arguments])
    monkeypatch.setattr(main.cli, "main", work)
    monkeypatch.setattr(main, "_one_command", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main.entry()
    assert ended.value.code == 3


def test_nothing_writes_past_what_makes_way() -> None:
    """What a verb prints or asks goes through ``common``; else it would stand behind a line that is taken back."""
    past = {"echo", "secho", "prompt", "confirm", "getpass", "echo_via_pager", "print", "input"}
    found = []
    for path in sorted(CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                stream = isinstance(called, ast.Attribute) and ast.unparse(called.value).startswith("sys.std")
                if name in past or (stream and name in {"write", "writelines", "read", "readline"}):
                    found.append(f"{path.name}: {ast.unparse(node.func)}")
    # `python -m covenant.cli.help` writes docs/errors.md: it is no verb.
    assert sorted(set(found)) == [
        "common.py: click.confirm",
        "common.py: click.echo",
        "common.py: click.prompt",
        *READS,
    ]


READS = ["common.py: sys.stdin.buffer.read", "common.py: sys.stdin.buffer.readline", "help.py: print"]


@pytest.mark.parametrize(
    "act",
    [
        lambda: common.say("a line"),
        lambda: common.say("a line", err=True),
        lambda: common.emit({}),
        lambda: common.write(b"bytes"),
        lambda: common.prompted("Secret"),
        lambda: common.confirmed("Sign it?"),
        lambda: common.typed(3),
        lambda: common.read_passphrase("-"),
    ],
    ids=["say", "say-err", "emit", "write", "prompted", "confirmed", "typed", "read_passphrase"],
)
def test_what_is_printed_or_asked_is_hushed(monkeypatch: pytest.MonkeyPatch, act: object) -> None:
    """Each door of ``common`` by itself."""
    inside = list[bool]()
    acts = list[bool]()

    @contextlib.contextmanager
    def hushed() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def acted(*_: object, **__: object) -> bytes:
        acts.append(bool(inside))
        return b"xyz"

    class Stdin:
        buffer = type("Buffer", (), {"read": acted, "readline": acted})()

    monkeypatch.setattr(progress, "hushed", hushed)
    for name in ("echo", "prompt", "confirm"):
        monkeypatch.setattr(click, name, acted)
    monkeypatch.setattr(sys, "stdin", Stdin())
    assert callable(act)
    act()
    assert acts == [True]


def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said = list[str]()

    @contextlib.contextmanager
    def step(what: str) -> Iterator[object]:
        said.append(what)
        yield said.append

    monkeypatch.setattr(progress, "step", step)
    return said


def test_attesting_says_how_far_it_is(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covenant.cli import audit

    said = steps(monkeypatch)
    monkeypatch.setattr(attest_runs, "live", lambda runs: ["one", "two"])
    monkeypatch.setattr(attest_runs, "answer", lambda state, run, started: None)
    monkeypatch.setattr(audit, "started_policies", dict)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    call("attest", "--all")
    assert said[1:] == ["reading the kernel back: run 1 of 2", "reading the kernel back: run 2 of 2"]


def test_checking_a_log_says_which(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covenant.cli import audit, audit_proofs

    said = steps(monkeypatch)
    logs = [audit.Log(name, Path(name), b"x" * 2048, b"", None, None, ()) for name in ("supervisor", "daemon")]
    monkeypatch.setattr(audit, "read_logs", lambda: logs)
    monkeypatch.setattr(
        audit_proofs, "report", lambda log: (_ for _ in ()).throw(KeyError) if log.name == "daemon" else log
    )
    call("audit", "verify")
    assert said == ["reading the log", "checking the supervisor log, 2 KiB", "checking the daemon log, 2 KiB"]
