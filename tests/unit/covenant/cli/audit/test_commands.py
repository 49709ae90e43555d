"""Check ``covenant audit``: the logs that it reads, exit status 3 for an invalid log, and escaped output."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from covenant.cli.main import cli
from policy import errors
from policy.audit_log import events, write_ahead
from sandbox.audit import log_files
from sandbox.audit.log import Ledger, Record

ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}

STARTED: dict[str, Any] = {
    "package": "/srv/p", "policy_digest": None, "payload_digest": None, "backend": "linux-gvisor", "signers": [],
    "not_enforced": [], "deadline_ms": 1, "deadline_clock": "ttl", "parent": None, "behalf_display": None,
    "behalf_pubkey": None,
}  # fmt: skip


def fill(base: Path, count: int, reason: str = "x", at: int = 0) -> None:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Ledger.open(base / "audit", head=base / "audit-head" / "head.json") as log:
        for i in range(count):
            fields = {"run_id": f"r{at + i}", "agent_id": "a", "operator": "ann", "state": "s", "reason": reason}
            log.append("run_state", fields, issuer=ISSUER, now_ms=1_700_000_000_000 + at + i)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["audit", *arguments], standalone_mode=True)


def document(*arguments: str) -> dict[str, Any]:
    extended = ["--extended"] if arguments[0] == "recent" else []
    value = json.loads(call(*arguments, *extended, "--json").stdout)
    assert isinstance(value, dict)
    return value


def edit(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))


def test_verify_is_green_and_names_log(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 3)
    result = call("verify")
    assert result.exit_code == 0
    assert f"supervisor log {covenant_home}/supervisor/audit: holds (3 events, 3 chain entries" in result.stdout
    answer = document("verify")
    assert (answer["kind"], answer["report"]["valid"]) == ("audit_integrity", True)
    assert {"events", "anchors", "valid", "root_hash_hex", "failures"} <= set(answer["report"])
    assert [log["origin"] for log in answer["report"]["logs"]] == ["supervisor"]


def test_terminal_stops_nobody_who_keeps_writers_waiting(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under sudo an ordinary user could suspend the command: while it holds the log's lock, no run can start."""
    fill(covenant_home / "supervisor", 3)
    seen: list[bool] = []
    let_go = fcntl.flock

    def flock(fd: int, how: int) -> None:
        if how == fcntl.LOCK_UN:
            seen.append(signal.SIGTSTP in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        let_go(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert call("verify").exit_code == 0
    assert seen == [True]
    assert signal.SIGTSTP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_one_edited_byte_is_red_with_status_3_and_names_record(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 3)
    edit(covenant_home / "supervisor" / "audit" / "events.jsonl", b'"run_id":"r1"', b'"run_id":"r9"')
    result = call("verify")
    assert result.exit_code == 3
    assert "DOES NOT HOLD" in result.stdout
    assert "entry_mismatch: record 1 changed in the events file" in result.stdout
    assert call("verify", "--json").exit_code == 3
    answer = document("verify")
    assert not answer["report"]["valid"]
    assert [(f["kind"], f["index"]) for f in answer["report"]["logs"][0]["report"]["failures"]] == [
        ("entry_mismatch", 1)
    ]


def test_both_logs_are_read_and_failed_one_is_report(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 2)
    fill(covenant_home, 3, at=10)
    assert call("verify").exit_code == 0
    edit(covenant_home / "audit" / "events.jsonl", b'"run_id":"r11"', b'"run_id":"r91"')
    answer = document("verify")
    assert [(log["origin"], log["report"]["valid"]) for log in answer["report"]["logs"]] == [
        ("supervisor", True),
        ("daemon", False),
    ]
    assert (answer["report"]["valid"], answer["report"]["events"]) == (False, 3)
    rows = document("recent", "-n", "4")["events"]
    assert [row["origin"] for row in rows] == ["supervisor", "daemon", "daemon", "daemon"]


def test_covenant_state_moves_supervisors_log(
    covenant_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "state", 1)
    monkeypatch.setenv("COVENANT_STATE", str(tmp_path / "state"))
    assert document("verify")["report"]["logs"][0]["path"] == str(tmp_path / "state" / "audit")


@pytest.mark.parametrize("verb", ["verify", "recent"])
def test_no_log_is_not_green_and_nothing_is_made(covenant_home: Path, verb: str) -> None:
    with pytest.raises(errors.LedgerError, match="no log") as caught:
        CliRunner().invoke(cli, ["audit", verb], standalone_mode=False, catch_exceptions=False)
    assert "supervisor/audit" in caught.value.message
    assert not covenant_home.exists()


def test_removed_or_emptied_log_is_red_while_its_head_names_records(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 2)
    folder = covenant_home / "supervisor" / "audit"
    for name in ("events.jsonl", "events.chain.jsonl"):
        (folder / name).write_bytes(b"")
    assert call("verify").exit_code == 3
    for name in ("events.jsonl", "events.chain.jsonl"):
        (folder / name).unlink()
    assert call("verify").exit_code == 3
    folder.rmdir()
    assert call("verify").exit_code == 3


def test_log_without_its_head_or_key_is_red(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 2)
    (covenant_home / "supervisor" / "audit-head" / "ledger.pub").rename(covenant_home / "kept")
    assert call("verify").exit_code == 3
    (covenant_home / "kept").rename(covenant_home / "supervisor" / "audit-head" / "ledger.pub")
    assert call("verify").exit_code == 0
    (covenant_home / "supervisor" / "audit-head" / "head.json").unlink()
    assert call("verify").exit_code == 3
    # The records as well: an empty log beside its key is the rest of a cut log, also when another log is valid.
    fill(covenant_home, 1)
    for name in ("events.jsonl", "events.chain.jsonl"):
        (covenant_home / "supervisor" / "audit" / name).write_bytes(b"")
    assert call("verify").exit_code == 3
    for name in ("events.jsonl", "events.chain.jsonl"):
        (covenant_home / "supervisor" / "audit" / name).unlink()
    assert call("verify").exit_code == 3
    (covenant_home / "supervisor" / "audit-head" / "ledger.pub").unlink()
    assert call("verify").exit_code == 0  # no file is left that shows that there was a log


def test_symlink_in_place_of_file_is_refused(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 1)
    events = covenant_home / "supervisor" / "audit" / "events.jsonl"
    events.rename(covenant_home / "moved")
    events.symlink_to(covenant_home / "moved")
    result = CliRunner().invoke(cli, ["audit", "verify"], standalone_mode=False)
    assert isinstance(result.exception, errors.LedgerError)


def test_what_was_set_aside_is_reported(covenant_home: Path) -> None:
    base = covenant_home / "supervisor"
    fill(base, 1)
    with (base / "audit" / "events.jsonl").open("ab") as stream:
        stream.write(b'{"torn')
    assert "note: `events.jsonl` ends in 6 bytes that were not acknowledged" in call("verify").stdout
    assert call("verify").exit_code == 0
    fill(base, 1, at=1)
    assert "events.jsonl.aside-1-" in call("verify").stdout
    assert call("verify").exit_code == 0


def test_recent_shows_last_records_in_order_with_escapes_made_visible(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 5, reason="\x1b[2J\u202eevil\nline")
    result = call("recent", "-n", "2")
    assert [line.split("run_id=")[1].split()[0] for line in result.stdout.splitlines()] == ["r3", "r4"]
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout
    assert "2023-11-14T22:13:20.003Z supervisor run_state" in result.stdout
    answer = document("recent", "-n", "2")
    assert answer["kind"] == "audit_recent"
    assert [row["kind"]["run_id"] for row in answer["events"]] == ["r3", "r4"]
    assert answer["events"][0]["kind"]["reason"] == "\x1b[2J\u202eevil\nline"
    for limit, shown in (("5", 5), ("6", 5), ("4", 4), ("100", 5)):
        assert len(document("recent", "-n", limit)["events"]) == shown


def test_tree_of_any_language_steers_no_terminal(covenant_home: Path) -> None:
    """The id of a run at a Hermes API is that service's text."""
    intent, odd, base = "1" * 8, "child\x1b[2J\u202e", covenant_home / "supervisor"
    base.mkdir(mode=0o700, parents=True)
    with Ledger.open(base / "audit", head=base / "audit-head" / "head.json") as log:
        fields = {"intent_id": intent, "run_id": odd, "path": "会議 e\u0301\0👩🏽\r", "bytes": 1}
        log.append("hermes_file_written", fields, issuer=ISSUER, now_ms=1_700_000_000_000)
    shown = call("show", intent).stdout
    assert "\n  child\\x1b[2J\\u202e\n" in shown
    assert 'path="会議 e\u0301\\u0000👩🏽\\r"' in shown
    assert all(ch.isprintable() or ch == "\n" for ch in shown)
    assert document("show", intent)["tree"]["children"][0]["id"] == odd


def test_recent_survives_log_full_of_junk(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 1)
    junk = [b"\xff\x1b", b"[]", b"[" * 50_000, b'{"timestamp_ms":1e999,"kind":[]}', b'{"timestamp_ms":9e99}', b""]
    (covenant_home / "supervisor" / "audit" / "events.jsonl").write_bytes(b"".join(j + b"\n" for j in junk))
    result = call("recent")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(junk)
    assert "\x1b" not in result.stdout
    assert len(document("recent")["events"]) == len(junk)
    numbers = [b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}', b'{"a":1e9}']
    (covenant_home / "supervisor" / "audit" / "events.jsonl").write_bytes(b"".join(n + b"\n" for n in numbers))
    said = json.loads(call("recent", "--extended", "--json").stdout, parse_constant=pytest.fail)
    assert ["unreadable" in row for row in said["events"]] == [True, True, True, False]


def test_exit_status_of_real_command(covenant_home: Path, clone: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from covenant.cli.main import entry; entry()"
        return subprocess.run(
            [sys.executable, "-c", code, "audit", *arguments],
            cwd=clone,
            capture_output=True,
            text=True,
            env={**os.environ, "COVENANT_HOME": str(covenant_home)},
        )

    missing = run("verify", "--json")
    assert missing.returncode == 1
    assert json.loads(missing.stdout)["code"] == "ledger"
    fill(covenant_home / "supervisor", 2)
    assert run("verify").returncode == 0
    edit(covenant_home / "supervisor" / "audit" / "events.jsonl", b'"run_id":"r1"', b'"run_id":"r9"')
    assert run("verify").returncode == 3


def copied(line: bytes | None) -> None:
    """Write a daemon's log to the home, with a copy of a row of the supervisor's log."""
    home = Path(os.environ["COVENANT_HOME"])
    fields = {
        "intent_id": "i",
        "run_id": "r",
        "origin": "ab" * 32,
        "index": 41,
        "event_id": "e",
        "event_hash_hex": "1" * 64,
        "chain_hash_hex": "2" * 64,
        "row_type": "run_state",
        "line": None if line is None else line.decode(),
    }
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Ledger.open(home / "audit", head=home / "audit-head" / "head.json") as log:
        log.append("supervisor_row", fields, issuer=ISSUER, now_ms=1_700_000_000_000)


def test_copied_row_is_shown_as_it_was_with_its_origin(covenant_home: Path) -> None:
    fields = {"run_id": "r", "agent_id": "a", "operator": None, "state": "Running", "reason": "x\u202ey"}
    line = events.event_line("run_state", fields, event_id="e", issuer=ISSUER, now_ms=1_600_000_000_000)
    copied(line)
    shown = call("recent").stdout
    assert "2020-09-13T12:26:40.000Z daemon (from supervisor:abababababab#41) run_state run_id=r agent_id=a" in shown
    assert "\u202e" not in shown
    (row,) = document("recent")["events"]
    assert row["kind"]["line"].encode() == line
    assert row["kind"]["origin"] == "ab" * 32


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--kind", "run_state"], 1),
        (["--kind", "run_state", "--agent", "a", "--run", "r", "--intent", "i"], 1),
        (["--kind", "supervisor_row"], 1),
        (["--kind", "denied"], 0),
        (["--agent", "b"], 0),
        (["--kind", "run_state", "--since", "1h"], 0),
    ],
)
def test_filter_finds_row_that_only_a_copy_has(covenant_home: Path, options: list[str], count: int) -> None:
    """As for an operator who cannot read the supervisor's log."""
    fields = {"run_id": "r", "agent_id": "a", "operator": None, "state": "Running", "reason": "x"}
    copied(events.event_line("run_state", fields, event_id="e", issuer=ISSUER, now_ms=1_600_000_000_000))
    assert len(document("recent", *options)["events"]) == count


@pytest.mark.parametrize(
    "line",
    [None, b"no row", b'{"kind":{"type":"supervisor_row","line":"{}"}}', b'{"kind":7}', b"[" * 100_000],
    ids=["too long", "no json", "a copy of a copy", "no kind", "deep"],
)
def test_copy_without_row_is_shown_as_it_is(covenant_home: Path, line: bytes | None) -> None:
    copied(line)
    assert " daemon supervisor_row intent_id=i run_id=r" in call("recent").stdout


def test_log_whose_files_lack_what_its_head_carries_is_read_with_it(covenant_home: Path) -> None:
    """A power cut leaves this state in the write of a start that its caller waited for; the next start completes it."""
    base = covenant_home / "supervisor"
    fill(base, 2)
    fields = {"run_id": "carried", "agent_id": "a", "operator": "ann", "state": "s", "reason": "x"}
    with Ledger.open(base / "audit", head=base / "audit-head" / "head.json") as log:
        whole = [log.place / "events.jsonl", log.place / "events.chain.jsonl"]
        before = [path.stat().st_size for path in whole]
        log.append_all([Record("run_state", fields, 1_800_000_000_000)], issuer=ISSUER, carried=True)
    for path, size in zip(whole, before, strict=True):
        os.truncate(path, size)
    assert document("verify")["report"]["valid"]
    assert document("recent", "-n", "1")["events"][0]["kind"]["run_id"] == "carried"
    # The control: one byte less cuts another record, which the head does not carry.
    os.truncate(whole[0], before[0] - 1)
    assert not document("verify")["report"]["valid"]


class KilledError(BaseException):
    """The process was killed."""


def killed_before_its_head(base: Path, records: int, *, carried: bool) -> list[Path]:
    """Kill a writer when both files have its rows but the head does not; return the files."""

    def die() -> None:
        raise KilledError

    fields = {"run_id": "never", "agent_id": "a", "operator": "ann", "state": "s", "reason": "x"}
    made = [Record("run_state", fields, n) for n in range(records)]
    with Ledger.open(base / "audit", head=base / "audit-head" / "head.json") as log, pytest.raises(KilledError):
        log.append_all(made, issuer=ISSUER, carried=carried, meanwhile=die)
    return [base / "audit" / name for name in ("events.jsonl", "events.chain.jsonl")]


def shown() -> list[str]:
    return [row["kind"]["run_id"] for row in document("recent")["events"]]


@pytest.mark.parametrize("records", [1, 3])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("lacks", [None, 0, 1], ids=["both", "chain", "events"])
def test_what_nobody_acknowledged_is_not_shown_and_is_note(
    covenant_home: Path, records: int, carried: bool, lacks: int | None
) -> None:
    """The command reads the rows that a killed writer left as the next start will leave them."""
    base = covenant_home / "supervisor"
    fill(base, 2)
    ends = [(base / "audit" / name).stat().st_size for name in ("events.jsonl", "events.chain.jsonl")]
    files = killed_before_its_head(base, records, carried=carried)
    if lacks is not None:
        os.truncate(files[lacks], ends[lacks])
    assert shown() == ["r0", "r1"]
    answer = document("verify")
    assert answer["report"]["valid"]
    left = [path.name for path, end in zip(files, ends, strict=True) if path.stat().st_size > end]
    assert len(left) == (2 if lacks is None else 1)
    for name, note in zip(left, answer["report"]["notes"], strict=True):
        assert note.startswith(f"`{name}` ends in ")
        assert note.endswith(" bytes that were not acknowledged, which the next start sets aside")
    fill(base, 1, at=2)
    assert shown() == ["r0", "r1", "r2"]
    assert document("verify")["report"]["notes"] == []
    assert len(document("verify")["report"]["logs"][0]["set_aside"]) == len(left)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["events", "chain", "both"])
