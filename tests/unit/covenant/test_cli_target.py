"""``covenant policy compile --target``: what is written, refused, and in the log before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from covenant.cli.main import cli
from covenant.cli.policy import commands
from policy import errors
from tests.unit.policy.compile import targets_kit as kit

HELLO = Path(__file__).parents[3] / "agents/hello"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    monkeypatch.setenv("COVENANT_HOME", str(path))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    return path


def call(target: str, out: Path, *arguments: str, package: Path = HELLO) -> Result:
    image = ["--image", kit.IMAGE] if target == "kubernetes" else []
    return CliRunner().invoke(
        cli, ["policy", "compile", str(package), "--target", target, "--out", str(out), *image, *arguments]
    )


def accepted(target: str, out: Path, package: Path = HELLO) -> list[str]:
    """The options that the refusal names."""
    error = call(target, out, package=package).exception
    assert isinstance(error, errors.LossError)
    return error.hint.split()


def rows(home: Path) -> list[dict[str, Any]]:
    """The audit log's rows of accepted losses."""
    log = home / "supervisor/audit/events.jsonl"
    kinds = [json.loads(line)["kind"] for line in log.read_text().splitlines()] if log.exists() else []
    return [kind for kind in kinds if kind["type"] == "loss_accepted"]


@pytest.mark.parametrize("target", ["kubernetes", "systemd"])
def test_lost_restriction_is_refused_and_nothing_is_written(target: str, tmp_path: Path, home: Path) -> None:
    result = call(target, tmp_path / "out")
    assert isinstance(result.exception, errors.LossError)
    assert not (tmp_path / "out").exists()
    assert rows(home) == []


@pytest.mark.parametrize("target", ["kubernetes", "systemd"])
def test_accepted_losses_are_in_log_and_in_output(target: str, tmp_path: Path, home: Path) -> None:
    options = accepted(target, tmp_path / "out")
    result = call(target, tmp_path / "out", *options, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    document = json.loads(result.stdout)
    ids = sorted(options[1::2])
    assert (document["kind"], document["target"], document["accepted"]) == ("policy_compiled", target, ids)
    assert {p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()} == document["files"]
    assert json.loads((tmp_path / "out/loss.json").read_text())["accepted"] == ids
    (row,) = rows(home)
    assert (row["agent_id"], row["target"], row["losses"]) == ("hello", target, ids)
    assert row["operator"] == "operator@local"


def test_log_that_cannot_be_written_leaves_no_file(tmp_path: Path, home: Path) -> None:
    options = accepted("kubernetes", tmp_path / "out")
    (home / "supervisor").mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "supervisor/audit").write_text("in the way")
    assert isinstance(call("kubernetes", tmp_path / "out", *options).exception, errors.CovenantError)
    assert not (tmp_path / "out").exists()


def test_row_is_there_when_files_are_written(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = accepted("kubernetes", tmp_path / "out")
    seen: list[int] = []
    monkeypatch.setattr(commands, "write_out", lambda out, files: seen.append(len(rows(home))))
    assert call("kubernetes", tmp_path / "out", *options).exit_code == 0
    assert seen == [1]


@pytest.mark.parametrize(
    ("target", "arguments", "said"),
    [
        ("kubernetes", ["--accept-loss", "kubernetes.net-bps"], "no restriction"),
        ("linux-gvisor", ["--accept-loss", "kubernetes.image"], "no restriction"),
        ("linux-gvisor", ["--image", kit.IMAGE], "--image"),
        ("systemd", ["--image", kit.IMAGE], "--image"),
    ],
)
def test_what_does_not_belong_there_is_refused(target: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    error = call(target, tmp_path / "out", *arguments).exception
    assert isinstance(error, errors.UsageError)
    assert said in str(error)
    assert not (tmp_path / "out").exists()


def test_kubernetes_wants_image_pinned(tmp_path: Path) -> None:
    for image in ([], ["--image", "agent:latest"]):
        result = CliRunner().invoke(
            cli, ["policy", "compile", str(HELLO), "--target", "kubernetes", "--out", str(tmp_path / "out"), *image]
        )
        assert isinstance(result.exception, errors.UsageError)
        assert "image" in str(result.exception)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (('role = "observer"', 'role = "nobody"'), errors.RoleViolation),
        (("memory_mb = 512", "memory_mb = 512000"), errors.RoleViolation),
        (("allow = []                               # calls", 'allow = ["ptrace"] # calls'), errors.DenyListViolation),
        (("read = []  ", 'read = ["/proc"]  '), errors.NeverGrantableError),
        (('entry = "main.py"', 'entry = "other.py"'), errors.SchemaViolation),
    ],
)
def test_rules_that_need_no_signature_are_asked(
    change: tuple[str, str], kind: type[errors.CovenantError], tmp_path: Path
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    text = (HELLO / "agent.toml").read_text()
    assert change[0] in text
    (package / "agent.toml").write_text(text.replace(*change))
    (package / "main.py").write_bytes((HELLO / "main.py").read_bytes())
    error = call("kubernetes", tmp_path / "out", package=package).exception
    assert isinstance(error, kind), error
