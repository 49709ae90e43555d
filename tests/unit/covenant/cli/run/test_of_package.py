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
    """Let these runs live; those whose id begins with `s` are instances of standby that wait."""
    listed = [
        {
            "run_id": run_id,
            "agent_id": agent_id,
            "started_ms": at,
            "state": "Isolated" if run_id.startswith("s") else "Running",
            "issuer": "standby@local" if run_id.startswith("s") else "operator@local",
        }
        for run_id, agent_id, at in rows
    ]
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


def test_waiting_instance_is_no_run_of_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is newer than the run that it replaces: logs were those of a process that had said nothing."""
    _live(monkeypatch, ("a1", "hello", 1), ("s2", "hello", 2))
    for ended in (False, True):
        assert manage.of_package(str(package), ended=ended) == "a1"
    _live(monkeypatch, ("s2", "hello", 2))
    with pytest.raises(errors.NoRunError, match="no run of `hello` lives"):
        manage.of_package(str(package))
    monkeypatch.setattr(manage, "newest_ended", lambda agent_id: f"newest of {agent_id}")
    assert manage.of_package(str(package), ended=True) == "newest of hello"


def test_logs_of_run_that_writes_faster_than_it_is_read_end() -> None:
    """Its output before the first question is shown, in several pieces."""
    said = 100

    def asked(kind: str, *, run: str, offset: int, stream: str) -> dict[str, object]:
        nonlocal said
        said += 10
        upto = min(offset + 40, said)
        place = {"begins": offset, "next": upto, "ends": said}
        return {"run_id": run, "live": True, **place, "text": "x" * (upto - offset)}

    pieces = manage.pieces("a" * 36, "stderr", follow=False, ask=asked)
    assert [piece["asked"] for piece in pieces] == [0, 40, 80]


def test_logs_of_keeper_of_older_release_end_where_nothing_is_left() -> None:
    """A run that went on through an upgrade has a keeper that does not say where its text ends."""

    def asked(kind: str, *, run: str, offset: int, stream: str) -> dict[str, object]:
        upto = min(offset + 40, 100)
        return {"run_id": run, "live": True, "begins": offset, "next": upto, "text": "x" * (upto - offset)}

    pieces = manage.pieces("a" * 36, "stderr", follow=False, ask=asked)
    assert [piece["asked"] for piece in pieces] == [0, 40, 80, 100]


def test_logs_of_terminal_have_plain_line_ends() -> None:
    """An agent chose the text: a terminal full of `\\r` must not take hours to print."""
    returns = "\r" * (1 << 20)
    assert manage.line_ends(f"a\r\r\n{returns}") == (f"a\n{returns[1:]}", "\r")
    assert manage.line_ends("\r\nb\r") == ("\nb", "\r")
    assert manage.line_ends("\r\n") == ("\n", "")
