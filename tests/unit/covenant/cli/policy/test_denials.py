"""``covenant denials`` from a log of the test's own: which run is meant, and nothing hidden on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covenant.cli.policy import denials as command
from policy import standby
from policy.denials import Denial, Row
from sandbox.audit.log import Ledger
from tests import cli_kit, copied_log_kit

FIRST, SECOND = "11111111-aaaa-4aaa-8aaa-aaaaaaaaaaaa", "11112222-bbbb-4bbb-8bbb-bbbbbbbbbbbb"
NAME = Denial("dns", "www.example.org", "name_not_granted")
ROOT = Path(__file__).resolve().parents[5]
STARTED: dict[str, Any] = {
    "operator": "ann", "parent": None, "intent_id": "i", "policy_digest": None, "payload_digest": None,
    "backend": "linux-gvisor", "signers": [], "not_enforced": [], "deadline_ms": 1, "deadline_clock": "timeout",
    "behalf_display": None, "behalf_pubkey": None,
}  # fmt: skip


class Log:
    """A supervisor's log that is written row by row."""

    def __init__(self, home: Path) -> None:
        base = home / "supervisor"
        base.mkdir(mode=0o700, parents=True)
        self._ledger = Ledger.open(base / "audit", head=base / "audit-head" / "head.json")

    def run(self, run_id: str, agent: str, *rows: Row, package: str = "") -> None:
        self._append("run_started", **STARTED, run_id=run_id, agent_id=agent, package=package)
        self._deny(run_id, agent, rows)

    def instance(self, run_id: str, agent: str, *rows: Row) -> None:
        """Add a standby instance that waits."""
        made = {"state": "Isolated", "reason": standby.MADE_AHEAD}
        self._append("run_state", run_id=run_id, agent_id=agent, operator="standby", **made)
        self._deny(run_id, agent, rows)

    def _deny(self, run_id: str, agent: str, rows: Sequence[Row]) -> None:
        for row in rows:
            one = row.denial
            words = {"layer": one.layer, "target": one.target, "code": one.code, "grant": one.grant}
            own = {"run_id": run_id, "agent_id": agent, "operator": "ann"}
            self._append("denied", **own, **words, denial=one.id, count=row.count)

    def _append(self, kind: str, **fields: Any) -> None:
        self._ledger.append(kind, fields, issuer=copied_log_kit.ISSUER, now_ms=1_700_000_000_000)


@pytest.fixture
def log(covenant_home: Path) -> Log:
    return Log(covenant_home)


def test_run_is_named_by_how_its_id_begins(log: Log) -> None:
    log.run(FIRST, "one", Row(NAME, 1), Row(NAME, 41))
    log.run(SECOND, "two")
    document = cli_kit.document("denials", FIRST[:8])
    assert (document["kind"], document["run_id"], document["agent_id"]) == ("denials", FIRST, "one")
    (one,) = document["denials"]
    assert (one["denial"], one["target"], one["count"]) == (NAME.id, NAME.target, 42)
    assert one["grant"] == "permissions.network"
    assert cli_kit.document("denials", SECOND)["denials"] == []
    nothing = cli_kit.done("denials", SECOND)
    assert "nothing was refused" in nothing
    assert "not told: files that the agent does not find, unless `tell_files = true`" in nothing
    assert "not told" not in cli_kit.done("denials", FIRST)
    for text in ("1111", "2222", ""):
        assert "id that begins so" in str(cli_kit.refused("usage", "denials", text))


def test_without_its_package_run_is_shown_with_what_would_grant_it(log: Log, tmp_path: Path) -> None:
    log.run(FIRST, "one", Row(NAME, 2), package=str(tmp_path / "gone"))
    shown = cli_kit.call("denials", FIRST)
    assert f"{NAME.id}: dns www.example.org: name_not_granted (2 times)" in shown.stdout
    assert "granted by: permissions.network" in shown.stdout
    assert "--package PACKAGE" in shown.stderr


def test_session_is_told_options_and_no_package(log: Log) -> None:
    log.run(FIRST, "exec-curl", Row(NAME, 1), package="covenant exec curl")
    shown = cli_kit.call("denials", FIRST)
    assert "an option of covenant exec: --net HOST" in shown.stderr
    assert "--package" not in shown.stderr


def test_target_is_agents_word_and_cannot_steer_terminal(log: Log) -> None:
    hostile = Denial("dns", "a\x1b[2J\u202e.example", "name_not_granted")
    log.run(FIRST, "one", Row(hostile, 1))
    shown = cli_kit.done("denials", FIRST)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "\\x1b[2J\\u202e" in shown


def test_what_run_says_is_short_and_leaves_libcs_attempts_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(Denial("packet", f"192.0.2.1:{port}/tcp", "not_granted"), port) for port in range(1, 9)]
    command.remark([Row(Denial("syscall", "socket", "arguments"), 1)], "r")
    assert capsys.readouterr().err == ""
    command.remark([*rows, Row(Denial("syscall", "socket", "arguments"), 1)], "run-1")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"denied {rows[0].denial.id}: packet 192.0.2.1:1/tcp: not_granted"
    assert said[1].endswith("(2 times)")
    assert said[5:] == ["denied: 3 more", "  explained by: covenant denials run-1"]


def test_standby_instance_that_waits_is_named(log: Log) -> None:
    """It has no start in the log before its intent; its denials are those of its own start."""
    log.run(FIRST, "one", Row(NAME, 1))
    log.instance(SECOND, "two", Row(NAME, 3))
    said = cli_kit.document("denials", SECOND[:5])
    assert (said["run_id"], said["agent_id"], said["used"]) == (SECOND, "two", False)
    assert [one["count"] for one in said["denials"]] == [3]
    assert f"standby instance, which has not been used, {SECOND} of two: 1 denial\n" in cli_kit.done("denials", SECOND)
    log.run(SECOND, "two", Row(NAME, 1))
    used = cli_kit.document("denials", SECOND)
    assert (used["used"], [one["count"] for one in used["denials"]]) == (True, [4])


def test_latest_run_of_package_is_the_one_started_last(log: Log) -> None:
    """An instance counts from its use, however early it was made; one that waits is no run yet."""
    hello, waiting = ROOT / "agents" / "hello", SECOND.replace("2", "3")
    log.instance(SECOND, "hello", Row(NAME, 2))
    log.run(FIRST, "hello", Row(NAME, 1))
    log.instance(waiting, "hello", Row(NAME, 7))
    assert cli_kit.document("denials", hello, "--host", "none")["run_id"] == FIRST
    log.run(SECOND, "hello", Row(NAME, 3))
    log.run("33333333-cccc-4ccc-8ccc-cccccccccccc", "other", Row(NAME, 1))
    last = cli_kit.document("denials", hello, "--host", "none")
    assert (last["run_id"], [one["count"] for one in last["denials"]]) == (SECOND, [5])


def test_no_log_and_no_run_of_agent(covenant_home: Path) -> None:
    cli_kit.refused("ledger", "denials", "1234")


def test_copies_of_the_daemon_are_read(log: Log, covenant_home: Path) -> None:
    """For an operator who is not root: the supervisor's log is root's, the daemon's has the rows of its intents."""
    log.run(FIRST, "one", Row(NAME, 2))
    log.run(SECOND, "two")
    copied_log_kit.leave_copies(covenant_home, run_id=FIRST, row_type="denied")
    (one,) = cli_kit.document("denials", FIRST[:8])["denials"]
    assert (one["denial"], one["count"]) == (NAME.id, 2)
    assert "nothing was refused" in cli_kit.done("denials", SECOND)
