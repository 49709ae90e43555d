"""The command line about approvals: a program that decides, and which list an answer goes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from covenant.cli import main
from covenant.cli.daemon import client
from covenant.cli.run import approvals
from covenant.keys import keystore
from policy import errors
from policy.signing import envelope, lease, strict_json

HERMES = {"id": "approval-1", "run_id": "r", "agent_id": "h", "command": "ls", "description": "", "choices": ["once"]}


class Runs:
    """Runs that wait, and a daemon, which keep what they are asked. The command is interrupted after some looks."""

    def __init__(self, *targets: str, hermes: bool = False) -> None:
        self.requests: list[dict[str, Any]] = [
            {
                "id": f"{n}" * 16, "agent_id": "hello", "run_id": "0b5c3a52", "policy_digest": "1" * 64,
                "kind": "network", "target": target, "asked_ms": 0, "ends_ms": 60_000,
            }
            for n, target in enumerate(targets, 1)
        ]  # fmt: skip
        self.hermes = [HERMES] if hermes else []
        self.answers: list[tuple[str, str]] = []
        self.looks = 0

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        if verb == "list":
            self.looks += 1
            if self.looks > 2:
                raise KeyboardInterrupt
            return {"requests": self.requests, "leases": [], "now_ms": 0}
        target = next(one["target"] for one in self.requests if one["id"] == fields["request"])
        self.answers.append((verb, target))
        if verb == "deny":
            return {"denied": {"target": target}}
        signed = envelope.decode(fields["lease"].encode())
        statement = strict_json.validate(lease.LeaseStatement, strict_json.loads(signed.payload, max_bytes=9999))
        return {"lease": {"target": statement.target, "ends_ms": statement.expires_at}}

    def daemon(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        if kind == "list_approvals":
            return {"approvals": self.hermes}
        self.answers.append((fields["approval_id"], fields["choice"]))
        return {"resolved": 1, **fields}


def call(runs: Runs, monkeypatch: pytest.MonkeyPatch, home: Path, *words: str) -> Result:
    monkeypatch.setenv("COVENANT_HOME", str(home))
    if not (home / "keys").exists():
        keystore.new(home, "ann", None)
    monkeypatch.setattr(approvals, "ask", runs.ask)
    monkeypatch.setattr(client, "ask", runs.daemon)
    return CliRunner().invoke(main.cli, ["approvals", *words], standalone_mode=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    return made


def test_program_decides(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = home / "decide.py"
    program.write_text(
        "import json, sys\n"
        "sys.exit({'yes.example.com': 0, 'no.example.com': 3}.get(json.load(sys.stdin)['target'], 1))\n"
    )
    runs = Runs("yes.example.com", "no.example.com", "who.example.com")
    done = call(runs, monkeypatch, home, "watch", "--once", "--", "python3", str(program))
    # Each is decided once, though it was seen twice.
    assert runs.answers == [("grant", "yes.example.com"), ("deny", "no.example.com")]
    assert "left who.example.com" in done.output


def test_program_that_is_none_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call(Runs("a.example.com"), monkeypatch, home, "watch", "--run", "--", str(home / "none"))
    assert isinstance(done.exception, errors.UsageError)


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (("grant", "appr", "--once"), [("approval-1", "once")]),
        (("grant", "appr", "--run"), [("approval-1", "session")]),
        (("grant", "appr", "--choice", "always"), [("approval-1", "always")]),
        (("deny", "appr"), [("approval-1", "deny")]),
        (("grant", "11", "--run"), [("grant", "a.example.com")]),
        (("deny", "11"), [("deny", "a.example.com")]),
    ],
)
def test_answer_goes_to_its_run(
    words: tuple[str, ...], answers: list[tuple[str, str]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs("a.example.com", hermes=True)
    done = call(runs, monkeypatch, home, *words, "--json")
    assert done.exception is None, done.exception
    assert json.loads(done.output)["kind"].startswith("approval_")
    assert runs.answers == answers


@pytest.mark.parametrize(
    "words",
    [
        ("grant", "11"),
        ("grant", "11", "--once", "--run"),
        ("grant", "11", "--choice", "once"),
        ("grant", "11", "--once", "--choice", "once"),
        ("grant", "appr", "--until", "5m"),
        ("grant", "zz", "--once"),
    ],
)
def test_wrong_words_answer_nothing(words: tuple[str, ...], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs("a.example.com", hermes=True)
    done = call(runs, monkeypatch, home, *words)
    assert isinstance(done.exception, errors.UsageError | errors.NoApprovalError)
    assert runs.answers == []


def test_target_of_any_language_is_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing steers the terminal, and a long target is cut behind a whole character, with an ellipsis."""
    done = call(Runs("会議\u202e\x1b[2J\0", "x" * 58 + "e\u0301" * 9), monkeypatch, home, "list")
    assert done.exception is None, done.exception
    assert "会議\\u202e\\x1b[2J\\x00" in done.output
    assert "x" * 58 + "…" in done.output
    assert not set("\u202e\x1b\0") & set(done.output)


def test_empty_list_says_that_no_operator_is_asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    config = home / "supervisor" / "config.toml"
    config.parent.mkdir(mode=0o700)
    config.write_text("")
    off = f"nothing waits: this host asks no operator; write ask_operators = true in {config}\n"
    assert call(Runs(), monkeypatch, home, "list").output == off
    config.write_text("ask_operators = true\n")
    assert call(Runs(), monkeypatch, home, "list").output == "nothing waits\n"


def test_key_that_is_not_named_is_one_of_these(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(Runs(), monkeypatch, home, "list")
    keystore.new(home, "bob", None)
    done = call(Runs("a.example.com"), monkeypatch, home, "grant", "11", "--once")
    assert isinstance(done.exception, errors.UsageError)
    assert done.exception.hint == "give --key NAME (there is ann, bob) or --ssh-agent KEY"
    runs = Runs("a.example.com")
    assert call(runs, monkeypatch, home, "grant", "11", "--once", "--key", "bob").exception is None
    assert runs.answers == [("grant", "a.example.com")]
