"""Cuts of the supervisor's log: the rows left and archived, processes that keep a cut away, and a kill at each step."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covenant.cli.audit import proofs, read_logs
from policy import errors
from policy.audit_log import merkle
from sandbox.audit import log_cut, open_runs
from tests.cli_kit import call, document, refused
from tests.unit.sandbox.audit.test_log import ISSUER, opened, paths, report, state, write

__all__ = ["state"]


def _filled(place: Path, times: range) -> list[bytes]:
    with opened(place) as log:
        for now_ms in times:
            write(log, f"row {now_ms}", now_ms=now_ms)
    return _lines(place)


def _lines(place: Path) -> list[bytes]:
    return paths(place)[0].read_bytes().splitlines()


def _cut(place: Path, before_ms: int, archive: Path) -> log_cut.Done:
    return log_cut.cut(place, before_ms, archive, issuer=ISSUER, now_ms=1000)


def test_cut_archives_rows_and_goes_on(state: Path, tmp_path: Path) -> None:
    before = _filled(state, range(20))
    assert _cut(state, 8, tmp_path / "one") == log_cut.Done(8, 12, 7)
    assert _lines(tmp_path / "one") == before[:8]
    assert report(tmp_path / "one").valid
    # A row tells of the checkpoint over all rows before the cut.
    (told,) = _lines(state)[13:]
    assert _lines(state)[1:13] == before[8:]
    assert (json.loads(told)["kind"]["type"], json.loads(told)["kind"]["tree_size"]) == ("audit_checkpoint", 20)
    later = _filled(state, range(20, 24))
    assert report(state).valid
    assert later[1:-5] == before[8:]
    # A second cut takes the first one's record along, and the tree covers all rows that ever were.
    assert _cut(state, 22, tmp_path / "two") == log_cut.Done(15, 2, 21)
    archived = _lines(tmp_path / "two")
    assert json.loads(archived[0])["kind"]["type"] == "audit_rebased"
    assert report(tmp_path / "two").valid
    record = json.loads(_lines(state)[0])["kind"]
    whole = merkle.Frontier()
    for line in [*before, *later[-5:]]:
        whole.append(merkle.leaf_hash(line))
    assert (record["cut"], record["cut_now"], record["tree_size_before"]) == (23, 15, 25)
    assert record["tree_root_before_hex"] == whole.root().hex()
    assert report(state).valid
    assert _cut(state, 22, tmp_path / "three") == log_cut.Done(0, 4, None)
    assert not (tmp_path / "three").exists()


def test_cut_is_refused_while_the_log_is_open(state: Path, tmp_path: Path) -> None:
    _filled(state, range(4))
    ready, go_on = os.pipe(), os.pipe()
    with opened(state):
        with pytest.raises(errors.LedgerError, match="a supervisor or a run lives"):
            _cut(state, 9, tmp_path / "a")
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    # A shim that was forked from the supervisor outlives it.
    with pytest.raises(errors.LedgerError, match="a supervisor or a run lives"):
        _cut(state, 9, tmp_path / "a")
    os.write(go_on[1], b"x")
    os.waitpid(child, 0)
    assert _cut(state, 9, tmp_path / "a").cut == 4


def test_cut_keeps_runs_that_have_no_end(state: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "run_id": "r", "agent_id": "a", "operator": None, "intent_id": "i", "package": "p", "policy_digest": None,
        "payload_digest": None, "backend": "b", "signers": [], "not_enforced": [], "deadline_ms": 1,
        "deadline_clock": "c", "parent": None, "behalf_display": None, "behalf_pubkey": None,
    }  # fmt: skip
    with opened(state) as log:
        write(log, now_ms=1)
        log.append("run_started", fields, issuer=ISSUER, now_ms=2)
        write(log, now_ms=3)
    assert _cut(state, 9, tmp_path / "a") == log_cut.Done(1, 2, 1)
    kinds = [json.loads(line)["kind"]["type"] for line in _lines(state)]
    assert kinds == ["audit_rebased", "run_started", "run_state", "audit_checkpoint"]


def test_cut_refuses_a_log_that_does_not_verify(state: Path, tmp_path: Path) -> None:
    _filled(state, range(4))
    events = paths(state)[0]
    events.write_bytes(events.read_bytes().replace(b"row 1", b"row 9"))
    with pytest.raises(errors.LedgerError, match="does not verify"):
        _cut(state, 9, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_cut_that_is_killed_at_any_step_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    ends, step = set(), 0
    while True:
        step += 1
        home = tmp_path / str(step)
        place = home / "supervisor"
        place.mkdir(mode=0o700, parents=True)
        before = _filled(place, range(10))
        child = os.fork()
        if child == 0:
            killed_at(step, functools.partial(_cut, place, 5, home / "archive"))
        status = os.waitpid(child, 0)[1]
        monkeypatch.setenv("COVENANT_HOME", str(home))
        (shown,) = read_logs.read_logs()
        assert proofs.report(shown).valid, step
        after = _filled(place, range(10, 12))
        assert report(place).valid
        assert not list(place.glob("audit/*.new"))
        if after[:-2] == before:
            ends.add("nothing cut")
        else:
            assert after[1:-3] == before[5:]
            assert _lines(home / "archive") == before[:5]
            assert report(home / "archive").valid
            ends.add("cut")
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert ends == {"nothing cut", "cut"}
    assert step > 20


def killed_at(step: int, work: Callable[[], object]) -> None:
    """Run the work and end the process at the step-th change of a disk; at its end it ends with 0."""
    left = step

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call_(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os._exit(9)
            return real(*arguments, **named)

        return call_

    for name in ("rename", "unlink", "fsync", "fdatasync", "write", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


def test_archive_verb_cuts_and_says_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    place = home / "supervisor"
    place.mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    _filled(place, range(6))
    with opened(place):
        hint = refused("ledger", "audit", "archive", tmp_path / "old", "--older-than", "1d").hint
    assert "systemctl stop covenant-supervisor" in hint
    made = document("audit", "archive", tmp_path / "old", "--older-than", "1d")
    assert (made["cut"], made["left"], made["archive"]) == (6, 0, str(tmp_path / "old"))
    assert call("audit", "verify").exit_code == 0
    monkeypatch.setenv("COVENANT_STATE", str(tmp_path / "old"))
    assert call("audit", "verify").exit_code == 0
    assert "row 3" in call("audit", "recent").output
    assert open_runs.settled(place) == 0
