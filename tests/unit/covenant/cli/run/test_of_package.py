"""``logs``, ``wait`` and ``attest`` take a package's directory for its newest live run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant.cli.run import manage
from policy import errors
from tests import signing_kit
from tests.cli_kit import document, refused


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "agent.toml").write_bytes(signing_kit.MANIFEST)
    return tmp_path / "pkg"


def _live(monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, str, int]) -> None:
    listed = [{"run_id": run_id, "agent_id": agent_id, "started_ms": at} for run_id, agent_id, at in rows]
    monkeypatch.setattr(manage, "listed", lambda: listed)


def test_package_is_its_newest_live_run(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _live(monkeypatch, ("a1", "hello", 1), ("a2", "hello", 2), ("b3", "other", 3))
    assert manage.of_package(str(package)) == "a2"


def test_id_of_a_run_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert manage.of_package("6f1f64c0") == "6f1f64c0"


def test_package_without_live_run_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _live(monkeypatch, ("b3", "other", 3))
    with pytest.raises(errors.NoRunError, match="no run of `hello` lives"):
        manage.of_package(str(package))


def test_logs_of_package_are_of_its_newest_ended_run(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _live(monkeypatch, ("b3", "other", 3))
    monkeypatch.setattr(manage, "newest_ended", lambda agent_id: f"newest of {agent_id}")
    assert manage.of_package(str(package), ended=True) == "newest of hello"
    _live(monkeypatch, ("a1", "hello", 1))
    assert manage.of_package(str(package), ended=True) == "a1"


def test_verbs_ask_about_run_of_package(package: Path, covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _live(monkeypatch, ("a1", "hello", 1), ("a2", "hello", 2))
    asked = []

    def answer(kind: str, **fields: Any) -> dict[str, Any]:
        asked.append((kind, fields["run"]))
        return {"record": {"run_id": fields["run"], "agent_id": "hello", "status": "ok"}}

    def whole(run: str, stream: str) -> dict[str, Any]:
        asked.append(("logs", run))
        return {"run_id": run}

    monkeypatch.setattr(manage, "_asked", answer)
    monkeypatch.setattr(manage, "_whole", whole)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("sandbox.attest.live_runs.live", lambda runs: ["a1", "a2"])
    monkeypatch.setattr("sandbox.attest.live_runs.answer", lambda state, run, started: asked.append(("attest", run)))
    monkeypatch.setattr("covenant.cli.audit.commands.started_policies", dict)
    assert document("wait", package)["run_id"] == "a2"
    assert document("logs", package)["run_id"] == "a2"
    # The run ended meanwhile: it was asked about all the same.
    refused("no_such_run", "attest", package)
    assert asked == [("wait", "a2"), ("logs", "a2"), ("attest", "a2")]
