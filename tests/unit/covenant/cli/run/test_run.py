"""``covenant run`` as it reads its arguments; what it does with them is tests/kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from covenant.cli.main import cli
from policy import errors
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
