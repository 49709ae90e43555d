"""``covenant run`` as it reads its arguments; what it does with them is tests/kernel."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from covenant.cli import common
from covenant.cli.main import cli
from covenant.cli.run import session, supervisor_client
from covenant.cli.run.stderr import ShownStderr
from policy import errors
from sandbox.serve.api import paths
from tests import signing_kit as kit


@pytest.fixture
def package(tmp_path: Path) -> str:
    folder = tmp_path / "pkg"
    for name, data in kit.FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return str(folder)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "1e400", "1e308", "0", "-1", "x"])
def test_timeout_no_length_of_time_is_usage_error(seconds: str, package: str) -> None:
    result = CliRunner().invoke(cli, ["run", package, "hi", "--timeout", seconds])
    ours = isinstance(result.exception, errors.UsageError)
    assert ours or result.exit_code == 2, (result.output, result.exception)


def test_control_length_of_time_is_taken(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1)
    result = CliRunner().invoke(cli, ["run", package, "hi", "--timeout", "0.5"])
    assert isinstance(result.exception, errors.CovenantError)
    assert not isinstance(result.exception, errors.UsageError)


@pytest.mark.parametrize("run", ["6f1f64c0", "6f1f64c0-1f", "6f1f64c0-0000-4000-8000-000000000000"])
def test_run_of_run_is_refused_with_its_verbs(run: str) -> None:
    result = CliRunner().invoke(cli, ["run", run, "hi"])
    assert isinstance(result.exception, errors.UsageError), result.output
    assert "is the id of a run" in result.exception.message
    assert "covenant logs" in result.exception.hint


def test_directory_named_like_run_is_package(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(package).rename(tmp_path / "6f1f64c0")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["run", "6f1f64c0"])
    assert isinstance(result.exception, errors.UsageError)
    assert "there is no intent" in result.exception.message
    assert result.exception.hint.startswith("covenant run PACKAGE TEXT")
    result = CliRunner().invoke(cli, ["dev", "6f1f64c0"])
    assert isinstance(result.exception, errors.UsageError)
    assert result.exception.hint.startswith("covenant dev PACKAGE TEXT")


@pytest.mark.parametrize("verb", [("run",), ("run", "hi"), ("dev",), ("manifest", "check"), ("manifest", "sign")])
def test_missing_package_names_near_one(
    verb: tuple[str, ...], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agents").mkdir()
    Path(package).rename(tmp_path / "agents/hello")
    monkeypatch.chdir(tmp_path)
    words = [*verb[:1], "PATH", "hi"] if verb[-1] == "hi" else [*verb, "PATH"]
    words += ["--key", "ann"] if verb[-1] == "sign" else []
    for path, hint in {
        "agents/helo": "did you mean `agents/hello`?",
        "helo": "did you mean `agents/hello`?",
        "hello": "did you mean `agents/hello`?",
        "other/far": f"there is nothing at {tmp_path}/other/far: give its directory",
    }.items():
        result = CliRunner().invoke(cli, [path if word == "PATH" else word for word in words])
        assert isinstance(result.exception, errors.PackageError), (result.output, result.exception)
        assert (result.exception.message, result.exception.hint) == (f"there is no package `{path}`", hint)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The socket of an installed service, which takes connections, and its state. No variable names another."""
    for name in ("COVENANT_STATE", "COVENANT_HOME", "COVENANT_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    state, place = str(tmp_path / "system"), tmp_path / "s.sock"
    monkeypatch.setattr(paths, "SYSTEM_STATE", state)
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(place))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        yield state
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # no note connects to it: that would start a service of systemd
            listener.accept()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "~/.covenant"),
        ({"COVENANT_HOME": "/h"}, "COVENANT_HOME"),
        ({"COVENANT_HOME": "/h", "COVENANT_STATE": "/s"}, "COVENANT_STATE"),
    ],
)
def test_other_than_installed_service_is_said(
    variables: dict[str, str],
    named: str,
    installed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    supervisor_client.say_whose({"state": "accepted", "supervisor_state": "/by/hand", "trust_root": 3})
    supervisor_client.say_whose({"state": "started", "supervisor_state": "/by/hand"})
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines() == [
        "supervisor of /by/hand, trust root version 3",
        f"note: the installed supervisor of {installed} is not asked: {named} names another state",
    ]


@pytest.mark.parametrize("case", ["the installed one", "by a link", "named socket", "none is installed", "no socket"])
def test_one_supervisor_needs_no_note(
    case: str, installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whose = "/by/hand"
    if case == "the installed one":
        whose = installed
    elif case == "by a link":
        whose = str(tmp_path / "link")
        Path(installed).mkdir()
        Path(whose).symlink_to(installed)
    elif case == "named socket":
        monkeypatch.setenv("COVENANT_SOCKET", "/by/hand/supervisor.sock")
    else:
        missing = tmp_path / "none"
        if case == "no socket":
            missing.touch()
        monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(missing))
    supervisor_client.say_whose({"state": "accepted", "supervisor_state": whose})
    assert capsys.readouterr().err == f"supervisor of {whose}, no trust root\n"


def test_lines_of_fix_keep_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal's lines for agent.toml are copied from the screen. An agent's text ends no line of covenant's."""
    common.report(errors.ToolDeniedError("it may not be called", hint='write:\n[permissions.skills]\nallow = ["\x1b"]'))
    said = capsys.readouterr().err
    assert said.splitlines()[1:] == ["  fix: write:", "    [permissions.skills]", '    allow = ["\\x1b"]']


def test_error_shows_line_of_manifest_without_file() -> None:
    found = errors.NotEnforceableError("no", where="agent.toml:2:1")
    session.name_lines(found, b'[agent]\nid = "x"\n')
    assert found.where == 'in the session\'s manifest: id = "x"'
    for where in ("agent.toml", "agent.toml:9", "tools.json:2"):
        kept = errors.NotEnforceableError("no", where=where)
        session.name_lines(kept, b'[agent]\nid = "x"\n')
        assert kept.where == where


def test_request_that_waits_is_shown_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    held = {
        "state": "asked",
        "request": "3f9c",
        "asks": "network",
        "target": "a\x1b.example\ncovenant: x",
        "seconds": 60,
    }
    ShownStderr().show_asked(held)
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "waits for an operator, at most 60 s: network a\\x1b.example\\ncovenant: x",
        "  to grant it: covenant approvals grant 3f9c --once",
    ]
