"""``covenant state clock``: what it takes back, the row that it writes, and the line of ``doctor`` that leads to it."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from policy import errors
from sandbox import doctor_time
from sandbox.config import Config
from sandbox.storage.trust_state import State
from tests import cli_daemon_kit
from tests.cli_kit import call, document, done, refused

DAY = 86_400_000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_HOME", str(made))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    return made


def _ahead(home: Path) -> int:
    """Record a time of a clock that is 60 days ahead, as a run would have."""
    late = int(time.time() * 1000) + 60 * DAY
    path = home / "supervisor" / "clock.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"greatest_time_ms": late}))
    return late


def test_state_clock_takes_records_back(home: Path) -> None:
    late = _ahead(home)
    status, found, mend = doctor_time.clock(Config(state=home / "supervisor"))
    assert (status, "covenant state clock" in mend) == ("degraded", True), found
    made = document("state", "clock")
    assert made["state"] == {"from_ms": late, "agents": []}
    assert made["daemon"] is None
    with State(home / "supervisor") as state:
        assert state.greatest_time_ms() == made["now_ms"]
    assert doctor_time.clock(Config(state=home / "supervisor"))[0] == "ok"
    rows = [json.loads(line) for line in (home / "supervisor/audit/events.jsonl").read_text().splitlines()]
    assert rows[-1]["kind"] == {
        "type": "clock_set",
        "operator": None,
        "from_ms": late,
        "to_ms": made["now_ms"],
        "agents": [],
    }
    assert "no record is ahead" in done("state", "clock", "--yes")


def test_state_clock_without_a_yes_changes_nothing(home: Path) -> None:
    late = _ahead(home)
    assert call("state", "clock", stdin="n\n").exit_code == 1
    with State(home / "supervisor") as state:
        assert state.greatest_time_ms() == late


def test_state_clock_asks_a_daemon_that_runs(home: Path) -> None:
    late = int(time.time() * 1000) + 60 * DAY
    (home / "clock.json").write_text(json.dumps({"greatest_time_ms": late}))
    (home / "clock.json").chmod(0o600)
    with cli_daemon_kit.running(home):
        made = document("state", "clock")
        assert made["daemon"]["changed"] is True
        assert made["daemon"]["from_ms"] >= late
        assert document("state", "clock")["daemon"]["changed"] is False
    assert json.loads((home / "clock.json").read_text())["greatest_time_ms"] < late


def test_expiry_is_named_two_weeks_ahead(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_time.expiries(Config(state=home / "supervisor"))[0] == "ok"
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_HOME", str(other))
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann", "--expires", "10d")
    status, found, mend = doctor_time.expiries(Config(state=other / "supervisor"))
    assert (status, found) == ("degraded", "trust root expires in 9 days")
    assert "covenant trust renew" in mend
    done("trust", "renew", "--sign-with", "ann")
    assert doctor_time.expiries(Config(state=other / "supervisor"))[0] == "ok"


def test_state_modes_opens_a_home_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "v1"
    for name in ("identity/local.key", "receipts/working.jsonl", "budget/ledger.jsonl", "agents/one/main.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"" if name.endswith("jsonl") else bytes(32))
        (home / name).chmod(0o644)
    for path in [home, *(one for one in home.rglob("*") if one.is_dir())]:
        path.chmod(0o755)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    said = call("state", "modes")
    assert said.exit_code == 3
    assert "working.jsonl" in said.output
    assert "main.py" not in said.output
    assert (home / "receipts").stat().st_mode & 0o777 == 0o755
    made = document("state", "modes", "--apply")
    assert len(made["open"]) == 7
    assert document("state", "modes")["open"] == []
    # A daemon opens it now.
    with cli_daemon_kit.running(home):
        done("ping")


# What a home has after its first start, each opened by another part of the daemon, as version 1 left it.
_OPEN_TO_OTHERS = (
    "",
    "clock.json",
    "identity/local.key",
    "audit/events.jsonl",
    "audit/checkpoints.jsonl",
    "audit-head/head.json",
    "peers/operator.token",
    "peers/registry.jsonl",
    "capabilities/granted.jsonl",
    "receipts/working.jsonl",
    "budget",
)


def test_refused_modes_name_one_command_that_mends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    with cli_daemon_kit.running(home):
        done("ping")
    places = [home / name for name in _OPEN_TO_OTHERS]
    modes = {place: place.stat().st_mode & 0o777 for place in places}

    def open_to_others() -> None:
        for place in places:
            place.chmod(modes[place] | (0o055 if place.is_dir() else 0o044))

    command = "covenant state modes --apply"
    open_to_others()
    for _ in places:
        # Each refusal names the file by a path that any shell takes, and the command for all of them.
        with (
            pytest.RaisesGroup(errors.CovenantError, allow_unwrapped=True, flatten_subgroups=True) as raised,
            cli_daemon_kit.running(home),
        ):
            pass
        hint = _leaf(raised.value).hint
        one, _, whole = hint.partition(", or for a whole home: ")
        assert whole == command, hint
        assert one.startswith("chmod 0"), hint
        subprocess.run(one.split(), check=True)
    with cli_daemon_kit.running(home):
        done("ping")
    assert {place: place.stat().st_mode & 0o777 for place in places} == modes

    open_to_others()
    done(*command.split()[1:])
    assert {place: place.stat().st_mode & 0o777 for place in places} == modes
    with cli_daemon_kit.running(home):
        done("ping")


def _leaf(error: BaseException) -> errors.CovenantError:
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, errors.CovenantError), error
    return error


def test_state_modes_changes_no_file_that_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir(mode=0o700)
    other.write_text("mine")
    other.chmod(0o644)
    (home / "link").symlink_to(other)
    (home / "hard").hardlink_to(other)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    refused("home_unsafe", "state", "modes", "--apply")
    assert other.stat().st_mode & 0o777 == 0o644
    (home / "hard").unlink()
    assert document("state", "modes", "--apply")["open"] == []
    assert other.stat().st_mode & 0o777 == 0o644