def test_what_no_writer_leaves_beyond_head_is_red(covenant_home: Path, which: tuple[int, ...]) -> None:
    """These are the rows of two writes, which the next start refuses."""
    base = covenant_home / "supervisor"
    fill(base, 2)
    head = (base / "audit-head" / "head.json").read_bytes()
    files = [base / "audit" / name for name in ("events.jsonl", "events.chain.jsonl")]
    ends = [path.stat().st_size for path in files]
    fill(base, 2, at=2)
    (base / "audit-head" / "head.json").write_bytes(head)
    for lacks in {0, 1} - set(which):
        os.truncate(files[lacks], ends[lacks])
    assert call("verify").exit_code == 3
    with pytest.raises(errors.LedgerError, match="that no writer of ours leaves"):
        fill(base, 1)


def test_tail_longer_than_writer_leaves_is_red(covenant_home: Path) -> None:
    base = covenant_home / "supervisor"
    fill(base, 2)
    with (base / "audit" / "events.jsonl").open("ab") as stream:
        stream.write(b"x" * log_files.MAX_TAIL_BYTES)
    assert call("verify").exit_code == 0  # the control
    with (base / "audit" / "events.jsonl").open("ab") as stream:
        stream.write(b"x")
    assert "after the signed head that no writer of ours leaves" in call("verify").stdout
    assert call("verify").exit_code == 3
    with pytest.raises(errors.LedgerError, match="that no writer of ours leaves"):
        fill(base, 1)


