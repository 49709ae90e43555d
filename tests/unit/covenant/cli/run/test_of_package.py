"""``logs``, ``wait`` and ``attest`` take a package's directory for its newest live run."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.cli.run import manage
from policy import errors
from tests import signing_kit


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