def test_what_is_set_aside_while_log_is_read_is_not_missed(
    covenant_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command unlocks before it reads the files: by then a writer has put other rows beyond the head."""
    base = covenant_home / "supervisor"
    fill(base, 2)
    killed_before_its_head(base, 2, carried=False)
    let_go = fcntl.flock

    def flock(fd: int, how: int) -> None:
        let_go(fd, how)
        if how == fcntl.LOCK_UN:
            monkeypatch.setattr(fcntl, "flock", let_go)
            fill(base, 3, at=2, reason="longer than what stood there")

    monkeypatch.setattr(fcntl, "flock", flock)
    answer = document("verify")
    assert answer["report"]["valid"]
    assert answer["report"]["events"] == 2
    assert shown() == ["r0", "r1", "r2", "r3", "r4"]


def test_old_head_beside_supervisors_log_hides_no_cut(covenant_home: Path) -> None:
    """An earlier version kept heads in a file, as the daemon's log does."""
    base = covenant_home / "supervisor"
    fill(base, 2)
    slots = (base / "audit-head" / "head.json").read_bytes()
    newest, other = sorted((slots[:4096].rstrip(), slots[4096:].rstrip()), key=lambda one: -json.loads(one)["index"])
    sizes = [(base / "audit" / name).stat().st_size for name in ("events.jsonl", "events.chain.jsonl")]
    fill(base, 3, at=2)
    (base / "audit-head" / "pending").write_bytes(write_ahead.opening(other, newest))
    for name, size in zip(("events.jsonl", "events.chain.jsonl"), sizes, strict=True):
        os.truncate(base / "audit" / name, size)
    assert not document("verify")["report"]["valid"]


def refusal(*arguments: str) -> errors.UsageError:
    """The error that a call is refused with."""
    with pytest.raises(errors.UsageError) as caught:
        CliRunner().invoke(cli, ["audit", *arguments], standalone_mode=False, catch_exceptions=False)
    return caught.value


def test_unknown_kind_is_refused_with_near_one(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 1)
    with pytest.raises(errors.UsageError, match="`run_stat` is no kind") as caught:
        CliRunner().invoke(
            cli, ["audit", "recent", "--kind", "run_stat"], standalone_mode=False, catch_exceptions=False
        )
    assert caught.value.hint is not None
    fix = caught.value.hint.split("`")[1]
    assert len(document("recent", "--kind", fix)["events"]) == 1
    quiet = call("recent", "--kind", "denied")
    assert (quiet.exit_code, quiet.stdout) == (0, "")
    assert "no row matches" in quiet.stderr


def test_time_of_a_row_is_taken_by_since(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 3)
    time = call("recent", "-n", "2").stdout.split()[0]
    assert time == "2023-11-14T22:13:20.001Z"
    assert len(document("recent", "--since", time)["events"]) == 2
    assert len(document("recent", "--since", "2023-11-14 22:13:20")["events"]) == 3
    with pytest.raises(errors.UsageError, match="`yesterday` is no time") as caught:
        CliRunner().invoke(
            cli, ["audit", "recent", "--since", "yesterday"], standalone_mode=False, catch_exceptions=False
        )
    assert caught.value.hint is not None
    assert document("recent", "--since", caught.value.hint.split()[-1])["events"] == []


def test_version_1s_kinds_alone_are_shown_where_daemon_has_a_log(covenant_home: Path) -> None:
    fill(covenant_home / "supervisor", 2)
    # Version 1 had no supervisor: without a daemon's log nothing is left out.
    only = call("recent", "--json")
    assert len(json.loads(only.stdout)["events"]) == 2
    assert only.stderr == ""
    fill(covenant_home, 1)
    both = call("recent", "--json")
    assert json.loads(both.stdout)["events"] == []
    fix = both.stderr.split("`")[1]
    assert len(json.loads(call("recent", "--json", fix).stdout)["events"]) == 3


def test_unreadable_record_is_not_left_out_without_a_word(covenant_home: Path) -> None:
    fill(covenant_home, 1)
    with open(covenant_home / "audit" / "events.jsonl", "ab") as log:
        log.write(b"no event\n")
    said = call("recent", "--json")
    assert json.loads(said.stdout)["events"] == []
    assert "records that cannot be read are left out too; covenant audit verify" in said.stderr


def test_filters_take_rows_of_a_run_that_name_it_alone(covenant_home: Path) -> None:
    """A row of a self-test or a denial names its run; the row of its start names the agent and the intent."""
    base = covenant_home / "supervisor"
    base.mkdir(mode=0o700, parents=True)
    with Ledger.open(base / "audit", head=base / "audit-head" / "head.json") as log:
        for at, (run, intent) in enumerate((("11112222", "aaaabbbb"), ("33334444", "ccccdddd"))):
            about = {"run_id": run, "operator": "ann"}
            start = {**STARTED, **about, "agent_id": f"agent-{at}", "intent_id": intent}
            log.append("run_started", start, issuer=ISSUER, now_ms=1_700_000_000_000 + at)
            tried = {**about, "name": "canaries", "passed": True, "detail": run}
            log.append("self_test", tried, issuer=ISSUER, now_ms=1_700_000_000_010 + at)

    def tried_in(*words: str) -> list[str]:
        return [row["kind"]["detail"] for row in document("recent", "--kind", "self_test", *words)["events"]]

    assert tried_in() == ["11112222", "33334444"]
    assert tried_in("--intent", "aaaa") == ["11112222"]
    assert tried_in("--agent", "agent-1") == ["33334444"]
    assert tried_in("--intent", "aaaa", "--agent", "agent-1") == tried_in("--intent", "eeee") == []
